// Checkpoints of a job: when they are written, what is loaded at its start, and what the program saves and loads.
#pragma once

#include <exception>
#include <string>
#include <vector>

#include "checkpoint/load.hpp"
#include "engine/checkpoint_image.hpp"
#include "engine/checkpoint_loader.hpp"
#include "engine/refresh_state.hpp"
#include "engine/saver.hpp"
#include "engine/step_context.hpp"
#include "engine/step_sync.hpp"
#include "engine/training_parts.hpp"

namespace zr::host {

/// Training thread only. Collective methods are called by all ranks alike, between steps.
class Checkpointer {
 public:
  /// Refers to all of it.
  Checkpointer(const StepContext& context, const TrainingParts& parts);
  Checkpointer(const Checkpointer&) = delete;

  /// checkpoint.dir, and below it the engine's name if it has one; "" if there is no such folder.
  std::string dir() const;
  /// Takes the folder and the memory for copies that the configuration will need. `first`: the job begins here;
  /// `on_signal`: a signal makes it save. Collective.
  void prepare(bool first, bool on_signal);
  /// Loads what [checkpoint] resume and init ask for. Collective.
  void begin();

  /// Writes a checkpoint of the present step into `root`, keeps the newest `keep` there (0: all), and returns its
  /// folder. A failure on any rank is thrown on all, and training may go on. `aside`: returns when this rank's part is
  /// copied; a failure is thrown by the next step, save or load. Waits for the one before. Collective.
  std::string save(const std::string& root, int64_t keep, bool async);
  /// Saves what checkpoint.every, the last step or a signal asks for, once a step was made. Collective.
  void save_if_due(const GlobalStats& global);
  /// Saves the state for another session of this run; returns its folder. Collective.
  std::string save_for_refresh();
  /// The save in the background failed, and nobody was told.
  bool failed() const { return saver_.failed(); }
  /// Waits for what is being written in the background, and throws, or reports, what it failed with. Collective.
  void settle();
  /// A checkpoint, the newest in a folder of them, or safetensors files of another program. A failure before its bytes
  /// are used leaves all as it was; in a model that was not trained yet it leaves no weights, and another load must
  /// follow. change: how the model differs from the one that was saved by save_for_refresh(); else null. Collective.
  LoadReport load(const std::string& path, const LoadOptions& how, const ParameterChange* change = nullptr);
  /// The job ends: settles, logs a failure, and gives folders and memory back.
  void close();

 private:
  CheckpointComm peers() const { return peers_of(context_.setup.control); }
  CheckpointContents present();
  std::string facts();
  void not_saved(const Failure& failure);
  Checkpoint open(const std::string& path, const LoadOptions& how);
  void clear_states(uint32_t param);
  void take_facts(const Checkpoint& from, const CheckpointLoader& found, const ParameterChange* change);
  void report_facts(const Checkpoint& from) const;
  void report_load(const LoadReport& report, int64_t step) const;

  const StepContext& context_;
  const TrainingParts parts_;
  const int exceptions_ = std::uncaught_exceptions();  // under way when this began: not this job's
  BufferValues buffers_;                               // of the image that is being saved
  bool by_config_ = false;                             // the last save was checkpoint.every's, not the program's
  int64_t saving_ = 0;                                 // the step of the last save
  Saver saver_;
};

}  // namespace zr::host
