#include "engine/weight_flow.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/device_memory.hpp"
#include "base/dtype.hpp"
#include "base/error.hpp"
#include "base/host_view.hpp"
#include "base/log.hpp"
#include "checkpoint/manifest.hpp"
#include "control/call_mismatch.hpp"
#include "engine/rank_differences.hpp"
#include "job/all_gather.hpp"

namespace zr::host::engine {

namespace {
constexpr uintptr_t kLine = 64;  // bytes
}

WeightFlow::WeightFlow(const job::StepContext& context, state::ShardedState& state)
    : context_(context),
      state_(state),
      parameters_(context.model),
      strategy_(context.strategy),
      plan_(context.plan),
      comm_(context.comm),
      sharded_(context.plan.sharded_parameters()) {
  const std::size_t parameters = plan_.input.parameters.size();
  use_counts_.assign(parameters, 0);
  memory_.assign(parameters, nullptr);
  written_.assign(parameters, 0);
  gathered_in_.assign(parameters, ZR_FORWARD);
  install_callbacks();
  parameters_.use_threads(
      [&pool = context.pool](int64_t n, int64_t grain, const auto& fn) { pool.parallel_for(n, grain, fn); });
}

WeightFlow::~WeightFlow() {
  parameters_.use_threads({});
  parameters_.on_use({});
}

void WeightFlow::publish_weights(bool frozen_too, uint32_t flags) {
  const RecursiveMutexLock lock(context_.use);
  const zr_use use = context_.use_of(ZR_UPDATE_PHASE, 0, flags);
  context_.call_strategy("updated", [&](zr_error* error) { return strategy_.updated(&use, error); });
  parameters_.weights_changed(frozen_too);
}

void WeightFlow::install_callbacks() {
  parameters_.on_use({[this](const uint32_t* params, uint32_t n, uint32_t phase) { begin_use(params, n, phase); },
                      [this](const uint32_t* params, const bool* written, uint32_t n) { end_use(params, written, n); },
                      [this](uint32_t param, const void* full) { store_shared_write(param, full); },
                      [this](const uint32_t* params, uint32_t n, bool begins) { gather_scope(params, n, begins); }});
  for (const uint32_t param : sharded_) parameters_.unbind(param, plan_.input.dtype_of(param));
}

// All ranks compare their calls under every strategy, even if no weight is communicated.
void WeightFlow::gather_scope(const uint32_t* params, uint32_t n, bool begins) {
  if (n == 0) return;
  const std::string name = fmt::format("zr::gather(\"{}\"{})", plan_.input.parameters[params[0]].name,
                                       n > 1 ? fmt::format(" and {} more", n - 1) : "");
  if (std::this_thread::get_id() != thread_)
    fail_user(name + " was called on another thread than the one that created the engine; use one thread for both");
  if (begins && check_gather_) check_gather_(name);
  const std::string call = name + (begins ? "" : " at the end of its scope");
  const RecursiveMutexLock lock(context_.use);
  const comm::CallScope scope(comm_, call);
  comm_.barrier(call.c_str());
  scope_begins_ = begins && std::any_of(params, params + n, [&](uint32_t param) { return is_sharded(param); });
}

bool WeightFlow::is_sharded(uint32_t param) const {
  return std::find(sharded_.begin(), sharded_.end(), param) != sharded_.end();
}

void WeightFlow::with_full(uint32_t param, const std::function<void(const void* memory)>& fn) {
  begin_use(&param, 1, ZR_EXPORT_PHASE);
  const void* memory = nullptr;
  {
    const RecursiveMutexLock lock(context_.use);
    memory = memory_[param];
  }
  std::vector<char> on_host;
  if (context_.device) {
    const plan::PlanInput& plan = plan_.input;
    on_host.resize(static_cast<std::size_t>(plan.parameters[param].count * size_of(plan.dtype_of(param))));
    context_.device->download(memory, on_host.data(), std::ssize(on_host));
  }
  fn(context_.device ? on_host.data() : memory);
  end_use(&param, nullptr, 1);
}

void WeightFlow::begin_use(const uint32_t* params, uint32_t n, uint32_t phase) {
  const RecursiveMutexLock lock(context_.use);
  const bool begins_scope = std::exchange(scope_begins_, false);
  std::vector<uint32_t> absent;
  for (uint32_t i = 0; i < n; ++i)
    if (use_counts_[params[i]] == 0) absent.push_back(params[i]);
  if (!absent.empty()) {
    std::vector<zr_view> gathered(absent.size());
    std::string call = comm_.call();
    if (call.empty())
      call = fmt::format("{}'{}'",
                         phase != ZR_EXPORT_PHASE ? control::kOperatorOn
                         : begins_scope           ? "zr::gather of "
                                                  : "an in-place write to ",
                         plan_.input.parameters[absent[0]].name);
    const comm::CallScope scope(comm_, std::move(call));
    if (phase != ZR_EXPORT_PHASE && phase_ != ZR_FORWARD) phase = phase_;
    const zr_use use = context_.use_of(phase, micro_);
    context_.call_strategy("acquire", [&](zr_error* error) {
      return strategy_.acquire(absent.data(), static_cast<uint32_t>(absent.size()), &use, gathered.data(), error);
    });
    try {
      attach(absent, gathered, phase);
    } catch (...) {
      const std::exception_ptr failure = std::current_exception();
      log_exception_of([&]() ZR_REQUIRES(context_.use) { release(absent, phase); });
      std::rethrow_exception(failure);
    }
  }
  for (uint32_t i = 0; i < n; ++i) ++use_counts_[params[i]];
}

void WeightFlow::attach(const std::vector<uint32_t>& absent, const std::vector<zr_view>& gathered, uint32_t phase) {
  for (std::size_t i = 0; i < absent.size(); ++i) {
    const plan::Parameter& parameter = plan_.input.parameters[absent[i]];
    if (const std::string problem = view_problem_on(context_.memory_device(), "the weight", gathered[i]);
        !problem.empty())
      fail_plugin_bug(fmt::format("{} for '{}'", strategy_.call_text("acquire"), parameter.name), problem);
    // Libraries may choose other kernels, with other roundings, for another alignment.
    const bool aligned = parameter.count == 0 || reinterpret_cast<uintptr_t>(gathered[i].data) % kLine == 0;
    if (gathered[i].count != parameter.count || gathered[i].dtype != plan_.input.dtype_of(absent[i]) ||
        !gathered[i].data || !aligned)
      fail_internal(
          fmt::format("{} returned an invalid view for '{}': it must have {} elements (it has {}), the dtype of the "
                      "weights, and memory at a multiple of {} bytes; this is a bug in the plug-in",
                      strategy_.call_text("acquire"), parameter.name, parameter.count, gathered[i].count, kLine));
    memory_[absent[i]] = gathered[i].data;
    gathered_in_[absent[i]] = phase;
    parameters_.attach(absent[i], gathered[i].data);
  }
}

void WeightFlow::end_use(const uint32_t* params, const bool* written, uint32_t n) {
  const RecursiveMutexLock lock(context_.use);
  std::map<uint32_t, std::vector<uint32_t>> unused;  // by the phase of their acquire()
  for (uint32_t i = 0; i < n; ++i) {
    const uint32_t param = params[i];
    if (written && written[i]) written_[param] = 1;
    if (--use_counts_[param] == 0) unused[gathered_in_[param]].push_back(param);
  }
  for (const auto& [phase, parameters] : unused) release(parameters, phase);
}

// Each rank stores its own shard. Whether all ranks wrote the same is compared in the next step, because a parameter
// that is still gathered is written to without any communication.
void WeightFlow::store_write(uint32_t param) {
  state_.store_full(param, memory_[param]);
  if (context_.world() == 1) return;
  const int64_t count = plan_.input.parameters[param].count, size = size_of(plan_.input.dtype_of(param));
  checkpoint::Hash hash;
  uint64_t& writes = writes_[param];
  hash.add(&writes, sizeof writes);  // a later write does not hide this one
  if (context_.device)
    visit_on_host(*context_.device, {memory_[param], count, plan_.input.dtype_of(param), 0, context_.device->device()},
                  {.reads = true, .writes = false},
                  [&](const void* values, int64_t, int64_t n) { hash.add(values, n * size); });
  else
    hash.add(memory_[param], count * size);
  writes = hash.value();
}

// Each rank stores its own parts of the shared memory, so the ranks compare their copies before any of them stores.
void WeightFlow::store_shared_write(uint32_t param, const void* full) {
  const RecursiveMutexLock lock(context_.use);
  const plan::Parameter& parameter = plan_.input.parameters[param];
  const comm::CallScope call(comm_, fmt::format("an in-place write to '{}'", parameter.name));
  const uint64_t own = checkpoint::hash_of(full, parameter.count * size_of(plan_.input.dtype_of(param)));
  const std::vector<uint64_t> hashes = job::all_gather(comm_, own, "shared weights");  // no rank reads during writes
  RanksByDigest ranks;
  for (std::size_t rank = 0; rank < hashes.size(); ++rank)
    ranks[std::to_string(hashes[rank])].push_back(static_cast<int>(rank));
  if (ranks.size() > 1)
    fail_weights_differ({parameter, 0, parameter.count, difference_between(ranks)},
                        "found in an in-place write, which was discarded");
  state_.store_full(param, full);
  comm_.barrier("shared weights");
}

std::map<uint32_t, uint64_t> WeightFlow::take_writes() {
  const RecursiveMutexLock lock(context_.use);
  return std::exchange(writes_, {});
}

void WeightFlow::forget_writes(uint32_t param) {
  const RecursiveMutexLock lock(context_.use);
  writes_.erase(param);
}

void WeightFlow::release(const std::vector<uint32_t>& params, uint32_t phase) {
  for (const uint32_t param : params) {
    if (std::exchange(written_[param], 0)) store_write(param);
    memory_[param] = nullptr;
    parameters_.attach(param, nullptr);
  }
  const zr_use use = context_.use_of(phase, micro_);
  context_.call_strategy("release", [&](zr_error* error) {
    return strategy_.release(params.data(), static_cast<uint32_t>(params.size()), &use, error);
  });
}

}  // namespace zr::host::engine
