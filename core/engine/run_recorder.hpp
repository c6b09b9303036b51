// The run folder: config.toml, metrics.jsonl, summary.json; and the progress line. Written by rank 0 alone.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/ledger.hpp"
#include "comm/comm_runtime.hpp"
#include "config/config.hpp"
#include "engine/run_folder.hpp"
#include "plan/plan.hpp"

namespace zr::host {

/// Where a step's time went.
enum class Phase { forward, backward, reduce, step_sync, optimizer, gather, checkpoint };
inline constexpr std::array<std::string_view, 7> kPhaseNames{"forward",   "backward", "reduce",    "step_sync",
                                                             "optimizer", "gather",   "checkpoint"};

/// ActivationStore as the newest run in the run folder of that engine measured them that had the same program's keys,
/// type and micro-batch.
PlanContext measured_activations(const JobConfig& config, const std::string& engine);

struct StepRow {
  int64_t step;  // 1 at the first
  double loss, grad_norm, lr;
  int64_t tokens;  // of this step, all ranks
  double step_ms, tokens_per_s;
  int64_t communication_bytes;  // received in this step, summed over ranks, unpadded, control traffic apart
  bool skipped;                 // the gradients were not finite
  double loss_scale;            // what the losses were multiplied by; 0: nothing to tell
};

/// A tier in use: bytes moved since the start.
struct TierRow {
  std::string id;
  Tier tier;
  int64_t read_bytes, written_bytes;
};

/// Collectives of backward, of them those submitted before its last gradient arrived; leaves of the norm on this rank,
/// of them those added up before backward had ended; what collectives read of a disk, of it what was read ahead.
struct Overlap {
  int64_t collectives, early, norm_blocks, norm_blocks_early, paged_reads, paged_reads_ahead;
};

/// What was compared between ranks (WeightDigest): bytes per rank, against bytes that its optimizer touched.
struct DigestRow {
  int64_t bytes, optimizer_bytes, cycles;
};

class RunRecorder {
 public:
  /// Rank 0 locks the run folder of `engine`, and writes nothing in it before accept(); other ranks keep numbers only.
  /// Throws Failure(user) if another job has the folder.
  RunRecorder(const JobConfig& config, const std::string& engine, int ranks, int rank);
  ~RunRecorder();
  /// The job passed every check: makes the folder of this run. Rows of the newest earlier run up to the step that
  /// resume() named are copied to it. If that was the last step and the earlier run has its summary.json, nothing is
  /// left to record: the earlier run stays the newest, unless a row follows. Rank 0 only.
  void accept();
  /// A row of metrics.jsonl, and of what the user watches.
  void step(const StepRow& row, int64_t memory_bytes);
  void validation(int64_t step, double loss);  // likewise
  /// A checkpoint of `step` was loaded.
  void resume(int64_t step);
  void saved(int64_t step) { saved_step_ = step, ++saved_; }  // a checkpoint
  void not_saved() { ++not_saved_; }
  void stopped(int signal) { signal_ = signal; }  // that ends the run
  void add(Phase phase, double seconds) { seconds_[static_cast<std::size_t>(phase)] += seconds; }
  /// Weights hash and communication of all ranks after the last step; the next step makes both unknown again.
  void set_totals(const std::string& hash, const CommVolume& all_ranks) { hash_ = hash, communication_ = all_ranks; }
  /// The weights changed otherwise than by a step: their hash is unknown.
  void forget_hash() { hash_.reset(); }
  /// Tiers in use.
  void set_tiers(std::vector<TierRow> tiers) { tiers_ = std::move(tiers); }
  void set_digest(const DigestRow& digest) { digest_ = digest; }
  /// Seconds of a phase in which training stood still for reads from tiers, and for writes to them; of a checkpoint,
  /// which is no part of a step, they are not told.
  void add_waits(Phase phase, double read, double write);
  /// Writes summary.json aside and renames it.
  void finish(const Ledger& ledger, const Overlap& overlap);
  /// Path of this run's own folder; "" if it has none (yet), and on ranks above 0.
  std::string folder() const { return folder_ && begun_ ? folder_->run() : ""; }

 private:
  void begin();
  void append(const std::string& row);
  void show(const StepRow& row, int64_t memory_bytes);
  std::vector<std::pair<std::string_view, double>> waits() const;

  std::optional<RunFolder> folder_;  // null on ranks above 0
  int ranks_;
  int64_t steps_;
  std::string config_;  // as TOML
  bool begun_ = false;  // this run has a folder
  bool resumes_;        // checkpoint.resume
  enum class Progress { none, plain, terminal } progress_ = Progress::none;
  int64_t first_step_ = 0;  // the last checkpoint that was loaded
  int64_t made_ = 0;        // steps of this run
  int64_t saved_ = 0, not_saved_ = 0, saved_step_ = 0;
  int signal_ = 0;
  std::array<double, kPhaseNames.size()> seconds_{};
  StepRow last_{};
  int64_t tokens_ = 0;
  double milliseconds_ = 0, recent_rate_ = 0;
  int64_t skipped_ = 0;
  double val_loss_ = 0;
  bool has_val_ = false;
  std::optional<std::string> hash_;
  std::optional<CommVolume> communication_;
  std::vector<TierRow> tiers_;
  DigestRow digest_{};
  double read_wait_ = 0, write_wait_ = 0;
  std::array<double, kPhaseNames.size()> waited_{};  // of seconds_
  std::chrono::steady_clock::time_point start_, shown_;
};

}  // namespace zr::host
