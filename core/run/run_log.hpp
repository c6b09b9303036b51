// Records a run in its folder (config.toml, metrics.jsonl, summary.json) and shows its progress, on rank 0.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/ledger.hpp"
#include "comm/comm_runtime.hpp"
#include "config/config.hpp"
#include "run/progress_display.hpp"
#include "run/run_folder.hpp"

namespace zr::host::run {

/// The phases that a step's time is divided into.
enum class Phase { forward, backward, reduce, step_sync, optimizer, gather, checkpoint };
inline constexpr std::array<std::string_view, 7> kPhaseNames{"forward",   "backward", "reduce",    "step_sync",
                                                             "optimizer", "gather",   "checkpoint"};

/// A row of metrics.jsonl.
struct StepRow {
  int64_t step;  // the first is 1
  double loss, grad_norm, lr;
  int64_t tokens;  // of this step, summed over ranks: tokens, samples or what `unit` says
  double step_ms, tokens_per_s;
  int64_t communication_bytes;  // received in this step, summed over ranks, without padding and control traffic
  bool skipped;                 // because gradients were not finite
  double loss_scale;            // the factor of the losses; 0: not fp16
  std::string unit{};           // what `tokens` counts: "tokens", "samples", or the program's word; "": not recorded
};

/// A tier in use, with the bytes read and written since the start.
struct TierRow {
  std::string id;
  Tier tier;
  int64_t read_bytes, written_bytes;
};

/// Counts, on this rank, of work that overlapped with other work.
struct Overlap {
  int64_t collectives, early;              // of backward; those submitted before the last gradient arrived
  int64_t norm_blocks, norm_blocks_early;  // per step; those added up before backward ended
  int64_t disk_reads, disk_reads_ahead;    // ranges that collectives read from disk; those that were read ahead
  int64_t gradients_early;  // per step: elements of gradients for states on tiers, copied from a device in backward
  int64_t states, states_early;      // per step: elements with states on tiers; those updated before backward ended
  int64_t updates_early;             // steps with such updates
  int64_t bytes_early;               // of states and masters in these updates
  double update_s, read_s, write_s;  // seconds of these updates, and of their waits for tiers, of the run
};

/// The comparison of weights between ranks (WeightDigest): compared bytes per rank, bytes that the rank's optimizer
/// touched, and how often all weights were compared.
struct DigestRow {
  int64_t bytes, optimizer_bytes, cycles;
};

/// Training thread only.
class RunLog {
 public:
  /// Rank 0 locks the run folder of `engine` and writes to it only after accept(). Other ranks only keep numbers in
  /// memory. Throws UserError if another job has locked the folder.
  RunLog(const config::JobConfig& config, const std::string& engine, int ranks, int rank);
  /// Called when the job has passed every check: creates the folder of this run, and copies the rows of the newest
  /// earlier run up to the step that was passed to resume(). If that step is the last one and the earlier run has a
  /// summary.json of it, creates no folder, so that the earlier run remains the newest; a later row creates the folder
  /// then. Rank 0 only.
  void accept();
  /// Writes a row to metrics.jsonl and updates the progress display. `memory`: peak bytes by tier.
  void step(const StepRow& row, const std::array<int64_t, 3>& memory);
  /// Writes a validation row and prints it.
  void validation(int64_t step, double loss);
  /// Records that a checkpoint of `step` was loaded.
  void resume(int64_t step);
  /// Counts a checkpoint; `folder`: its path.
  void record_save(int64_t step, const std::string& folder = "") {
    saved_step_ = step, ++saved_, saved_folder_ = folder;
  }
  void record_failed_save() { ++failed_saves_; }        // counts a checkpoint that could not be saved
  void record_signal(int signal) { signal_ = signal; }  // records the signal that ends the run
  /// Adds time to a phase.
  void add(Phase phase, double seconds) { seconds_[static_cast<std::size_t>(phase)] += seconds; }
  /// Sets the weights hash and the communication of all ranks after the last step. The next step clears both.
  void set_totals(const std::string& hash, const comm::CommVolume& all_ranks) {
    hash_ = hash, communication_ = all_ranks;
  }
  void record_failure(bool failed) { failed_ = failed; }  // records whether an error ends the run
  /// The number of steps of this run.
  int64_t steps_made() const { return steps_made_; }
  /// Clears the weights hash, because something other than a step changed the weights.
  void clear_hash() { hash_.reset(); }
  /// Sets the tiers in use.
  void set_tiers(std::vector<TierRow> tiers) { tiers_ = std::move(tiers); }
  /// Sets the peak memory of the device that the model computes on, in bytes.
  void set_device_peak(int64_t bytes) { device_peak_ = std::max(device_peak_, bytes); }
  void set_digest(const DigestRow& digest) { digest_ = digest; }
  /// Adds the seconds of a phase in which training waited for reads from tiers and for writes to them. Ignores
  /// Phase::checkpoint, which is not part of a step.
  void add_waits(Phase phase, double read, double write);
  /// After the last step, and before the object is destroyed: tries again to write rows that could not be written. If
  /// that fails too, logs it and calls note_unwritten_file().
  void settle_rows();
  /// Writes summary.json, atomically, and shows the closing line of the run.
  void finish(const Ledger& ledger, const Overlap& overlap);
  /// The path of this run's folder; "" if it has none (yet), and on ranks other than 0.
  std::string folder() const { return folder_ && has_folder_ ? folder_->run() : ""; }

 private:
  void create_folder();
  std::string closing_text() const;
  void append(const std::string& row);
  void show(const StepRow& row, const std::array<int64_t, 3>& memory);
  std::vector<std::pair<std::string_view, double>> waits() const;

  std::optional<RunFolder> folder_;  // empty on ranks other than 0
  int ranks_;
  int64_t steps_;
  std::string config_;       // as TOML
  bool has_folder_ = false;  // whether this run has a folder
  bool has_device_;          // whether the model computes on a device other than the CPU
  int64_t device_peak_ = 0;  // bytes
  bool resumes_;             // checkpoint.resume
  bool can_resume_;          // `zeroth train` can start the job again from checkpoint.dir
  ProgressDisplay display_;
  int64_t first_step_ = 0;  // step of the last checkpoint that was loaded; 0: none
  int64_t steps_made_ = 0;  // number of steps of this run
  int64_t saved_ = 0, failed_saves_ = 0, saved_step_ = 0;
  std::string saved_folder_;               // of the last checkpoint
  bool closed_ = false;                    // the closing line was shown
  std::string unwritten_, write_failure_;  // rows that could not be written yet, and why
  int signal_ = 0;
  bool failed_ = false;
  std::array<double, kPhaseNames.size()> seconds_{};
  StepRow last_{};
  int64_t tokens_ = 0;
  double milliseconds_ = 0, recent_rate_ = 0;
  int64_t skipped_ = 0;
  double validation_loss_ = 0;
  bool has_validation_loss_ = false;
  std::optional<std::string> hash_;
  std::optional<comm::CommVolume> communication_;
  std::vector<TierRow> tiers_;
  DigestRow digest_{};
  double read_wait_ = 0, write_wait_ = 0;
  std::array<double, kPhaseNames.size()> waited_{};  // the part of seconds_ spent waiting for tiers
  std::chrono::steady_clock::time_point start_;
};

}  // namespace zr::host::run
