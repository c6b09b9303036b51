// The plug-in of Submission: opening and closing, the watchdog for waits inside the plug-in, and memory that the
// plug-in allocates.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <utility>

#include "base/host_view.hpp"
#include "comm/done.hpp"
#include "comm/submission.hpp"
#include "plugin/extension.hpp"
#include "zr/mutex.hpp"

namespace zr::host::comm {

namespace {
using Clock = std::chrono::steady_clock;

[[noreturn]] void fail_plugin_bug(const std::string& call, const std::string& problem) {
  fail_internal(fmt::format("{}: {}: this is a bug in the plug-in", call, problem));
}

bool is_aligned(const void* address, uint64_t align) { return reinterpret_cast<uintptr_t>(address) % align == 0; }

// Why memory of mem_alloc() is rejected; "" if it is not.
std::string memory_problem(const zr_view& memory, uint64_t bytes, uint64_t align) {
  if (std::string problem = host_view_problem("the memory", memory); !problem.empty()) return problem;
  if (!memory.data || memory.dtype != ZR_U8 || memory.count < static_cast<int64_t>(bytes))
    return fmt::format("the memory is null, or not {} elements of U8", bytes);
  return is_aligned(memory.data, align) ? "" : fmt::format("the memory is not aligned to {} bytes", align);
}

// Why a mapping of shared weights is rejected; "" if it is not.
std::string mapping_problem(const std::string& name, const void* mapping) {
  if (!mapping) return name + " is null";
  const auto page = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  return is_aligned(mapping, page) ? "" : fmt::format("{} does not begin at a page boundary ({} bytes)", name, page);
}
}  // namespace

const zr_shared_weights_api* shared_weights_of(const plugin::Component& communicator) {
  return plugin::extension_of<zr_shared_weights_api>(
      communicator, "zr.communicator.shared_weights/1", ZR_SIZE_0_9(zr_shared_weights_api),
      {offsetof(zr_shared_weights_api, alloc), offsetof(zr_shared_weights_api, free)});
}

namespace {
zr_comm_caps communicator_caps(const plugin::Instance& communicator) {
  zr_comm_caps caps{};
  caps.size = sizeof caps;
  CallError error;
  const std::string call = communicator.call_text("caps");
  const auto* api = communicator.api<zr_communicator_api>();
  check(call_plugin(&error, [&] { return api->caps(communicator.self(), &caps, &error); }), error, call);
  if (!(caps.ops & bit(ZR_ALL_GATHER)) || !(caps.dtypes & bit(ZR_U8)))
    fail_environment(call +
                     ": it does not support all_gather of bytes, from which the engine composes missing operations; "
                     "choose another communicator");
  if (!(caps.device_types & bit(ZR_DEVICE_CPU)))
    fail_environment(fmt::format(
        "{}: device_types is {:#x}, without CPU memory ({:#x}), where the engine has its buffers; choose another "
        "communicator",
        call, caps.device_types, bit(ZR_DEVICE_CPU)));
  return caps;
}
}  // namespace

Submission::Submission(plugin::PluginHost& host, std::shared_ptr<control::Control> control,
                       const plugin::Instance* instance, std::chrono::milliseconds timeout)
    : host_(host),
      control_(std::move(control)),
      instance_(instance),
      timeout_(timeout),
      rank_(control_->rank()),
      world_(control_->world()),
      counter_(rank_, world_) {
  if (world_ == 1) return;
  if (!instance_) fail_internal(fmt::format("a communicator of {} ranks was created without a plug-in", world_));
  api_ = instance_->api<zr_communicator_api>();
  caps_ = communicator_caps(*instance_);
  // Ranks open communicators in the same order.
  static std::atomic<uint64_t> opened{0};
  const std::string store_prefix = fmt::format("comm.data.{}.", ++opened);
  const zr_comm_open options{sizeof(zr_comm_open), rank_, world_, 0, {ZR_DEVICE_CPU, 0}, "data", store_prefix.c_str()};
  CallError error;
  const auto open = [&] { return api_->open(instance_->self(), &options, &comm_, &error); };
  check(call_plugin(&error, open), error, call_text("open"));
  if (!comm_) fail_internal(call_text("open") + " reported success, but left *comm null; this is a bug in the plug-in");
  watchdog_ = std::jthread([this](const std::stop_token& stop) { run_watchdog(stop); });
  control_->on_broken(this, [this] { abort(); });
}

void Submission::close() {
  for (; !staged_completions_.empty(); staged_completions_.pop_front()) done_release(staged_completions_.front());
  if (!comm_) return;
  control_->on_broken(this, {});
  watchdog_ = {};
  call_plugin_void(call_text("close"), [&] { api_->close(comm_); });
  comm_ = nullptr;
}

void Submission::run_watchdog(const std::stop_token& stop) {
  const auto tick = std::clamp(timeout_ / 10, std::chrono::milliseconds(5), std::chrono::milliseconds(500));
  Mutex mutex;  // guards nothing: the condition variable only sleeps until the stop request
  std::condition_variable_any stopped;
  MutexLock lock(mutex);
  while (!stopped.wait_for(lock, stop, tick, [&] { return stop.stop_requested(); })) {
    const int64_t since = waiting_since_.load(std::memory_order_relaxed);
    if (since == 0 || Clock::now().time_since_epoch().count() - since < std::chrono::nanoseconds(timeout_).count())
      continue;
    exceeded_timeout_ = true;
    abort();
    return;
  }
}

void Submission::abort() {
  if (api_ && comm_) call_plugin_void(call_text("abort"), [&] { api_->abort(comm_); });
}

void* Submission::mem_alloc(uint64_t bytes, uint64_t align) {
  if (!comm_ || !api_->mem_alloc) return nullptr;
  zr_view memory{};
  CallError error;
  const std::string call = call_text("mem_alloc");
  check(call_plugin(&error, [&] { return api_->mem_alloc(comm_, bytes, align, 0, &memory, &error); }), error, call);
  if (const std::string problem = memory_problem(memory, bytes, align); !problem.empty())
    fail_plugin_bug(call, problem);
  plugin_memory_.emplace(memory.data, memory);
  return memory.data;
}

void Submission::mem_free(void* memory) {
  const auto at = plugin_memory_.find(memory);
  if (at == plugin_memory_.end()) return;
  if (comm_) call_plugin_void(call_text("mem_free"), [&] { api_->mem_free(comm_, &at->second); });
  plugin_memory_.erase(at);
}

const zr_shared_weights_api* Submission::shared_weights() const {
  return instance_ ? shared_weights_of(instance_->component()) : nullptr;
}

std::pair<void*, const void*> Submission::shared_alloc(uint64_t bytes) {
  void* writer = nullptr;
  const void* reader = nullptr;
  CallError error;
  const std::string call = call_text("shared_weights alloc");
  const auto* api = shared_weights();
  check(call_plugin(&error, [&] { return api->alloc(comm_, bytes, &writer, &reader, &error); }), error, call);
  for (const std::string& problem : {mapping_problem("*writer", writer), mapping_problem("*reader", reader)})
    if (!problem.empty()) fail_plugin_bug(call, problem);
  return {writer, reader};
}

void Submission::shared_free(void* writer) {
  const auto* api = shared_weights();
  if (comm_) call_plugin_void(call_text("shared_weights free"), [&] { api->free(comm_, writer); });
}

}  // namespace zr::host::comm
