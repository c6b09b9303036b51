#include "doctor/memory.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>

#include "base/cgroup.hpp"
#include "base/text.hpp"

namespace zr::host::doctor {

namespace {

// Measured: the peak resident memory of a program that has loaded libtorch and has no model is 120 MiB.
constexpr int64_t kProcessBytes = int64_t{128} << 20;
constexpr int64_t kFewSharedBytes = int64_t{64} << 20;  // the default of Docker, too small for other libraries

// What one control group leaves. Inactive page cache counts as free, because the kernel reclaims it first.
int64_t left_in(const std::string& folder, bool v2) {
  const int64_t limit = number_in(folder + (v2 ? "/memory.max" : "/memory.limit_in_bytes"));
  const int64_t used = number_in(folder + (v2 ? "/memory.current" : "/memory.usage_in_bytes"));
  if (limit < 0 || used < 0) return -1;
  const int64_t cache = number_after(folder + "/memory.stat", v2 ? "inactive_file " : "total_inactive_file ", 0);
  return std::max<int64_t>(limit - used + std::min(cache, used), 0);
}

// "always [madvise] never" -> "madvise".
std::string active_word(const std::string& path) {
  std::ifstream in(path);
  const std::string text(std::istreambuf_iterator<char>(in), {});
  const auto begin = text.find('['), end = text.find(']');
  return begin < end && end != text.npos ? text.substr(begin + 1, end - begin - 1) : "";
}

Check available_check(const MemoryFacts& facts, const JobNeeds& needs) {
  Check check{"memory", "available", Verdict::ok, ""};
  if (facts.available < 0) {
    check.verdict = Verdict::warning;
    check.message = "unknown, because /proc/meminfo has no MemAvailable";
    return check;
  }
  check.message = fmt::format("{} of {}", bytes_text(facts.available), bytes_text(facts.total));
  if (!facts.group.empty()) check.message += fmt::format(" (limit of control group {})", facts.group);
  const int64_t per_rank = kProcessBytes + needs.communicator_bytes, needed = per_rank * needs.ranks;
  if (facts.available >= needed) return check;
  const int64_t fitting = facts.available / per_rank;
  check.worsen(Verdict::problem,
               fmt::format("; {} {} {} before the model (libtorch and the communicator's buffers)",
                           count_text(needs.ranks, "rank"), needs.ranks == 1 ? "needs" : "need", bytes_text(needed)));
  if (fitting >= 1 && needs.given())
    check.command = fmt::format("zeroth train {} job.ranks={}", shell_word(needs.file), fitting);
  else
    check.message +=
        facts.group.empty() ? "; end other programs" : "; raise the container's limit, or end other programs";
  return check;
}

Check commit_check(const MemoryFacts& facts, const JobNeeds& needs, bool is_root) {
  const int64_t needed = (kProcessBytes + needs.communicator_bytes) * needs.ranks;
  Check check{"memory", "overcommit", Verdict::ok,
              fmt::format("vm.overcommit_memory is 2, and {} can still be reserved", bytes_text(facts.commit))};
  // Programs reserve more address space than they use: libtorch alone reserves several times its resident memory.
  if (facts.commit >= std::max(facts.available, needed)) return check;
  check.verdict = facts.commit < needed ? Verdict::problem : Verdict::warning;
  check.message += ", which is less than the available memory";
  check.command = as_root("sysctl -w vm.overcommit_memory=0", is_root);
  return check;
}

int write_error_in(const char* folder) {
  const int fd = ::open(folder, O_TMPFILE | O_RDWR | O_EXCL | O_CLOEXEC, 0600);
  if (fd < 0) return errno == EOPNOTSUPP || errno == EISDIR || errno == EINVAL ? 0 : errno;  // no unnamed files
  const int error = ::ftruncate(fd, 4096) == 0 ? 0 : errno;
  ::close(fd);
  return error;
}

}  // namespace

MemoryFacts memory_facts(const std::string& root) {
  MemoryFacts facts;
  const std::string info = root + "/proc/meminfo";
  facts.total = number_after(info, "MemTotal:", 0) * 1024;
  if (const int64_t available = number_after(info, "MemAvailable:", -1); available >= 0)
    facts.available = available * 1024;
  for (const ControlGroup& group : control_groups(root, Controller::memory))
    if (const int64_t left = left_in(root + group.folder, group.v2);
        left >= 0 && (facts.available < 0 || left < facts.available)) {
      facts.available = left;
      facts.group = group.folder;
    }
  if (number_in(root + "/proc/sys/vm/overcommit_memory") == 2)
    facts.commit =
        std::max<int64_t>(0, (number_after(info, "CommitLimit:", 0) - number_after(info, "Committed_AS:", 0)) * 1024);
  facts.huge_pages = active_word(root + "/sys/kernel/mm/transparent_hugepage/enabled");
  return facts;
}

Checks memory_checks(const MemoryFacts& facts, const JobNeeds& needs, bool is_root) {
  Checks checks{available_check(facts, needs)};
  if (facts.commit >= 0) checks.push_back(commit_check(facts, needs, is_root));
  Check pages{"memory", "huge pages", Verdict::ok, fmt::format("transparent huge pages are \"{}\"", facts.huge_pages)};
  if (facts.huge_pages.empty()) {
    pages.message = "the kernel has no transparent huge pages; large buffers use small pages";
  } else if (facts.huge_pages == "never") {
    pages.worsen(Verdict::warning, ", so large buffers use small pages and are slower",
                 fmt::format("echo madvise | {}", as_root("tee /sys/kernel/mm/transparent_hugepage/enabled", is_root)));
  }
  checks.push_back(pages);
  return checks;
}

SharedMemoryFacts shared_memory_facts() {
  SharedMemoryFacts facts;
  facts.memfd_noexec = number_in("/proc/sys/vm/memfd_noexec");
  if (const int fd = ::memfd_create("zeroth-doctor", MFD_CLOEXEC | MFD_ALLOW_SEALING); fd < 0) {
    facts.memfd_error = errno;
  } else {
    const int reopened = ::open(fmt::format("/proc/{}/fd/{}", ::getpid(), fd).c_str(), O_RDWR | O_CLOEXEC);
    if (reopened < 0) facts.reopen_error = errno;
    if (reopened >= 0) ::close(reopened);
    ::close(fd);
  }
  constexpr const char* kFolder = "/dev/shm";
  struct stat here {
  }, above{};
  facts.mounted = ::stat(kFolder, &here) == 0 && ::stat("/dev", &above) == 0 && here.st_dev != above.st_dev;
  if (!facts.mounted) return facts;
  struct statvfs space {};
  if (::statvfs(kFolder, &space) == 0) {
    facts.folder_size = static_cast<int64_t>(space.f_blocks * space.f_frsize);
    facts.folder_free = static_cast<int64_t>(space.f_bavail * space.f_frsize);
  }
  facts.folder_error = write_error_in(kFolder);
  return facts;
}

Checks shared_memory_checks(const SharedMemoryFacts& facts, const JobNeeds& needs, bool is_root) {
  Check files{"memory", "memory files", Verdict::ok, "ranks of this machine can share memory (memfd_create)"};
  if (const int error = facts.memfd_error ? facts.memfd_error : facts.reopen_error) {
    // Without a file, more than one rank is possible. A single rank shares nothing.
    files.verdict = needs.given() && needs.ranks == 1 ? Verdict::warning : Verdict::problem;
    files.message =
        fmt::format("{} fails ({}), so ranks of this machine cannot share memory",
                    facts.memfd_error ? "memfd_create" : "opening a memory file through /proc", std::strerror(error));
    if (facts.memfd_error && facts.memfd_noexec == 2)
      files.command = as_root("sysctl -w vm.memfd_noexec=1", is_root);
    else
      files.message += facts.memfd_error ? "; permit memfd_create in the sandbox" : "; permit it in the sandbox";
  }
  Check folder{"memory", "/dev/shm", Verdict::ok,
               fmt::format("{} free of {}; Zeroth itself does not use it", bytes_text(facts.folder_free),
                           bytes_text(facts.folder_size))};
  if (!facts.mounted) {
    folder.verdict = Verdict::warning;
    folder.message = "not mounted; Zeroth itself does not use it, but other communication libraries do";
    folder.command = as_root(is_root ? "mkdir -p /dev/shm && mount -t tmpfs -o mode=1777 tmpfs /dev/shm"
                                     : "sh -c 'mkdir -p /dev/shm && mount -t tmpfs -o mode=1777 tmpfs /dev/shm'",
                             is_root);
  } else if (facts.folder_error) {
    folder.verdict = Verdict::warning;
    folder.message = fmt::format(
        "this user cannot write to it ({}); Zeroth itself does not use it, but other communication libraries do",
        std::strerror(facts.folder_error));
    folder.command =
        as_root(facts.folder_error == EROFS ? "mount -o remount,rw /dev/shm" : "chmod 1777 /dev/shm", is_root);
  } else if (facts.folder_size <= kFewSharedBytes) {
    folder.worsen(Verdict::warning, ", but other communication libraries need more",
                  as_root("mount -o remount,size=50% /dev/shm", is_root));
  }
  return {files, folder};
}

}  // namespace zr::host::doctor
