// A tier's library on a host, for tests.
#pragma once

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/error.hpp"
#include "comm/comm_runtime.hpp"
#include "plugin/plugin_host.hpp"
#include "support/scratch.hpp"
#include "zr/abi/offload.h"
#include "zr/round_up.hpp"

namespace zr::test {

inline constexpr std::size_t kMiB = 1 << 20;  // bytes
inline const std::string kPlugins = ZR_BUILD_DIR "/plugins", kFailing = ZR_BUILD_DIR "/tests/plugins/failing";

/// Page-aligned memory for transfers.
class Pages {
 public:
  explicit Pages(std::size_t bytes)
      : bytes_(bytes), data_(static_cast<char*>(std::aligned_alloc(4096, zr::round_up<std::size_t>(bytes, 4096)))) {
    std::memset(data_, 0, bytes);
  }
  Pages(Pages&& other) noexcept : bytes_(other.bytes_), data_(std::exchange(other.data_, nullptr)) {}
  ~Pages() { std::free(data_); }
  char* data() const { return data_; }
  std::size_t size() const { return bytes_; }
  /// Fills the memory with bytes that `seed` determines.
  Pages& fill(unsigned seed) {
    std::mt19937_64 random(seed);
    for (std::size_t i = 0; i + 8 <= bytes_; i += 8) {
      const uint64_t word = random();
      std::memcpy(data_ + i, &word, 8);
    }
    return *this;
  }
  bool operator==(const Pages& other) const {
    return bytes_ == other.bytes_ && std::memcmp(data_, other.data_, bytes_) == 0;
  }

 private:
  std::size_t bytes_;
  char* data_;
};
inline Pages filled(std::size_t bytes, unsigned seed) {
  Pages pages(bytes);
  pages.fill(seed);
  return pages;
}

inline zr_transfer part_of(uint64_t slot, uint64_t offset, const Pages& pages, std::size_t from, std::size_t bytes) {
  return {slot, offset, {pages.data() + from, static_cast<int64_t>(bytes), ZR_U8, 0, {1, 0}}};
}
inline zr_transfer full_transfer(uint64_t slot, const Pages& pages) { return part_of(slot, 0, pages, 0, pages.size()); }

struct Answer {
  zr_code code = ZR_OK;
  int64_t native = 0;
  std::string text;
};

/// An opened tier. `values` are settings such as "path=/x".
class Tier {
 public:
  explicit Tier(const std::string& id, const std::vector<std::string>& values = {},
                const std::string& folder = kPlugins, const std::string& job = "job-1",
                const zr_machine_service* machine = nullptr)
      : job_id_(job) {
    host::comm::offer_async(host);
    if (machine) host.offer("zr.host.machine/1", machine);
    job_ = {sizeof job_, 0, 1, 0, 1, 0, job_id_.c_str(), ""};
    host.offer("zr.host.job/1", &job_);
    const host::plugin::Component component =
        host::plugin::Registry({folder}).load(host::plugin::Role::offload, id, "here");
    std::vector<std::string> settings;
    for (const std::string& value : values) settings.push_back("offload." + id + "." + value);
    const host::config::JobConfig config =
        host::config::Document::parse("", "job.toml", settings)
            .check(host::config::keys_of(component.table->keys, component.table->n_keys, "offload." + id), 1);
    instance_ = std::make_unique<host::plugin::Instance>(host, component, config, "offload." + id);
    host::CallError error;
    host::check(api().open(self(), &error), error, "open");
    async_ = static_cast<const zr_async_service*>(host.abi()->service(host.abi(), "zr.host.async/1"));
  }
  const zr_offload_api& api() const { return *instance_->api<zr_offload_api>(); }
  void* self() const { return instance_->self(); }
  const zr_async_service& async() const { return *async_; }
  zr_offload_caps caps() const {
    zr_offload_caps caps{};
    caps.size = sizeof caps;
    host::CallError error;
    host::check(api().caps(self(), &caps, &error), error, "caps");
    return caps;
  }
  uint64_t reserve(uint64_t bytes) const {
    uint64_t slot = 0;
    host::CallError error;
    host::check(api().reserve(self(), bytes, "masters", &slot, &error), error, "reserve");
    return slot;
  }
  Answer reserve_fails(uint64_t bytes) const {
    uint64_t slot = 77;
    host::CallError error;
    const zr_code code = api().reserve(self(), bytes, "masters", &slot, &error);
    EXPECT_EQ(slot, 77u);
    return {code, error.native, error.msg};
  }
  void release(uint64_t slot) const { api().release(self(), slot); }

