#include "engine/weight_monitor.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "base/log.hpp"
#include "job/all_gather.hpp"
#include "job/early_update_conditions.hpp"

namespace zr::host::engine {

namespace {
bool all_ranks_have_own_copies(const job::StepContext& context) {
  const bool own = !context.plan.input.share_weights && context.plan.sharded_parameters().empty();
  const std::vector<char> all = job::all_gather(context.comm, static_cast<char>(own ? 1 : 0), "copies of weights");
  return std::ranges::all_of(all, [](char one) { return one != 0; });
}
}  // namespace

WeightMonitor::WeightMonitor(const job::StepContext& context, const Parts& parts)
    : context_(context),
      parts_(parts),
      digest_(context.plan, parts.state.buffers().memory(), parts.state.buffers().readers(), context.world(),
              context.device),
      samples_(!context.device &&
                       (context.plan.has_master || job::early_update_obstacle(context.config(), context.plan).empty())
                   ? WeightSamples(parts.state.bound_slices())
                   : WeightSamples()),
      has_own_copies_(all_ranks_have_own_copies(context)) {}

void WeightMonitor::record_write(uint32_t param) {
  digest_.written(param);
  collected_ = true;
  parts_.log.clear_hash();
  warn_if_unsaved(param);
}

void WeightMonitor::warn_if_unsaved(uint32_t param) {
  if (saved_hashes_.empty()) return;
  state::ShardedState& state = parts_.state;
  bool differs = false;  // if not, the program undid the write, or only read
  for (const uint32_t u : state.slices_of(param))
    differs |= state.hash_of_weights(state.slices()[u]) != saved_hashes_[u];
  if (!differs) return;
  saved_hashes_.clear();
  warned_unsaved_ = true;
  log(ZR_LOG_WARN, fmt::format("the program wrote to weights ('{}') after the checkpoint of step {} was saved, so the "
                               "checkpoint does not contain the new values: checkpoint.every saves at the end of "
                               "engine.step(); to include such writes, call engine.save() after them instead",
                               context_.plan.input.parameters[param].name, parts_.progress.step()));
}

void WeightMonitor::collect_writes() {
  state::ShardedState& state = parts_.state;
  const auto sync_master_from_weights = [&](uint32_t param) {
    bool changed = false;
    for (const uint32_t u : state.slices_of(param)) changed |= state.sync_master_from_weights(state.slices()[u]);
    return changed;
  };
  written_parameter();  // collects what the model reports
  for (const uint32_t param : std::exchange(written_, {})) {
    record_write(param);
    sync_master_from_weights(param);
  }
  for (const uint32_t param : state.take_stored()) {
    record_write(param);
    sync_master_from_weights(param);
  }
  for (const uint32_t param : context_.model.may_be_written_untracked()) {
    digest_.written(param);  // operators on tensors that the model cannot watch
    if (sync_master_from_weights(param)) record_write(param);
  }
  if (!context_.plan.has_master) return samples_.remember();
  for (const update::UpdateSlice* slice : samples_.changed())
    if (state.sync_master_from_weights(*slice)) record_write(slice->param);
  samples_.remember();
}

std::optional<uint32_t> WeightMonitor::written_parameter() {
  for (const uint32_t param : context_.model.written()) written_.insert(param);  // the model reports a write once
  if (!written_.empty()) return *written_.begin();
  if (const std::set<uint32_t>& stored = parts_.state.stored(); !stored.empty()) return *stored.begin();
  if (const auto changed = samples_.changed(); !changed.empty()) return changed.front()->param;
  return std::nullopt;
}

void WeightMonitor::publish_weights(bool frozen_too, uint32_t flags) {
  parts_.flow.publish_weights(frozen_too, flags);
  replaced_ = false;
  samples_.remember();
}

void WeightMonitor::compare() { compare_before(parts_.progress.step()); }

void WeightMonitor::compare_weights() {
  note_writes();
  compare_digests(parts_.progress.step());
}

// collect_writes() still collects them.
void WeightMonitor::note_writes() {
  written_parameter();
  for (const uint32_t param : written_) digest_.written(param);
  for (const uint32_t param : context_.model.may_be_written_untracked()) digest_.written(param);
  for (const update::UpdateSlice* slice : samples_.changed()) digest_.written(slice->param);
}

void WeightMonitor::discard_writes() {
  written_parameter();
  written_.clear();
  parts_.state.take_stored();
  parts_.flow.take_writes();
  digest_.forget_writes();
  samples_.remember();
}

void WeightMonitor::compare_before(int64_t step) {
  collect_writes();
  compare_digests(step);
}

void WeightMonitor::compare_digests(int64_t step) {
  digest_.compare(job::all_gather(context_.comm, next_digest(), "digests of weights"), context_.comm, step);
}

void WeightMonitor::begin_replacement() {
  if (context_.plan.input.share_weights)
    context_.comm.barrier("before a value is set");  // a peer may still read the shared weights
  collect_writes();
}

void WeightMonitor::end_replacement(uint32_t param) {
  warn_if_unsaved(param);
  parts_.flow.forget_writes(param);
  parts_.log.clear_hash();
  digest_.replaced(param);
  context_.model.values_replaced({param});
  if (!has_own_copies_) return parts_.step_timer.exclude([&] { publish_weights(true); });
  replaced_ = true;
  context_.model.weights_changed(true);
  samples_.remember();
}

// The ranks are compared first, because the strategy may replace what the program wrote in place on some of them only.
void WeightMonitor::publish_replacements() {
  if (!replaced_) return;
  parts_.step_timer.exclude([&] {
    compare_before(parts_.progress.step() + 1);
    publish_weights(true);
  });
}

void WeightMonitor::publish_loaded(const std::vector<uint32_t>& params) {
  for (const uint32_t param : params) {
    parts_.flow.forget_writes(param);
    digest_.replaced(param);
  }
  context_.model.values_replaced(params);
  parts_.step_timer.exclude([&] { publish_weights(true); });
}

void WeightMonitor::hash_saved_weights() {
  if (warned_unsaved_ || parts_.state.disk_buffers()) return;
  for (const update::UpdateSlice& slice : parts_.state.slices())
    saved_hashes_.push_back(parts_.state.hash_of_weights(slice));
}

}  // namespace zr::host::engine
