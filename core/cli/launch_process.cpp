#include "cli/launch_process.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <utility>

#include "base/error.hpp"

namespace zr::host::cli {

namespace {
constexpr std::array kHandled{SIGINT, SIGTERM, SIGHUP, SIGCHLD, SIGPIPE, SIGXFSZ};
constexpr int kPacketPipeBytes = 1 << 20;
constexpr auto kKillTimeout = std::chrono::seconds(5);

struct Pipe {
  int read = -1, write = -1;
  explicit Pipe(bool packets = false) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC | (packets ? O_DIRECT : 0)) != 0)
      fail_environment(fmt::format("cannot open a pipe{}: {}", packets ? " of packets" : "", std::strerror(errno)));
    read = ends[0];
    write = ends[1];
    if (packets) fcntl(write, F_SETPIPE_SZ, kPacketPipeBytes);  // each packet uses a page; a smaller pipe works too
  }
  Pipe(const Pipe&) = delete;
  ~Pipe() {
    if (read >= 0) close(read);
    if (write >= 0) close(write);
  }
  int take_read() { return std::exchange(read, -1); }
};

std::vector<char*> pointers(const std::vector<std::string>& texts) {
  std::vector<char*> result;
  for (const auto& text : texts) result.push_back(const_cast<char*>(text.c_str()));
  result.push_back(nullptr);
  return result;
}

bool executable_file(const std::string& path) {
  struct stat info {};
  return stat(path.c_str(), &info) == 0 && S_ISREG(info.st_mode) && access(path.c_str(), X_OK) == 0;
}

struct ChildPlan {
  const char* file;
  char** arguments;
  char** environment;
  int in, out, err, status;
  pid_t parent;
  const sigset_t* mask;
};

// Runs between fork() and execve(): uses only async-signal-safe calls.
[[noreturn]] void become(const ChildPlan& plan) {
  setpgid(0, 0);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != plan.parent) _exit(127);
  for (const int signal : kHandled) {
    struct sigaction action {};
    sigaction(signal, nullptr, &action);
    if (action.sa_handler == SIG_IGN && signal != SIGPIPE && signal != SIGXFSZ) continue;
    action = {};
    action.sa_handler = SIG_DFL;
    sigaction(signal, &action, nullptr);
  }
  sigprocmask(SIG_SETMASK, plan.mask, nullptr);
  if ((plan.in >= 0 && dup2(plan.in, 0) < 0) || dup2(plan.out, 1) < 0 || dup2(plan.err, 2) < 0) _exit(127);
  execve(plan.file, plan.arguments, plan.environment);
  const int error = errno;
  [[maybe_unused]] const auto written = write(plan.status, &error, sizeof error);
  _exit(127);
}

[[noreturn]] void fail_exec(const std::string& file, int error) {
  const std::string text = fmt::format("'{}' cannot be executed: ", file);
  if (error == ENOEXEC)
    fail_user(text + "it is neither a program for this machine nor a script that begins with #!; give another file");
  if (error == ENOENT)
    fail_environment(
        fmt::format("{}its interpreter or loader does not exist; install it (a script names it in its first line, a "
                    "program in `readelf -l {}`)",
                    text, file));
  fail_environment(text + std::strerror(error));
}
}  // namespace

std::string find_program(const std::string& name) {
  if (name.empty()) fail_user("the program name is empty; usage: zeroth launch -n 2 -- PROGRAM ARGS");
  struct stat info {};
  if (name.find('/') != std::string::npos) {
    if (stat(name.c_str(), &info) != 0)
      fail_user(fmt::format("program '{}': {}; give the path of a program", name, std::strerror(errno)));
    if (S_ISDIR(info.st_mode)) fail_user(fmt::format("program '{}' is a folder; give the path of a program", name));
    if (!executable_file(name)) fail_user(fmt::format("program '{}' is not executable: chmod +x {}", name, name));
    return name;
  }
  const char* set = std::getenv("PATH");
  std::string path = set ? set : "/usr/local/bin:/usr/bin:/bin";
  for (std::size_t begin = 0; begin <= path.size();) {
    const auto end = std::min(path.find(':', begin), path.size());
    const std::string folder = path.substr(begin, end - begin);
    std::string file = fmt::format("{}/{}", folder.empty() ? "." : folder, name);
    if (executable_file(file)) return file;
    begin = end + 1;
  }
  fail_user(fmt::format(
      "program '{}' was not found in PATH; {}", name,
      stat(name.c_str(), &info) == 0 ? "the current folder has one: use ./" + name : "give the path of a program"));
}

