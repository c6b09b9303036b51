#include "engine/step_timer.hpp"

#include <string>

#include "engine/optimizer_update.hpp"
#include "job/all_gather.hpp"

namespace zr::host::engine {

namespace {
using Clock = std::chrono::steady_clock;
}  // namespace

StepTimer::StepTimer(const job::StepContext& context, const state::ShardedState& state, run::RunLog& log, Trace* trace,
                     const offload::ActivationStore* activations)
    : context_(context), state_(state), log_(log), trace_(trace), activations_(activations) {
  restart_clock();
}

// Seconds since the start that the training thread waited for tiers.
offload::TierWaits StepTimer::waits() const {
  offload::TierWaits total = state_.waits();
  if (activations_) {
    total.read += activations_->counts().read_wait;
    total.write += activations_->counts().write_wait;
  }
  return total;
}

void StepTimer::lap(run::Phase phase) {
  const auto now = Clock::now();
  log_.add(phase, std::chrono::duration<double>(now - mark_).count());
  const offload::TierWaits waits = this->waits();
  log_.add_waits(phase, waits.read - waited_.read, waits.write - waited_.write);
  waited_ = waits;
  if (trace_) trace_->span("training", std::string(run::kPhaseNames[static_cast<std::size_t>(phase)]), mark_, now);
  mark_ = now;
}

void StepTimer::restart_clock() {
  mark_ = step_start_ = Clock::now();
  waited_ = waits();
}

void StepTimer::lap_checkpoint() {
  lap(run::Phase::checkpoint);
  step_start_ = mark_;
}

void StepTimer::exclude(const std::function<void()>& work) {
  const int64_t before = context_.comm.volume().total();
  work();
  excluded_bytes_ += context_.comm.volume().total() - before;
}

// The ledger's tier `device` has the activations of a job on a device if it is memory of the device.
void StepTimer::observe_activations() {
  const model::DeviceBytes on_device = context_.model.device_memory();
  log_.set_device_peak(on_device.peak);
  model::LibraryMemory::Temporaries temporaries = context_.model.temporaries();
  if (context_.device) temporaries = {on_device.held - on_device.of_engines, on_device.peak - on_device.of_engines};
  if (context_.plan.in_host_memory() || (context_.device && !on_device.counted)) return;
  context_.ledger.observe(Tier::device, MemoryKind::activations, "activations and temporaries", temporaries.held,
                          temporaries.peak);
}

void StepTimer::step(const GlobalStats& global, double rate, const TrainingProgress& progress) {
  std::vector<run::TierRow> rows;
  for (const auto& tier : state_.tiers())
    if (tier) rows.push_back({tier->info().id, tier->info().tier, tier->read_bytes(), tier->written_bytes()});
  log_.set_tiers(std::move(rows));
  int64_t bytes = 0;
  for (const int64_t of_rank :
       job::all_gather(context_.comm, context_.comm.volume().total() - excluded_bytes_, "communication volume"))
    bytes += of_rank;
  const int64_t bytes_before = std::exchange(recorded_bytes_, bytes);
  observe_activations();
  lap(run::Phase::step_sync);
  const double seconds = std::chrono::duration<double>(mark_ - step_start_).count();
  step_start_ = mark_;
  log_.step({progress.step(), progress.loss(), progress.grad_norm(), rate, global.tokens, seconds * 1e3,
             static_cast<double>(global.tokens) / seconds, bytes - bytes_before, global.non_finite > 0,
             context_.plan.input.weight_dtype == ZR_F16 ? progress.loss_scale().value() : 0, progress.unit()},
            {context_.ledger.peak(Tier::device), context_.ledger.peak(Tier::host), context_.ledger.peak(Tier::disk)});
}

void StepTimer::record_totals(const std::string& hash) {
  comm::CommVolume total;
  for (const comm::CommVolume& other : job::all_gather(context_.comm, volume(), "communication volume")) total += other;
  log_.set_totals(hash, total);
  restart_clock();
}

run::Overlap StepTimer::overlap(const GradientFlow& gradients, const NormBlocks& norm,
                                const OptimizerUpdate* update) const {
  run::Overlap total = overlap_before_;
  total.collectives += gradients.collectives();
  total.early += gradients.collectives_early();
  total.norm_blocks += norm.own_blocks();
  total.norm_blocks_early += norm.blocks_summed_early();
  const offload::DiskBackedBuffers* disk_buffers = state_.disk_buffers();
  total.disk_reads += disk_buffers ? disk_buffers->reads() : 0;
  total.disk_reads_ahead += disk_buffers ? disk_buffers->reads_ahead() : 0;
  const offload::DeviceUpdates* const device_updates = state_.device_updates();
  total.gradients_early += device_updates ? device_updates->copied_early() : 0;
  total.states += update ? update->elements_on_tiers() : 0;
  total.states_early += update ? update->elements_early() : 0;
  total.updates_early += update ? update->adopted() : 0;
  if (!update) return total;
  total.bytes_early += update->bytes_early();
  total.update_s += update->early_seconds(EarlyUpdate::Work::update);
  total.read_s += update->early_seconds(EarlyUpdate::Work::read);
  total.write_s += update->early_seconds(EarlyUpdate::Work::write);
  return total;
}

comm::CommVolume StepTimer::volume() const {
  comm::CommVolume total = context_.comm.volume();
  total += earlier_communication_;
  return total;
}

void StepTimer::continue_from(const comm::CommVolume& communication, const run::Overlap& overlap) {
  earlier_communication_ = communication;
  overlap_before_ = overlap;
  excluded_bytes_ = context_.comm.volume().total();
}

}  // namespace zr::host::engine
