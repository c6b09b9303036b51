// A communicator in this process whose functions a test replaces, to return errors, break the ABI or throw, and one
// rank that uses it. The other ranks of its job do not exist.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include "comm/comm_runtime.hpp"
#include "comm/done.hpp"
#include "support/shared_control.hpp"
#include "zr/abi/communicator.h"
#include "zr/abi/communicator_extensions.h"

namespace zr::testing {

/// What the functions of the communicator do.
struct FakeCommunicator {
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  using Memory = std::unique_ptr<void, Free>;
  std::function<zr_code(zr_comm_caps*)> caps = [](zr_comm_caps* out) {
    const uint32_t size = out->size;
    *out = {size, ZR_COMM_ASYNC, 1u << ZR_ALL_GATHER | 1u << ZR_BARRIER, 1u << ZR_U8, 0, 1u << ZR_DEVICE_CPU};
    return ZR_OK;
  };
  std::function<zr_code(void** comm, zr_error*)> open = [](void** comm, zr_error*) {
    static int opened;
    *comm = &opened;
    return ZR_OK;
  };
  std::function<void()> close = [] {}, abort = [] {}, shared_free = [] {};
  std::function<void(const zr_view&)> mem_free = [](const zr_view&) {};
  std::function<zr_code(zr_done*, zr_error*)> submit = [](zr_done* done, zr_error*) {
    if (done) host::comm::done_resolve(done, ZR_OK, 0, nullptr);
    return ZR_OK;
  };
  std::function<zr_code(zr_error*)> progress = [](zr_error*) { return ZR_OK; };
  std::function<zr_code(uint64_t bytes, zr_view*)> mem_alloc = [this](uint64_t bytes, zr_view* out) {
    *out = {allocate(bytes), static_cast<int64_t>(bytes), ZR_U8, 0, {ZR_DEVICE_CPU, 0}};
    return ZR_OK;
  };
  std::function<zr_code(void** writer, const void** reader)> shared_alloc = [](void**, const void**) {
    return ZR_UNSUPPORTED;
  };

  /// Zeroed memory at a page boundary, freed with this object.
  char* allocate(uint64_t bytes) {
    const std::size_t size = (bytes + 8191) / 4096 * 4096;
    auto* data = static_cast<char*>(std::aligned_alloc(4096, size));
    memory.emplace_back(std::memset(data, 0, size));
    return data;
  }
  std::vector<Memory> memory;
};

/// The communicator of this process: create a FakeRank before a test changes it.
inline FakeCommunicator* fake = nullptr;

inline constexpr zr_communicator_api kFakeApi{
    sizeof(zr_communicator_api),
    0,
    [](void*, zr_comm_caps* out, zr_error*) -> zr_code { return fake->caps(out); },
    [](void*, const zr_comm_open*, void** comm, zr_error* error) -> zr_code { return fake->open(comm, error); },
    [](void*) { fake->close(); },
    [](void*, const zr_coll*, zr_stream*, zr_done* done, zr_error* error) -> zr_code {
      return fake->submit(done, error);
    },
    [](void*, zr_error* error) -> zr_code { return fake->progress(error); },
    [](void*, uint64_t bytes, uint64_t, uint32_t, zr_view* out, zr_error*) -> zr_code {
      return fake->mem_alloc(bytes, out);
    },
    [](void*, const zr_view* memory) { fake->mem_free(*memory); },
    [](void*) { fake->abort(); }};
inline constexpr zr_shared_weights_api kFakeSharedWeights{
    sizeof(zr_shared_weights_api), 0,
    [](void*, uint64_t, void** writer, const void** reader, zr_error*) -> zr_code {
      return fake->shared_alloc(writer, reader);
    },
    [](void*, void*) { fake->shared_free(); }, nullptr};
inline constexpr zr_component kFakeComponent{
    sizeof(zr_component),
    0,
    "fake",
    "zr.communicator/1",
    "1.0.0",
    &kFakeApi,
    [](const zr_host*, const zr_config*, void** self, zr_error*) -> zr_code {
      *self = fake;
      return ZR_OK;
    },
    [](void*) {},
    [](const char* id) -> const void* {
      return std::strcmp(id, "zr.communicator.shared_weights/1") == 0 ? &kFakeSharedWeights : nullptr;
    },
    nullptr,
    0,
    0,
    nullptr,
    nullptr,
    nullptr};
inline constexpr const zr_component* kFakeComponents[] = {&kFakeComponent};
inline constexpr zr_module kFakeModule{sizeof(zr_module), ZR_ABI_MINOR, ZR_ABI_MINOR,    "fake", "tests",
                                       "1.0.0",           "",           kFakeComponents, 1,      0,
                                       nullptr,           nullptr};

/// Rank 0 of a job. In a world of one there is no plug-in.
class FakeRank {
 public:
  explicit FakeRank(int world = 2, std::chrono::milliseconds timeout = std::chrono::seconds(30))
      : timeout_(timeout), control_(std::make_shared<SharedControl>(job, 0, world)) {
    fake = &communicator_;
    host::comm::offer_async(host_);
    if (world == 1) return;
    instance_ = std::make_unique<host::plugin::Instance>(
        host_, host::plugin::Component{&kFakeComponent, &kFakeModule, "fake.so"}, config_, "communicator.fake");
  }
  ~FakeRank() { fake = nullptr; }
  FakeRank(const FakeRank&) = delete;
  std::unique_ptr<host::comm::CommRuntime> open() {
    return std::make_unique<host::comm::CommRuntime>(host_, control_, instance_.get(),
                                                     host::comm::CommRuntime::Options{timeout_});
  }
  const zr_host* abi() const { return host_.abi(); }
  const zr_async_service& async() const {
    return *static_cast<const zr_async_service*>(abi()->service(abi(), "zr.host.async/1"));
  }
  bool job_has_failed() const { return control_->broken(); }
  SharedJob job;

 private:
  FakeCommunicator communicator_;
  std::chrono::milliseconds timeout_;
  std::shared_ptr<SharedControl> control_;
  host::Ledger ledger_;
  host::ThreadPool pool_{1};
  host::plugin::PluginHost host_{ledger_, pool_};
  host::config::JobConfig config_;
  std::unique_ptr<host::plugin::Instance> instance_;
};

}  // namespace zr::testing
