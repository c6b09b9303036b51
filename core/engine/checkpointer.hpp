// Saves and loads a job's checkpoints: periodic saves, the load at the start, engine.save() and engine.load().
#pragma once

#include <exception>
#include <string>
#include <vector>

#include "checkpoint/load.hpp"
#include "engine/checkpoint_contents.hpp"
#include "engine/checkpoint_loader.hpp"
#include "engine/refresh_state.hpp"
#include "engine/saver.hpp"
#include "engine/step_sync.hpp"
#include "engine/training_parts.hpp"
#include "job/step_context.hpp"

namespace zr::host::engine {

/// Training thread only. All ranks call collective methods in the same order, between steps.
class Checkpointer {
 public:
  /// Keeps references to the context and to all parts.
  Checkpointer(const job::StepContext& context, const TrainingParts& parts);
  Checkpointer(const Checkpointer&) = delete;

  /// checkpoint.dir, followed by the engine's name if it has one; "" if checkpoint.dir is not set.
  std::string dir() const;
  /// Locks the folder and allocates the memory for copies, if the configuration needs them. `first`: the job starts,
  /// rather than continues after a refresh; `on_signal`: a signal triggers a save. Collective.
  void prepare_saves(bool first, bool on_signal);
  /// Loads the checkpoint that checkpoint.resume or checkpoint.init selects. Collective.
  void load_initial();

  /// Writes a checkpoint of the current step into `root`, keeps the newest `keep` checkpoints there (0: all), and
  /// returns the checkpoint's folder. A failure on any rank is thrown on all ranks, and training may continue. `async`:
  /// returns when this rank's part is copied; the next step, save or load throws a failure. Waits for the previous
  /// save. Collective.
  std::string save(const std::string& root, int64_t keep, bool async);
  /// Called after each step. Saves if checkpoint.every, the last step or a signal requires it. Collective.
  void save_if_due(const GlobalStats& global);
  /// Saves the state for the next session of this run; returns the checkpoint's folder. Collective.
  std::string save_for_refresh();
  /// True if a background save failed and the failure has not been reported yet.
  bool failed() const { return saver_.failed(); }
  /// Waits for the background save. Throws its failure if the program requested the save, otherwise logs and counts it.
  /// Collective.
  void wait_for_save();
  /// Loads a checkpoint, the newest one in a folder of checkpoints, or safetensors files of another program. In a model
  /// in training, all bytes are verified before any is used, so damaged data changes nothing. If a load fails after it
  /// began to overwrite the weights, they are undefined and another load must follow. change: how the model differs
  /// from the one that save_for_refresh() saved; null: not a refresh. Collective.
  CheckpointLoadReport load(const std::string& path, const CheckpointLoadOptions& options,
                            const ParameterChange* change = nullptr);
  /// At the end of the job: waits for the background save, logs its failure, and releases folder locks and memory.
  void close();

  /// See checkpoint_comm_of().
  checkpoint::CheckpointComm checkpoint_comm() const { return checkpoint_comm_of(context_.setup.control); }

 private:
  checkpoint::CheckpointContents contents();
  std::string metadata_json();
  void record_failed_save(const Error& failure);
  checkpoint::Checkpoint open(const std::string& path, const CheckpointLoadOptions& options);
  void clear_states(uint32_t param);
  /// Loads the newest checkpoint in `dir`; false: there is none. Collective.
  bool resume(const std::string& dir, const CheckpointLoadOptions& options);
  void restore_metadata(const checkpoint::Checkpoint& from, const CheckpointLoader& found,
                        const ParameterChange* change);
  void restore_local(const checkpoint::Checkpoint& from, const CheckpointLoader& found);
  void warn_of_differences(const checkpoint::Checkpoint& from) const;
  void report_load(const CheckpointLoadReport& report, int64_t step) const;

  const job::StepContext& context_;
  const TrainingParts parts_;
  const int exceptions_ = std::uncaught_exceptions();  // in flight at construction; not caused by this job
  BufferValues buffers_;                               // referenced by the contents that are being saved
  bool by_config_ = false;                             // the configuration, not the program, requested the last save
  int64_t saving_step_ = 0;                            // the step of the last save
  std::string saving_folder_;                          // of the save that runs
  Saver saver_;
};

}  // namespace zr::host::engine
