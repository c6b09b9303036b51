#include "doctor/limits.hpp"

#include <fmt/format.h>
#include <linux/io_uring.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>

#include "base/cgroup.hpp"
#include "base/text.hpp"

namespace zr::host::doctor {

namespace {

constexpr int kLockCapability = 14;  // CAP_IPC_LOCK

Limit limit_of(__rlimit_resource resource) {
  rlimit limit{};
  if (::getrlimit(resource, &limit) != 0) return {};
  const auto value = [](rlim_t of) { return of == RLIM_INFINITY ? kUnlimited : uint64_t{of}; };
  return {value(limit.rlim_cur), value(limit.rlim_max)};
}

bool has_capability(const std::string& root, int capability) {
  std::ifstream in(root + "/proc/self/status");
  constexpr std::string_view kWord = "CapEff:";
  for (std::string line; std::getline(in, line);)
    if (line.starts_with(kWord)) return (std::strtoull(line.c_str() + kWord.size(), nullptr, 16) >> capability) & 1;
  return false;
}

std::string size_text(uint64_t bytes) {
  return bytes == kUnlimited ? "unlimited" : bytes_text(static_cast<int64_t>(std::min(bytes, uint64_t{1} << 62)));
}
std::string number_text(uint64_t number) { return number == kUnlimited ? "unlimited" : fmt::format("{}", number); }

// The shell command that raises a limit to `value` for what the shell starts. `flag` and `unit`: of ulimit; `name`: of
// prlimit, which also raises the hard limit, for which it needs root.
struct Raise {
  char flag;
  uint64_t unit;
  const char* name;
};
std::string command_of(const Raise& raise, const Limit& limit, uint64_t value, bool is_root) {
  const bool unlimited = value == kUnlimited;
  if (limit.hard >= value)
    return fmt::format("ulimit -S -{} {}", raise.flag,
                       unlimited ? "unlimited" : fmt::format("{}", (value + raise.unit - 1) / raise.unit));
  return as_root(fmt::format("prlimit --pid $$ --{}={}", raise.name, number_text(value)), is_root);
}

Check locked_check(const LimitFacts& facts, const JobNeeds& needs) {
  Check check{"limits", "locked memory", Verdict::ok,
              facts.locks_freely ? "no limit for this user" : size_text(facts.locked.soft)};
  const auto needed = static_cast<uint64_t>(needs.registered_bytes * needs.ranks);  // the kernel counts it per user
  if (facts.locks_freely || facts.locked.soft >= needed) return check;
  check.worsen(
      Verdict::warning,
      fmt::format("; the offload tier on disk registers {} with the kernel, and transfers from other memory are slower",
                  size_text(needed)),
      command_of({'l', 1024, "memlock"}, facts.locked, kUnlimited, facts.is_root));
  if (facts.locked.hard != kUnlimited && facts.locked.hard >= needed)
    check.command = command_of({'l', 1024, "memlock"}, facts.locked, needed, facts.is_root);
  return check;
}

Check files_check(const LimitFacts& facts, const JobNeeds& needs) {
  // The launcher has two pipes and one connection per rank, a rank has one memory file per peer.
  const auto needed = uint64_t{64} + 4 * static_cast<uint64_t>(needs.ranks);
  Check check{"limits", "open files", Verdict::ok, number_text(facts.files.soft)};
  if (facts.files.soft >= needed) return check;
  check.worsen(Verdict::problem, fmt::format("; a job of {} needs {}", count_text(needs.ranks, "rank"), needed),
               command_of({'n', 1, "nofile"}, facts.files, needed, facts.is_root));
  return check;
}

Check processes_check(const LimitFacts& facts, const JobNeeds& needs) {
  const int threads = needs.threads > 0 ? needs.threads : std::max(1, facts.cores / needs.ranks);
  // Per rank: the threads of Zeroth and of libtorch, and those of the job's store, the communicator and the tiers.
  const auto needed = static_cast<uint64_t>(needs.ranks) * (2 * static_cast<uint64_t>(threads) + 8) + 16;
  const bool by_user = !facts.is_root && facts.processes.soft < needed,
             by_group = facts.processes_left >= 0 && static_cast<uint64_t>(facts.processes_left) < needed;
  Check check{"limits", "processes", Verdict::ok,
              facts.is_root ? "no limit for this user" : fmt::format("{} per user", number_text(facts.processes.soft))};
  if (facts.processes_left >= 0)
    check.message += fmt::format(", {} left in control group {}", facts.processes_left, facts.group);
  if (!by_user && !by_group) return check;
  check.worsen(Verdict::problem, fmt::format("; a job of {} needs about {} processes and threads",
                                             count_text(needs.ranks, "rank"), needed));
  if (by_user)
    check.command = command_of({'u', 1, "nproc"}, facts.processes, needed, facts.is_root);
  else
    check.message += "; raise pids.max of that control group (in a container: its limit of processes)";
  return check;
}

// A limit that should be unlimited; no line if it is.
void add_unlimited(Checks& checks, const char* name, const Limit& limit, const char* effect, const Raise& raise,
                   bool is_root) {
  if (limit.soft == kUnlimited) return;
  checks.push_back({"limits", name, Verdict::warning, fmt::format("{}; {}", size_text(limit.soft), effect),
                    command_of(raise, limit, kUnlimited, is_root)});
}

std::string uring_remedy(const IoUringFacts& facts, int error, bool is_root, std::string& message) {
  if (error == ENOSYS) {
    message += "; use a kernel from Linux 5.1 on that is built with CONFIG_IO_URING";
    return "";
  }
  if (error == ENOMEM) return as_root("prlimit --pid $$ --memlock=unlimited", is_root);
  if (facts.disabled > 0) return as_root("sysctl -w kernel.io_uring_disabled=0", is_root);
  message += facts.filtered ? "; permit io_uring_setup, io_uring_enter and io_uring_register in the seccomp profile of "
                              "the container (docker run --security-opt seccomp=PROFILE)"
                            : "; permit io_uring in the security module of this system";
  return "";
}

}  // namespace

LimitFacts limit_facts(const std::string& root) {
  LimitFacts facts;
  facts.locked = limit_of(RLIMIT_MEMLOCK);
  facts.files = limit_of(RLIMIT_NOFILE);
  facts.processes = limit_of(RLIMIT_NPROC);
  facts.file_size = limit_of(RLIMIT_FSIZE);
  facts.address_space = limit_of(RLIMIT_AS);
  facts.is_root = ::geteuid() == 0;
  facts.locks_freely = has_capability(root, kLockCapability);
  for (const ControlGroup& group : control_groups(root, Controller::processes)) {
    const int64_t limit = number_in(root + group.folder + "/pids.max");
    const int64_t used = number_in(root + group.folder + "/pids.current");
    if (limit < 0 || used < 0) continue;
    const int64_t left = std::max<int64_t>(0, limit - used);
    if (facts.processes_left >= 0 && left >= facts.processes_left) continue;
    facts.processes_left = left;
    facts.group = group.folder;
  }
  cpu_set_t set;
  facts.cores = ::sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
  return facts;
}

Checks limit_checks(const LimitFacts& facts, const JobNeeds& needs) {
  Checks checks{locked_check(facts, needs), files_check(facts, needs), processes_check(facts, needs)};
  add_unlimited(checks, "file size", facts.file_size, "larger checkpoints and files of offload tiers cannot be written",
                {'f', 1024, "fsize"}, facts.is_root);
  add_unlimited(checks, "address space", facts.address_space,
                "libtorch and the memory of other ranks take more addresses than memory", {'v', 1024, "as"},
                facts.is_root);
  return checks;
}

IoUringFacts io_uring_facts() {
  IoUringFacts facts;
  io_uring_params parameters{};
  const auto ring = static_cast<int>(::syscall(SYS_io_uring_setup, 2, &parameters));
  if (ring < 0) {
    facts.setup_error = errno;
  } else {
    if (::syscall(SYS_io_uring_enter, ring, 0, 0, 0, nullptr, 0) < 0) facts.enter_error = errno;
    ::close(ring);
  }
  facts.disabled = number_in("/proc/sys/kernel/io_uring_disabled");
  facts.filtered = number_after("/proc/self/status", "Seccomp:", 0) > 0;
  utsname system{};
  if (::uname(&system) == 0) facts.kernel = system.release;
  return facts;
}

Checks io_uring_checks(const IoUringFacts& facts, const JobNeeds& needs, bool is_root) {
  const int error = facts.setup_error ? facts.setup_error : facts.enter_error;
  Check check{"disk", "io_uring", Verdict::ok, fmt::format("permitted (Linux {})", facts.kernel)};
  if (!error) return {check};
  check.message = fmt::format("{} fails on Linux {} ({})", facts.setup_error ? "io_uring_setup" : "io_uring_enter",
                              facts.kernel, std::strerror(error));
  if (needs.given() && !needs.has_disk_tier) {
    check.message += "; this job has no offload tier on disk";
    return {check};
  }
  check.worsen(Verdict::warning, ", so offload tiers on disk use threads, which are slower");
  if (facts.disabled > 0) check.message += fmt::format("; kernel.io_uring_disabled is {}", facts.disabled);
  check.command = uring_remedy(facts, error, is_root, check.message);
  return {check};
}

}  // namespace zr::host::doctor
