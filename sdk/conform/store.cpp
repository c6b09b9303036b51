#include "conform/store.hpp"

#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <system_error>

namespace zr::conform {

namespace {
constexpr std::size_t kBytes = std::size_t{64} << 20;  // of all keys and values; used pages only
struct Entry {
  uint32_t key_bytes, value_bytes;
  std::size_t bytes() const { return (sizeof *this + key_bytes + value_bytes + 7) / 8 * 8; }
};
}  // namespace

// Entries follow each other in `data`; the last one of a key counts.
struct Store::Page {
  std::atomic<int> lock{0};
  std::atomic<bool> failed{false};
  std::size_t used = 0;
  alignas(8) char data[kBytes];

  void acquire() {
    while (lock.exchange(1)) ::sched_yield();
  }
  void release() { lock = 0; }
  template <class F>
  void for_each(F&& f) const {
    for (std::size_t at = 0; at < used;) {
      Entry entry;
      std::memcpy(&entry, data + at, sizeof entry);
      const char* key = data + at + sizeof entry;
      f(std::string(key, entry.key_bytes), std::string(key + entry.key_bytes, entry.value_bytes));
      at += entry.bytes();
    }
  }
};

Store::Store() {
  void* at = ::mmap(nullptr, sizeof(Page), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap");
  page_ = static_cast<Page*>(at);  // zeroed memory is an empty store
}
Store::~Store() { ::munmap(page_, sizeof(Page)); }

void Store::put(const std::string& key, const std::string& value) const {
  const Entry entry{static_cast<uint32_t>(key.size()), static_cast<uint32_t>(value.size())};
  page_->acquire();
  if (kBytes - page_->used >= entry.bytes()) {
    char* at = page_->data + page_->used;
    std::memcpy(at, &entry, sizeof entry);
    at = std::copy(key.begin(), key.end(), at + sizeof entry);
    std::copy(value.begin(), value.end(), at);
    page_->used += entry.bytes();
  }
  page_->release();
}

bool Store::get(const std::string& key, std::chrono::nanoseconds timeout, std::string& value) const {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  for (;;) {
    bool found = false;
    page_->acquire();
    page_->for_each([&](const std::string& known, const std::string& content) {
      if (known == key) found = true, value = content;
    });
    page_->release();
    if (found || page_->failed || std::chrono::steady_clock::now() > deadline) return found;
    ::usleep(200);
  }
}

void Store::fail_job() const { page_->failed = true; }

std::vector<std::string> Store::keys() const {
  std::vector<std::string> keys;
  page_->acquire();
  page_->for_each([&](const std::string& key, const std::string&) {
    if (std::find(keys.begin(), keys.end(), key) == keys.end()) keys.push_back(key);
  });
  page_->release();
  return keys;
}

}  // namespace zr::conform