  /// A transfer that is complete on return.
  Answer write(const std::vector<zr_transfer>& all) const { return now(api().write, all); }
  Answer read(const std::vector<zr_transfer>& all) const { return now(api().read, all); }
  /// Starts a transfer; the caller must wait for it.
  zr_done* begin_write(const std::vector<zr_transfer>& all) const { return begin(api().write, all); }
  zr_done* begin_read(const std::vector<zr_transfer>& all) const { return begin(api().read, all); }
  Answer wait(zr_done* done) const {
    host::CallError error;
    zr_code code;
    while ((code = async_->done_poll(done, &error)) == ZR_AGAIN)
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    async_->done_release(done);
    return {code, error.native, error.msg};
  }
  bool ready(zr_done* done) const {
    host::CallError error;
    return async_->done_poll(done, &error) != ZR_AGAIN;
  }

 private:
  using Call = zr_code (*)(void*, const zr_transfer*, uint32_t, zr_stream*, zr_done*, zr_error*);
  Answer now(Call call, const std::vector<zr_transfer>& all) const {
    host::CallError error;
    const zr_code code = call(self(), all.data(), static_cast<uint32_t>(all.size()), nullptr, nullptr, &error);
    return {code, error.native, error.msg};
  }
  zr_done* begin(Call call, std::vector<zr_transfer> all) const {
    zr_done* done = async_->done_new(host.abi());
    host::CallError error;
    host::check(call(self(), all.data(), static_cast<uint32_t>(all.size()), nullptr, done, &error), error, "begin");
    if (!all.empty()) std::memset(all.data(), 0xff, all.size() * sizeof(zr_transfer));  // the tier has copied the list
    return done;
  }
  std::string job_id_;
  zr_job_service job_{};

 public:
  host::Ledger ledger;
  host::ThreadPool pool{2};
  host::plugin::PluginHost host{ledger, pool};

 private:
  const zr_async_service* async_ = nullptr;
  std::unique_ptr<host::plugin::Instance> instance_;
};

#define EXPECT_GOOD(answer) \
  if (const Answer said = (answer); said.code != ZR_OK) ADD_FAILURE() << said.code << " " << said.text

/// Runs fn in a child process. Its exit code is 1 after a failed expectation or an exception, which it prints.
class Child {
 public:
  template <class F>
  explicit Child(F&& fn) {
    std::fflush(nullptr);
    pid_ = ::fork();
    if (pid_ != 0) return;
    int code = 1;
    try {
      fn();
      code = ::testing::Test::HasFailure() ? 1 : 0;
    } catch (const std::exception& error) {
      std::fprintf(stderr, "in the child: %s\n", error.what());
    }
    std::fflush(nullptr);
    ::_exit(code);
  }
  /// Waits for the child and returns its exit status; 128 and above: a signal. Call once.
  int wait() const {
    int status = 0;
    ::waitpid(pid_, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }

 private:
  pid_t pid_;
};
template <class F>
int in_child(F&& fn) {
  return Child(fn).wait();
}

/// Mounts a tmpfs at `folder` for this process only. False if that is not allowed.
inline bool own_disk(const std::string& folder, const char* size) {
  return ::unshare(CLONE_NEWNS) == 0 && ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
         ::mount("none", folder.c_str(), "tmpfs", 0, size) == 0;
}

/// The file names in a folder.
inline std::vector<std::string> names_in(const std::string& folder) {
  std::vector<std::string> names;
  for (const auto& one : std::filesystem::directory_iterator(folder)) names.push_back(one.path().filename().string());
  return names;
}

}  // namespace zr::test
