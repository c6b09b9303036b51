// ZR-P..: what a plug-in leaves alone in the process that it shares.
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <cfenv>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <set>
#include <string>

#include "conform/library.hpp"
#include "conform/rule.hpp"
#include "conform/use.hpp"

namespace zr::conform {

namespace {

std::set<int> numbers_in(const char* folder) {
  std::set<int> numbers;
  DIR* open = ::opendir(folder);
  if (!open) return numbers;
  while (const dirent* entry = ::readdir(open))
    if (entry->d_name[0] != '.') numbers.insert(std::atoi(entry->d_name));
  numbers.erase(::dirfd(open));  // of this function
  ::closedir(open);
  return numbers;
}
std::set<int> threads() { return numbers_in("/proc/self/task"); }

// Uses an instance of the component, calls `check` while it lives, and `after` when it is destroyed.
void observe(Case& test, const std::function<void()>& before, const std::function<void()>& check,
             const std::function<void()>& after) {
  as_ranks(test, [&](const HostOptions& options) {
    before();
    TestHost host(options);
    Instance instance(test, host);
    use_component(test, instance, {});
    check();
    instance.destroy();
    after();
  });
}

void signal_handlers_stay(Case& test) {
  struct sigaction handlers[NSIG];
  const auto record = [&] {
    for (int signal = 1; signal < NSIG; ++signal) ::sigaction(signal, nullptr, &handlers[signal]);
  };
  const auto compare = [&] {
    for (int signal = 1; signal < NSIG; ++signal) {
      struct sigaction now {};
      if (::sigaction(signal, nullptr, &now) == 0 && now.sa_handler != handlers[signal].sa_handler)
        fail("it installed a handler of signal ", signal);
    }
  };
  observe(test, record, compare, compare);
}

// The mask of blocked signals of a thread.
uint64_t blocked_signals(int thread) {
  std::ifstream status(concat("/proc/self/task/", thread, "/status"));
  for (std::string line; std::getline(status, line);)
    if (line.rfind("SigBlk:", 0) == 0) return std::strtoull(line.c_str() + 7, nullptr, 16);
  return ~uint64_t{0};  // it has ended
}

void threads_block_signals(Case& test) {
  std::set<int> known;
  const auto check = [&] {
    ::usleep(50000);  // a new thread blocks all signals until it runs
    for (const int thread : threads()) {
      if (known.count(thread)) continue;
      const uint64_t blocked = blocked_signals(thread);
      for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2, SIGCHLD, SIGALRM})
        if (!(blocked >> (signal - 1) & 1)) fail("a thread of the plug-in does not block signal ", signal);
    }
  };
  observe(
      test, [&] { known = threads(); }, check, [] {});
}

void descriptors_are_cloexec(Case& test) {
  std::set<int> known;
  const auto check = [&] {
    for (const int fd : numbers_in("/proc/self/fd"))
      if (const int flags = ::fcntl(fd, F_GETFD); !known.count(fd) && flags >= 0 && !(flags & FD_CLOEXEC))
        fail("file descriptor ", fd, " was opened without O_CLOEXEC");
  };
  observe(
      test, [&] { known = numbers_in("/proc/self/fd"); }, check, [] {});
  // A second instance, while its communicator or tier is open.
  as_ranks(test, [&](const HostOptions& options) {
    known = numbers_in("/proc/self/fd");
    TestHost host(options);
    for (int opened = 0; opened < 2; ++opened) {
      Instance instance(test, host);
      use_open_component(test, instance, check);
    }
  });
}

void no_thread_remains(Case& test) {
  std::set<int> known;
  const auto check = [&] {
    for (int tries = 0; threads().size() > known.size() && tries < 100; ++tries) ::usleep(2000);
    require(threads().size() <= known.size(), threads().size() - known.size(), " threads run after the last destroy()");
  };
  observe(
      test, [&] { known = threads(); }, [] {}, check);
}

void float_environment_stays(Case& test) {
  const auto check = [] {
    volatile float smallest = std::numeric_limits<float>::min(), half = 0.5f;  // the compiler may not know the product
    require(smallest * half != 0.f, "numbers below 2^-126 become 0 (built or linked with -ffast-math?)");
    require(std::fegetround() == FE_TONEAREST, "the rounding direction was changed");
    require(::fegetexcept() == 0, "operations raise SIGFPE that did not before");
  };
  observe(
      test, [] {}, check, check);
}

constexpr Rule kRules[] = {
    {"ZR-P01", "", "The plug-in installs no signal handler.", signal_handlers_stay},
    {"ZR-P02", "", "Threads of the plug-in block all signals.", threads_block_signals},
    {"ZR-P03", "", "File descriptors of the plug-in have O_CLOEXEC.", descriptors_are_cloexec},
    {"ZR-P04", "", "No thread of the plug-in runs after the last destroy().", no_thread_remains},
    {"ZR-P05", "", "The plug-in leaves the floating-point environment of the threads that call it as it is.",
     float_environment_stays},
};

}  // namespace

std::span<const Rule> process_rules() { return kRules; }

}  // namespace zr::conform
