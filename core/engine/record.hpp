// The run folder: config.toml, metrics.jsonl, summary.json; and the progress line. Written by rank 0 alone.
#pragma once

#include <chrono>
#include <cstdint>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "base/ledger.hpp"
#include "comm/communicator.hpp"
#include "config/config.hpp"
#include "plan/plan.hpp"

namespace zr::host {

/// Where a step's time went.
enum class Phase { forward, backward, reduce, agree, optimizer, gather, checkpoint };
inline constexpr std::array<std::string_view, 7> kPhaseNames{"forward",   "backward", "reduce",    "agree",
                                                             "optimizer", "gather",   "checkpoint"};

/// Absolute path of the run's folder: job.runs / job.name.
std::string run_folder(const Config& config);

/// Activations as an earlier run in that folder measured them, if it had the same program's keys, type and micro-batch.
Besides measured(const Config& config);

struct StepRow {
  int64_t step;  // 1 at the first
  double loss, grad_norm, lr;
  int64_t tokens;  // of this step, all ranks
  double step_ms, tokens_per_s;
  int64_t wire_bytes;  // received in this step, summed over ranks, unpadded, control traffic apart
  bool skipped;        // the gradients were not finite
  double loss_scale;   // what the losses were multiplied by; 0: nothing to tell
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
  int64_t collectives, early, leaves, leaves_early, paged_reads, paged_reads_ahead;
};

class Record {
 public:
  /// Makes runs/<name>/ (job.runs, job.name) and writes config.toml. `writes` false: keeps numbers only (ranks above
  /// 0).
  Record(const Config& config, int ranks, bool writes);
  ~Record();
  /// A row of metrics.jsonl, and of what the user watches.
  void step(const StepRow& row, int64_t memory_bytes);
  void validation(int64_t step, double loss);  // likewise
  /// The run goes on behind `step`: with checkpoint.resume, rows of the one before it in this folder stay up to it.
  void resume(int64_t step);
  void saved(int64_t step) { saved_step_ = step, ++saved_; }  // a checkpoint
  void not_saved() { ++not_saved_; }
  void stopped(int signal) { signal_ = signal; }  // that ends the run
  void add(Phase phase, double seconds) { seconds_[static_cast<std::size_t>(phase)] += seconds; }
  void set_hash(const std::string& hash) { hash_ = hash; }
  void set_wire(const WireCount& all_ranks) { wire_ = all_ranks; }
  /// Tiers in use.
  void set_tiers(std::vector<TierRow> tiers) { tiers_ = std::move(tiers); }
  /// Seconds of a phase in which training stood still for reads from tiers, and for writes to them; of a checkpoint,
  /// which is no part of a step, they are not told.
  void add_waits(Phase phase, double read, double write);
  /// Writes summary.json aside and renames it.
  void finish(const Ledger& ledger, const Overlap& overlap);
  const std::string& folder() const { return folder_; }

 private:
  void row(const std::string& text);
  void check_metrics() const;
  void show(const StepRow& row, int64_t memory_bytes);
  std::vector<std::pair<std::string_view, double>> waits() const;

  std::string folder_;
  int ranks_;
  bool writes_;
  int64_t steps_;
  enum class Progress { none, plain, terminal } progress_ = Progress::none;
  std::ofstream metrics_;
  bool keeps_ = false;  // rows of an earlier run, until it is known whether this one goes on with it
  int64_t first_step_ = 0;
  int64_t saved_ = 0, not_saved_ = 0, saved_step_ = 0;
  int signal_ = 0;
  std::array<double, kPhaseNames.size()> seconds_{};
  StepRow last_{};
  int64_t tokens_ = 0;
  double milliseconds_ = 0, recent_rate_ = 0;
  int64_t skipped_ = 0;
  double val_loss_ = 0;
  bool has_val_ = false;
  std::string hash_;
  WireCount wire_;
  std::vector<TierRow> tiers_;
  double read_wait_ = 0, write_wait_ = 0;
  std::array<double, kPhaseNames.size()> waited_{};  // of seconds_
  std::chrono::steady_clock::time_point start_, shown_;
};

}  // namespace zr::host
