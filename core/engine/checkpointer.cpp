#include "engine/checkpointer.hpp"

#include <fmt/format.h>

#include <cstring>
#include <optional>

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/log.hpp"
#include "checkpoint/folder.hpp"
#include "engine/checkpoint_choice.hpp"
#include "engine/model_seed.hpp"
#include "engine/optimizer_globals.hpp"
#include "job/checkpoint_paths.hpp"
#include "job/plan_inputs.hpp"
#include "run/run_folder.hpp"

namespace zr::host::engine {

namespace {
// Counts the host memory of a part of a checkpoint that is read or written.
class CountedChunk {
 public:
  CountedChunk(Ledger& ledger, MemoryKind kind, int64_t bytes) : ledger_(ledger), kind_(kind), bytes_(bytes) {
    if (bytes_ > 0) ledger_.add(Tier::host, kind_, kTag, bytes_);
  }
  ~CountedChunk() {
    if (bytes_ > 0) ledger_.add(Tier::host, kind_, kTag, -bytes_);
  }
  CountedChunk(const CountedChunk&) = delete;

 private:
  static constexpr const char* kTag = "checkpoint chunk";
  Ledger& ledger_;
  const MemoryKind kind_;
  const int64_t bytes_;
};

// Of a save that reads the training state from the device.
int64_t staging_of_save(const job::StepContext& context) {
  return context.device ? checkpoint::SaveOptions().chunk_bytes : 0;
}
}  // namespace

Checkpointer::Checkpointer(const job::StepContext& context, const TrainingParts& parts)
    : context_(context), parts_(parts), saver_(context.setup.control, context.ledger) {}

std::string Checkpointer::dir() const {
  const std::string& dir = context_.config().checkpoint().dir;
  return dir.empty() || context_.setup.engine.empty() ? dir : fmt::format("{}/{}", dir, context_.setup.engine);
}

void Checkpointer::prepare_saves(bool first, bool on_signal) {
  const std::string dir = this->dir();
  if (dir.empty()) return;
  const config::JobConfig& config = context_.config();
  const int rank = context_.rank();
  const config::CheckpointConfig& checkpoint = config.checkpoint();
  const bool periodic = checkpoint.every > 0;
  if (first && periodic && checkpoint.keep == 1 && !parts_.name.steps_of_other_engines().empty() && rank == 0)
    log(ZR_LOG_WARN,
        fmt::format("checkpoint.keep = 1 ({}) with several engines: if the job ends between their saves, no "
                    "checkpoints that were saved together remain to resume from; set checkpoint.keep to 2 or more",
                    checkpoint.keep.origin.text()));
  if (periodic || on_signal) saver_.lock_folder(dir);
  if (context_.device && context_.plan.save_staging > 0)
    context_.ledger.plan(Tier::host, MemoryKind::staging, context_.plan.save_staging);
  if (!job::snapshots(config)) return;
  int64_t bytes = context_.plan.snapshot_bytes();
  const std::vector<model::ModelBuffer> buffers = context_.model.buffers();
  for (const model::ModelBuffer& buffer : buffers)
    bytes += buffer.bytes * ((rank == 0 ? 1 : 0) + (context_.world() > 1 ? 1 : 0));
  context_.ledger.plan(Tier::host, MemoryKind::snapshot, bytes);
  checkpoint::CheckpointContents contents =
      contents_of(context_, parts_.state, parts_.buffers, {std::vector<char>(buffers.size(), 0), {}});
  parts_.local.add_to(contents);
  saver_.reserve_for(contents);
}

std::string Checkpointer::metadata_json() {
  checkpoint::CheckpointMetadata metadata;
  metadata.globals = save_globals(context_);
  const TrainingProgress& progress = parts_.progress;
  metadata.slots = context_.plan.input.state_names();
  for (std::size_t i = 0; i < progress.param_steps().size(); ++i) {
    const std::string& name = context_.plan.input.parameters[i].name;
    metadata.parameter_steps[name] = progress.param_steps()[i];
    if (const int64_t local = progress.param_local_steps()[i]) metadata.parameter_local_steps[name] = local;
  }
  const LossScale::State scale = progress.loss_scale().state();
  metadata.loss_scale = {scale.value, scale.good, scale.hysteresis_left, scale.skips, scale.dynamic};
  metadata.last_step_applied = progress.last_step_applied();
  metadata.optimizer = context_.optimizers.ids();
  metadata.updates = progress.updates();
  metadata.samples = progress.samples();
  metadata.engines = parts_.name.steps_of_other_engines();
  metadata.seed = context_.config().train().seed;
  metadata.world = context_.world();
  metadata.strategy = context_.setup.strategy.table->id;
  metadata.config = context_.config().to_toml();
  return to_text(metadata);
}

// The current state and its metadata. The contents refer to buffers_, which stays unchanged until the save ends.
checkpoint::CheckpointContents Checkpointer::contents() {
  parts_.step_timer.exclude([&] {
    buffers_.differing = parts_.buffers.differing(context_.comm);
    buffers_.declared = parts_.buffers.declared(context_.comm, buffers_.differing);
  });
  checkpoint::CheckpointContents contents = contents_of(context_, parts_.state, parts_.buffers, buffers_);
  parts_.local.add_to(contents);
  contents.step = parts_.progress.step();
  contents.run = context_.setup.control->job_id();
  contents.metadata_json = metadata_json();
  contents.last_step_applied = parts_.progress.last_step_applied();
  return contents;
}

std::string Checkpointer::save(const std::string& root, int64_t keep, bool async) {
  const TrainingProgress& progress = parts_.progress;
  progress.check_complete();
  if (progress.within_step())
    fail_user(
        "engine.save() was called between engine.backward() and the engine.step() that ends its step: gradients are "
        "not saved; call engine.save() after engine.step()");
  context_.model.check_scopes("engine.save()");
  context_.comm.barrier("before a checkpoint is saved");  // a rank that never calls save() is reported as a hang
  wait_for_save();
  by_config_ = false;
  parts_.weights.clear_saved_hashes();
  parts_.weights.compare();
  checkpoint::CheckpointContents contents = this->contents();
  std::string folder = fmt::format("{}/{}", root, checkpoint::checkpoint_name(progress.step()));
  saving_step_ = progress.step();
  saving_folder_ = folder;
  if (async && !progress.done()) {
    saver_.save_async(root, std::move(contents), keep);
  } else {
    const CountedChunk chunk(context_.ledger, MemoryKind::staging, staging_of_save(context_));
    folder = saver_.save(root, contents, keep);
    parts_.log.record_save(progress.step(), folder);
  }
  buffers_ = {};
  parts_.step_timer.lap_checkpoint();
  return folder;
}

std::string Checkpointer::save_for_refresh() {
  wait_for_save();
  parts_.weights.compare();
  const checkpoint::CheckpointContents contents = this->contents();
  std::string folder = checkpoint_comm().broadcast(parts_.log.folder());  // rank 0 alone knows this run's number
  if (folder.empty()) folder = run::run_folder(context_.config(), context_.setup.engine);
  const CountedChunk chunk(context_.ledger, MemoryKind::staging, staging_of_save(context_));
  return saver_.save(folder + "/refresh", contents, 0);
}

// Waits for the background save and handles its result.
void Checkpointer::wait_for_save() {
  try {
    if (saver_.wait()) parts_.log.record_save(saving_step_, saving_folder_);
  } catch (const Error& failure) {
    if (!by_config_) throw;
    record_failed_save(failure);
  }
}

void Checkpointer::close() {
  log_exception_of([&] { wait_for_save(); });
  saver_.close();
}

// A save that the configuration requested failed: logs and counts it, and training continues. But no rank continues
// after a peer is lost, or after a tier failed on any rank, because the data on that tier is incomplete.
void Checkpointer::record_failed_save(const Error& failure) {
  if (failure.exit_code() == exit_code::peer_lost) throw;
  const offload::Tiers& tiers = parts_.state.tiers();
  char failed = 0;
  for (const auto& tier : tiers) failed |= tier && tier->failed();
  // The exchange is collective, so a rank that an exception is ending does not start it.
  const bool exchanges = tiers.size() > 1 && std::uncaught_exceptions() <= exceptions_;
  for (const std::string& tier_failed :
       exchanges ? context_.comm.all_gather_bytes({failed}, "tiers") : std::vector{std::string{failed}})
    if (tier_failed[0]) throw;
  parts_.log.record_failed_save();
  if (context_.rank() == 0) log(ZR_LOG_ERROR, std::string(failure.what()) + "; training continues");
}

void Checkpointer::save_if_due(const GlobalStats& global) {
  TrainingProgress& progress = parts_.progress;
  const config::JobConfig& config = context_.config();
  const std::string dir = this->dir();
  const int64_t every = config.checkpoint().every, keep = config.checkpoint().keep;
  const bool ends = progress.step() == progress.steps() || global.stop;
  if (global.stop && !progress.stopped()) {
    progress.stop();
    if (context_.rank() == 0)
      log(ZR_LOG_INFO, fmt::format("{}: saving step {} to {}, then ending the job; `zeroth train --resume` resumes it",
                                   ::strsignal(global.stop), progress.step(), dir));
    parts_.log.record_signal(global.stop);
  }
  const bool due = !dir.empty() && (progress.stopped() || (every > 0 && (progress.step() % every == 0 || ends)));
  std::exception_ptr previous_failure;
  if (due || global.save_failed) try {
      wait_for_save();
    } catch (const Error&) {
      previous_failure = std::current_exception();
    }
  if (due) try {
      save(dir, keep, config.checkpoint().async);
      by_config_ = true;
      parts_.weights.hash_saved_weights();
    } catch (const Error& failure) {
      if (ends) {  // the run's result is lost, so the job fails
        parts_.log.record_failed_save();
        throw;
      }
      record_failed_save(failure);
    }
  if (previous_failure) std::rethrow_exception(previous_failure);
}

// Opens the checkpoint. Verifies all of it before use if a failure would damage a model in training, or if an older
// checkpoint can replace it.
checkpoint::Checkpoint Checkpointer::open(const std::string& path, const CheckpointLoadOptions& options) {
  const std::vector<std::string> candidates = checkpoints_to_try(path, options.fallback, checkpoint_comm());
  for (std::size_t i = 0;; ++i) try {
      std::optional<checkpoint::Checkpoint> from;
      run_on_all_ranks(checkpoint_comm(), [&] {
        from.emplace(candidates[i]);
        if (parts_.progress.step() > 0 || options.fallback)
          from->verify([](int64_t) {}, context_.rank(), context_.world());
      });
      return std::move(*from);
    } catch (const Error& failure) {
      const bool damaged = failure.exit_code() == exit_code::user || failure.exit_code() == exit_code::environment;
      if (!damaged || i + 1 == candidates.size()) throw;
      if (context_.rank() == 0)
        log(ZR_LOG_WARN, fmt::format("{}; falling back to {}", failure.what(), candidates[i + 1]));
    }
}

void Checkpointer::clear_states(uint32_t param) {
  parts_.state.clear_states(param);
  parts_.local.restart(param);
  parts_.progress.set_param_steps(param, 0);
}

// Restores step, schedule, loss scale, and what the optimizer saves in addition to its states.
void Checkpointer::restore_metadata(const checkpoint::Checkpoint& from, const CheckpointLoader& found,
                                    const ParameterChange* change) {
  const checkpoint::CheckpointMetadata& metadata = from.manifest().metadata;
  TrainingProgress& progress = parts_.progress;
  progress.restore(from.manifest().step, metadata.updates, metadata.samples, metadata.last_step_applied);
  context_.comm.set_step(progress.step());
  change ? parts_.name.record_step(progress.step()) : parts_.name.record_load(progress.step(), metadata.engines);
  found.for_each_weight([&](uint32_t param, const std::string& saved) {
    const auto steps = metadata.parameter_steps.find(saved);
    if (steps == metadata.parameter_steps.end() || !found.has_same_optimizer(param))
      return progress.set_param_steps(param, 0);
    const auto local = metadata.parameter_local_steps.find(saved);
    progress.set_param_steps(param, steps->second, local == metadata.parameter_local_steps.end() ? 0 : local->second);
  });
  // If one optimizer state of a parameter is missing, all its states and its step count restart.
  for (const uint32_t param : found.fresh_params()) clear_states(param);
  const auto& scale = metadata.loss_scale;
  progress.loss_scale().restore({scale.value, scale.good, scale.hysteresis_left, scale.skips, scale.dynamic});
  parts_.gradients.check_non_finite(progress.loss_scale().checks_gradients());
  load_globals(context_, metadata);
  if (!change) {
    warn_of_differences(from);
    parts_.log.resume(progress.step());
  }
  seed_model(context_, progress);
}

// Restores the optimizer's states that only steps with local gradients have.
void Checkpointer::restore_local(const checkpoint::Checkpoint& from, const CheckpointLoader& found) {
  std::vector<std::pair<uint32_t, std::string>> names;
  found.for_each_weight([&](uint32_t param, const std::string& saved) {
    if (found.has_same_optimizer(param)) names.emplace_back(param, saved);
  });
  const int64_t saved_world = from.manifest().metadata.world;
  const std::string lost = parts_.local.restore(from, saved_world, names);
  if (lost.empty() || context_.rank() != 0) return;
  log(ZR_LOG_WARN, fmt::format("{}: the states {} of optimizer '{}' are reset, because {} ranks saved them and this "
                               "job has {}: the compression errors of those ranks are lost, and the momentum is kept",
                               from.folder(), lost, context_.optimizers.ids(), saved_world, context_.world()));
}

void Checkpointer::warn_of_differences(const checkpoint::Checkpoint& from) const {
  if (context_.rank() != 0) return;
  const checkpoint::CheckpointMetadata& metadata = from.manifest().metadata;
  const int64_t step = parts_.progress.step(), samples = parts_.progress.samples();
  if (const int64_t seed = context_.config().train().seed; metadata.seed != seed)
    log(ZR_LOG_WARN, fmt::format("{}: was trained with train.seed = {}, but this run has {}; the resumed run will not "
                                 "reproduce the original",
                                 from.folder(), metadata.seed, seed));
  if (const int64_t expected = step * context_.config().train().global_batch; samples != expected)
    log(ZR_LOG_WARN, fmt::format("{}: the saved run has read {} samples, but {} steps of train.global_batch are {} "
                                 "samples; a program that selects data by step will continue at a different sample",
                                 from.folder(), samples, step, expected));
}

CheckpointLoadReport Checkpointer::load(const std::string& path, const CheckpointLoadOptions& requested,
                                        const ParameterChange* change) {
  TrainingProgress& progress = parts_.progress;
  progress.check_broken_off();
  if (progress.within_step())
    fail_user(
        "engine.load() was called between engine.backward() and the engine.step() that ends its step; call "
        "engine.load() after engine.step()");
  context_.model.check_scopes("engine.load()");
  context_.comm.barrier("before a checkpoint is loaded");  // so that no peer still reads memory that is overwritten
  wait_for_save();
  by_config_ = false;
  parts_.weights.clear_saved_hashes();
  parts_.weights.collect_writes();
  const checkpoint::Checkpoint from = open(path, requested);
  CheckpointLoadOptions options = requested;
  options.weights_only |= from.from_other_program();
  if (from.from_other_program()) options.renames = context_.config().renames();
  check_renames(options.renames, context_.plan.input.parameters, context_.model.buffers());
  CheckpointLoader loader(context_, {parts_.state, parts_.buffers}, from, options, change);
  loader.check();
  if (options.provide_values) options.provide_values(loader.names_to_read());
  if (loader.has_repeated()) run_on_all_ranks(checkpoint_comm(), [&] { loader.compare_repeated(); });
  parts_.update.forget_begin();
  progress.begin_load();
  parts_.log.clear_hash();
  {
    const CountedChunk chunk(context_.ledger, MemoryKind::other, from.largest_chunk());
    parts_.local.restart();
    run_on_all_ranks(checkpoint_comm(), [&] {
      loader.read();
      restore_local(from, loader);
    });
  }
  parts_.buffers.refresh(context_.comm);
  std::vector<uint32_t> loaded;
  loader.for_each_weight([&](uint32_t param, const std::string&) { loaded.push_back(param); });
  parts_.weights.publish_loaded(loaded);
  if (options.weights_only)
    for (uint32_t param = 0; param < progress.param_steps().size(); ++param) clear_states(param);
  else
    restore_metadata(from, loader, change);
  progress.end_load();
  CheckpointLoadReport report = loader.report();
  if (!change) report_load(report, options.weights_only ? -1 : from.manifest().step);
  parts_.step_timer.lap_checkpoint();
  return report;
}

// Always reports tensors that were not loaded.
void Checkpointer::report_load(const CheckpointLoadReport& report, int64_t step) const {
  if (context_.rank() != 0) return;
  std::string text = fmt::format("{}: {} loaded", report.folder, step < 0 ? "weights" : fmt::format("step {}", step));
  text += list_of("missing", report.missing) + list_of("different shape", report.other_shape) +
          list_of("unexpected", report.unexpected);
  log(report.missing.empty() && report.other_shape.empty() && report.unexpected.empty() ? ZR_LOG_INFO : ZR_LOG_WARN,
      text);
  warn_of_rounded_buffers(report.folder, report.rounded_buffers);
  const std::string optimizer = fmt::format("{}: optimizer '{}' ", report.folder, context_.optimizers.ids());
  if (!report.fresh.empty())
    log(ZR_LOG_WARN, fmt::format("{}starts states at zero{}", optimizer, list_of("missing", report.fresh)));
  if (!report.dropped.empty())
    log(ZR_LOG_WARN, fmt::format("{}ignores saved states{}", optimizer, list_of("unused", report.dropped)));
}

bool Checkpointer::resume(const std::string& dir, const CheckpointLoadOptions& options) {
  const checkpoint::CheckpointComm comm = checkpoint_comm();
  std::string there;
  run_on_all_ranks(comm, [&] {
    if (comm.rank != 0) return;
    if (path_exists(dir + "/" + checkpoint::kManifest))
      fail_user(dir + ": is a checkpoint itself, not a folder of checkpoints; set checkpoint.dir to its parent folder");
    if (!checkpoint::checkpoints_in(dir).empty()) there = "yes";
  });
  const bool found = comm.broadcast(there) == "yes";
  if (found)
    load(dir, options);
  else if (comm.rank == 0)
    report_no_checkpoint(dir);
  if (comm.rank == 0)
    for (const std::string& line : parts_.name.mismatch_warnings()) log(ZR_LOG_WARN, line);
  return found;
}

void Checkpointer::load_initial() {
  const config::JobConfig& config = context_.config();
  CheckpointLoadOptions options;
  options.strict = config.checkpoint().strict;
  options.convert = config.checkpoint().convert;
  options.fallback = config.checkpoint().fallback;
  const std::string dir = this->dir();
  if (!dir.empty() || !config.checkpoint().init->empty())
    run_on_all_ranks(checkpoint_comm(), [&] {
      if (context_.rank() == 0) job::check_checkpoint_paths(config.checkpoint());
    });
  if (config.checkpoint().resume && !dir.empty() && resume(dir, options)) return;
  if (const std::string& init = config.checkpoint().init; !init.empty()) {
    options.weights_only = true;
    options.renames = config.renames();
    // A folder to which named engines saved has one folder per engine.
    const checkpoint::CheckpointComm comm = checkpoint_comm();
    std::string engine_folder;
    if (comm.rank == 0 && !context_.setup.engine.empty() && path_exists(init + "/" + context_.setup.engine))
      engine_folder = "/" + context_.setup.engine;
    load(init + comm.broadcast(engine_folder), options);
  }
}

}  // namespace zr::host::engine
