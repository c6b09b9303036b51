#include "model/watched_pages.hpp"

#include <signal.h>
#include <sys/mman.h>

#include <array>
#include <atomic>
#include <new>

#include "zr/mutex.hpp"

namespace zr::host::model {

namespace {
struct Region {
  std::atomic<char*> data{nullptr};  // null: free
  std::atomic<std::size_t> bytes{0};
  std::atomic<bool> used{false};
};
std::array<Region, 1024> g_regions;
struct sigaction g_before {};  // the handler that ours replaces
Mutex& g_lock = *new Mutex;    // never destroyed: scopes may end when the process exits
std::size_t g_watched ZR_GUARDED_BY(g_lock) = 0;

// Calls only what a handler may call.
void on_fault(int signal, siginfo_t* info, void* context) {
  char* const at = static_cast<char*>(info->si_addr);
  for (Region& region : g_regions) {
    char* const data = region.data.load();
    if (!data || at < data || at >= data + region.bytes.load()) continue;
    region.used = true;
    ::mprotect(data, region.bytes.load(), PROT_READ | PROT_WRITE);
    return;  // the access is repeated
  }
  if (g_before.sa_flags & SA_SIGINFO) return g_before.sa_sigaction(signal, info, context);
  if (g_before.sa_handler != SIG_DFL && g_before.sa_handler != SIG_IGN) return g_before.sa_handler(signal);
  ::sigaction(signal, &g_before, nullptr);  // the access faults again
}

void add_handler() {
  struct sigaction action {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  ::sigaction(SIGSEGV, &action, &g_before);
}

// Leaves a handler that the program has set in the meantime.
void remove_handler() {
  struct sigaction now {};
  ::sigaction(SIGSEGV, nullptr, &now);
  if (now.sa_flags & SA_SIGINFO && now.sa_sigaction == on_fault) ::sigaction(SIGSEGV, &g_before, nullptr);
}
}  // namespace

WatchedPages::WatchedPages(std::size_t bytes) : bytes_(bytes) {
  void* const pages = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pages == MAP_FAILED) throw std::bad_alloc();
  data_ = static_cast<char*>(pages);
}

WatchedPages::~WatchedPages() {
  if (watch_ != kNone) {
    const MutexLock lock(g_lock);
    g_regions[watch_].data = nullptr;
    if (--g_watched == 0) remove_handler();
  }
  if (data_) ::munmap(data_, bytes_);
}

bool WatchedPages::watch() {
  if (watch_ != kNone) return true;
  const MutexLock lock(g_lock);
  for (std::size_t i = 0; i < g_regions.size() && watch_ == kNone; ++i)
    if (!g_regions[i].data.load()) watch_ = i;
  if (watch_ == kNone) return false;
  Region& region = g_regions[watch_];
  region.used = false;
  region.bytes = bytes_;
  region.data = data_;
  if (g_watched++ == 0) add_handler();
  ::mprotect(data_, bytes_, PROT_NONE);
  return true;
}

bool WatchedPages::used() const { return watch_ != kNone && g_regions[watch_].used; }

}  // namespace zr::host::model
