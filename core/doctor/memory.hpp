// Memory: what is available, how it is shared between ranks, huge pages.
#pragma once

#include <cstdint>
#include <string>

#include "doctor/check.hpp"
#include "doctor/needs.hpp"

namespace zr::host::doctor {

/// The memory that this process can use.
struct MemoryFacts {
  int64_t total = 0;       // of the machine
  int64_t available = -1;  // the smallest of MemAvailable and of what the control groups leave; -1: unknown
  std::string group{};     // the control group that limits it; "" if none does
  int64_t commit = -1;  // left until CommitLimit, if the kernel enforces it (vm.overcommit_memory = 2); -1: it does not
  std::string huge_pages{};  // the active word of transparent_hugepage/enabled; "" if the kernel has none
};
/// Reads /proc/meminfo, the control groups and the kernel's settings below `root`.
MemoryFacts memory_facts(const std::string& root = "");
/// The lines about available memory and huge pages.
Checks memory_checks(const MemoryFacts& facts, const JobNeeds& needs, bool is_root);

/// How ranks of this machine can share memory. The communicator for one node uses memory files (memfd_create), which
/// its peers open through /proc; it uses nothing in /dev/shm. Other libraries do.
struct SharedMemoryFacts {
  int memfd_error = 0;        // an errno
  int reopen_error = 0;       // of opening the memory file through /proc
  int64_t memfd_noexec = -1;  // vm.memfd_noexec; -1: the kernel does not have it
  bool mounted = false;       // /dev/shm is a mount point
  int64_t folder_size = 0, folder_free = 0;
  int folder_error = 0;
};
/// Creates a memory file and an unnamed file in /dev/shm, which the kernel deletes at once.
SharedMemoryFacts shared_memory_facts();
/// The lines about memory files and /dev/shm.
Checks shared_memory_checks(const SharedMemoryFacts& facts, const JobNeeds& needs, bool is_root);

}  // namespace zr::host::doctor