Process start_process(const ProcessOptions& options) {
  Pipe out(options.packets), status;
  std::optional<Pipe> err;
  if (!options.one_pipe) err.emplace(options.packets);
  const int null = options.reads_stdin ? -1 : open("/dev/null", O_RDONLY | O_CLOEXEC);
  const auto arguments = pointers(options.arguments), environment = pointers(options.environment);
  sigset_t all_signals, previous_mask;
  sigfillset(&all_signals);
  pthread_sigmask(SIG_SETMASK, &all_signals, &previous_mask);
  const ChildPlan plan{options.file.c_str(),
                       const_cast<char**>(arguments.data()),
                       const_cast<char**>(environment.data()),
                       null,
                       out.write,
                       err ? err->write : out.write,
                       status.write,
                       getpid(),
                       &previous_mask};
  const pid_t pid = fork();
  if (pid == 0) become(plan);
  const int fork_error = errno;
  pthread_sigmask(SIG_SETMASK, &previous_mask, nullptr);
  if (null >= 0) close(null);
  if (pid < 0)
    fail_environment(std::string("cannot start another process: ") + std::strerror(fork_error) +
                     (fork_error == EAGAIN ? "; raise the limit on processes (ulimit -u, or the container's)" : ""));
  setpgid(pid, pid);  // the child does the same, because either process may run first
  close(std::exchange(status.write, -1));
  int error = 0;
  ssize_t bytes_read;
  while ((bytes_read = read(status.read, &error, sizeof error)) < 0 && errno == EINTR) {
  }
  if (bytes_read == sizeof error) {
    waitpid(pid, nullptr, 0);
    fail_exec(options.file, error);
  }
  return {pid, out.take_read(), err ? err->take_read() : -1};
}

std::optional<control::ExitStatus> reap(pid_t pid, pid_t group,
                                        const std::function<bool(const control::ExitStatus&)>& keeps) {
  siginfo_t info{};
  if (waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOHANG | WNOWAIT) != 0 || info.si_pid == 0) return {};
  control::ExitStatus exit_status;
  (info.si_code == CLD_EXITED ? exit_status.code : exit_status.signal) = info.si_status;
  // Before waitpid(): until then the zombie keeps the group id from being reused.
  if (!keeps || !keeps(exit_status)) kill(group ? -group : -pid, SIGKILL);
  waitpid(pid, nullptr, 0);
  return exit_status;
}

std::size_t packet_bytes() { return static_cast<std::size_t>(sysconf(_SC_PAGESIZE)); }

namespace {
std::vector<pid_t> children() {
  std::vector<pid_t> found;
  std::error_code error;
  for (const auto& thread : std::filesystem::directory_iterator("/proc/self/task", error)) {
    std::ifstream list(thread.path() / "children");
    for (pid_t pid; list >> pid;) found.push_back(pid);
  }
  return found;
}

bool has_variable(pid_t pid, const std::string& variable) {
  std::ifstream environment(fmt::format("/proc/{}/environ", pid));
  for (std::string entry; std::getline(environment, entry, '\0');)
    if (entry == variable) return true;
  return false;
}
}  // namespace

OrphanAdoption::OrphanAdoption() { prctl(PR_SET_CHILD_SUBREAPER, 1); }
OrphanAdoption::~OrphanAdoption() { prctl(PR_SET_CHILD_SUBREAPER, 0); }

void OrphanAdoption::reap_all_but(pid_t except) const {
  for (siginfo_t info{}; waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) == 0; info = {}) {
    if (info.si_pid == 0 || info.si_pid == except) return;
    waitpid(info.si_pid, nullptr, 0);
  }
}

void OrphanAdoption::reap_others(const std::set<pid_t>& except) const {
  for (const pid_t pid : children())
    if (!except.contains(pid)) waitpid(pid, nullptr, WNOHANG);
}

// A killed process has passed its children on when waitpid() returns it.
int OrphanAdoption::kill_with(const std::string& variable) const {
  std::set<pid_t> ending;
  int killed = 0;
  const auto until = std::chrono::steady_clock::now() + kKillTimeout;
  do {
    std::erase_if(ending, [](pid_t pid) { return waitpid(pid, nullptr, WNOHANG) == pid; });
    const bool any_left = !ending.empty();
    for (const pid_t pid : children()) {
      if (ending.count(pid) || !has_variable(pid, variable)) continue;
      kill(pid, SIGKILL);
      ending.insert(pid);
      ++killed;
    }
    if (!any_left && ending.empty()) break;
    usleep(1000);
  } while (std::chrono::steady_clock::now() < until);
  return killed;
}

long kernel_oom_kills() {
  std::ifstream file("/proc/vmstat");
  std::string name;
  long value = 0;
  while (file >> name >> value)
    if (name == "oom_kill") return value;
  return -1;
}

}  // namespace zr::host::cli
