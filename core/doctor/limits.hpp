// Limits of this process, and io_uring.
#pragma once

#include <cstdint>
#include <string>

#include "doctor/check.hpp"
#include "doctor/needs.hpp"

namespace zr::host::doctor {

inline constexpr uint64_t kUnlimited = ~uint64_t{0};  // RLIM_INFINITY

/// A resource limit of this process.
struct Limit {
  uint64_t soft = kUnlimited, hard = kUnlimited;
};
/// The limits that jobs inherit from this process.
struct LimitFacts {
  Limit locked, files, processes, file_size, address_space;  // memory in bytes
  bool is_root = false;
  bool locks_freely = false;    // CAP_IPC_LOCK: no limit of locked memory applies
  int64_t processes_left = -1;  // that the control groups permit; -1: no limit
  std::string group{};          // the control group with that limit
  int cores = 1;                // see CoreFacts::usable
};
/// Reads the limits and capabilities of this process, and the control groups below `root`.
LimitFacts limit_facts(const std::string& root = "");
/// The lines about locked memory, open files, processes, file size and address space.
Checks limit_checks(const LimitFacts& facts, const JobNeeds& needs);

/// What happens if this process uses io_uring.
struct IoUringFacts {
  int setup_error = 0, enter_error = 0;  // errno of the two system calls
  int64_t disabled = -1;                 // kernel.io_uring_disabled; -1: the kernel does not have it
  bool filtered = false;                 // a seccomp filter, as in a container
  std::string kernel{};                  // "6.1.0-18-amd64"
};
/// Creates an empty ring, enters it, and closes it.
IoUringFacts io_uring_facts();
/// One line: offload tiers on disks use io_uring, or threads, which are slower.
Checks io_uring_checks(const IoUringFacts& facts, const JobNeeds& needs, bool is_root);

}  // namespace zr::host::doctor
