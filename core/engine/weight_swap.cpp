#include "engine/weight_swap.hpp"

#include <fmt/format.h>

#include <cstring>
#include <exception>
#include <utility>

#include "base/dtype.hpp"
#include "base/error.hpp"
#include "base/log.hpp"
#include "checkpoint/manifest.hpp"
#include "job/all_gather.hpp"
#include "update/cast.hpp"

namespace zr::host::engine {

namespace {
constexpr const char* kTag = "zr::Swap";
using Access = offload::OptimizerStates::Access;
}  // namespace

WeightSwap::WeightSwap(const job::StepContext& context, const TrainingParts& parts)
    : context_(context), parts_(parts) {}

void WeightSwap::begin(const Values& values) {
  parts_.progress.check_complete();
  parts_.update.before_access(kTag);
  context_.model.check_scopes(kTag);
  parts_.weights.compare();
  save();
  replaced_.clear();
  context_.comm.barrier(kTag);  // a peer may still read the shared weights
  try {
    for (uint32_t param = 0; param < saved_.size(); ++param) replace(param, values);
  } catch (...) {
    restore();
    publish();
    throw;
  }
  publish();
  state_ = State::active;
}

void WeightSwap::end() {
  try {
    context_.model.check_scopes("the end of zr::Swap");  // such a scope would store the values of the swap
  } catch (...) {
    forget();
    state_ = State::abandoned;
    throw;
  }
  context_.comm.barrier(kTag);
  restore();
  publish();
  parts_.weights.discard_writes();
  state_ = State::none;
}

void WeightSwap::abandon() {
  if (context_.world() == 1) try {
      return end();
    } catch (const std::exception& failure) {  // another exception is in flight
      log(ZR_LOG_ERROR, failure.what());
    }
  forget();
  state_ = State::abandoned;
}

void WeightSwap::forget() {
  saved_.clear();
  context_.ledger.add(Tier::host, MemoryKind::snapshot, kTag, -std::exchange(saved_bytes_, 0));
  state_ = State::none;
}

void WeightSwap::save() {
  const plan::PlanInput& input = context_.plan.input;
  const std::size_t parameters = context_.plan.input.parameters.size();
  int64_t bytes = 0;
  for (uint32_t param = 0; param < parameters; ++param)
    parts_.state.own_weights(param, Access::read,
                             [&](int64_t, int64_t count, void*) { bytes += count * size_of(input.dtype_of(param)); });
  context_.ledger.add(Tier::host, MemoryKind::snapshot, kTag, bytes);
  saved_bytes_ = bytes;
  saved_.assign(parameters, {});
  for (uint32_t param = 0; param < parameters; ++param)
    parts_.state.own_weights(param, Access::read, [&](int64_t, int64_t count, void* memory) {
      const auto* const from = static_cast<const char*>(memory);
      saved_[param].insert(saved_[param].end(), from, from + count * size_of(input.dtype_of(param)));
    });
}

void WeightSwap::restore() {
  for (uint32_t param = 0; param < saved_.size(); ++param) {
    const int64_t size = size_of(context_.plan.input.dtype_of(param));
    const char* from = saved_[param].data();
    parts_.state.own_weights(param, Access::write, [&](int64_t, int64_t count, void* memory) {
      std::memcpy(memory, from, static_cast<std::size_t>(count * size));
      from += count * size;
    });
  }
  forget();
}

void WeightSwap::replace(uint32_t param, const Values& values) {
  const plan::Parameter& parameter = context_.plan.input.parameters[param];
  struct Given {
    uint64_t hash = 0;
    int32_t failed = 0, replaces = 0;
    bool operator==(const Given&) const = default;
  } own;
  const float* full = nullptr;
  const std::exception_ptr failure = exception_of([&] { full = values(param); });
  own.failed = failure != nullptr;
  own.replaces = full != nullptr;
  if (full) own.hash = checkpoint::hash_of(full, parameter.count * int64_t{sizeof(float)});
  const std::vector<Given> given = job::all_gather(context_.comm, own, kTag);
  if (failure) std::rethrow_exception(failure);
  for (std::size_t rank = 0; rank < given.size(); ++rank) {
    if (given[rank].failed)
      throw PeerFailedError(fmt::format(
          "zr::Swap: the values for '{}' failed on rank {}; the weights are unchanged; see that rank's error",
          parameter.name, rank));
    if (given[rank] != given[0])
      fail_user(
          fmt::format("zr::Swap: rank {} passes different values for '{}' than rank 0; pass the same tensor on all "
                      "ranks; the weights are unchanged",
                      rank, parameter.name));
  }
  if (!full) return;
  replaced_.push_back(param);
  const zr_dtype dtype = context_.plan.input.dtype_of(param);
  parts_.state.own_weights(param, Access::write, [&](int64_t first, int64_t count, void* memory) {
    update::downcast(full + first, count, dtype, memory);
  });
}

void WeightSwap::publish() {
  context_.model.values_replaced(replaced_);
  parts_.step_timer.exclude([&] { parts_.weights.publish_weights(true); });
  parts_.step_timer.restart_clock();
}

}  // namespace zr::host::engine
