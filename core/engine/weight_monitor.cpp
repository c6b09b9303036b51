#include "engine/weight_monitor.hpp"

#include <string>

#include "base/log.hpp"
#include "engine/all_gather.hpp"

namespace zr::host::engine {

WeightMonitor::WeightMonitor(const StepContext& context, const Parts& parts)
    : context_(context),
      parts_(parts),
      digest_(context.plan, parts.state.buffers().memory(), parts.state.buffers().readers(), context.world()),
      samples_(context.plan.has_master ? WeightSamples(parts.state.bound_slices()) : WeightSamples()) {}

void WeightMonitor::report(uint32_t param) {
  digest_.written(param);
  parts_.recorder.forget_hash();
  report_unsaved(param);
}

void WeightMonitor::report_unsaved(uint32_t param) {
  if (saved_.empty()) return;
  ShardedState& state = parts_.state;
  bool differs = false;  // if not, the program undid the write, or only read
  for (const uint32_t u : state.slices_of(param)) differs |= state.hash_of_weights(state.slices()[u]) != saved_[u];
  if (!differs) return;
  saved_.clear();
  unsaved_write_ = true;
  log(ZR_LOG_WARN, "the program wrote to weights ('" + context_.plan.input.parameters[param].name +
                       "') after the checkpoint of step " + std::to_string(parts_.progress.step()) +
                       " was saved, so the checkpoint does not contain the new values: checkpoint.every saves at the "
                       "end of engine.step(); to include such writes, call engine.save() after them instead");
}

void WeightMonitor::take_written() {
  ShardedState& state = parts_.state;
  const auto sync_master_from_weights = [&](uint32_t param) {
    bool changed = false;
    for (const uint32_t u : state.slices_of(param)) changed |= state.sync_master_from_weights(state.slices()[u]);
    return changed;
  };
  for (const uint32_t param : context_.model.written()) {
    report(param);
    sync_master_from_weights(param);
  }
  for (const uint32_t param : state.take_stored()) {
    report(param);
    sync_master_from_weights(param);
  }
  if (!context_.plan.has_master) return;
  for (const uint32_t param : context_.model.may_be_written_untracked())
    if (sync_master_from_weights(param)) report(param);
  for (const update::UpdateSlice* slice : samples_.changed())
    if (state.sync_master_from_weights(*slice)) report(slice->param);
  samples_.remember();
}

bool WeightMonitor::has_written() const {
  return !context_.model.written().empty() || parts_.state.has_stored() || !samples_.changed().empty();
}

void WeightMonitor::publish() {
  parts_.flow.updated();
  samples_.remember();
}

void WeightMonitor::compare() {
  take_written();
  digest_.compare(all_gather(context_.comm, digest_.next(), "digests of weights"), context_.comm,
                  parts_.progress.step());
}

void WeightMonitor::replaced(uint32_t param) {
  report_unsaved(param);
  parts_.recorder.forget_hash();
}

void WeightMonitor::remember_saved() {
  if (unsaved_write_ || parts_.state.pages()) return;
  for (const update::UpdateSlice& slice : parts_.state.slices()) saved_.push_back(parts_.state.hash_of_weights(slice));
}

}  // namespace zr::host::engine
