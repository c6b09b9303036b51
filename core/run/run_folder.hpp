// The run folder on disk: its lock, one numbered folder per run, and links to the newest run.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/directory.hpp"
#include "config/config.hpp"

namespace zr::host::run {

/// The absolute path of an engine's run folder: job.runs/job.name, followed by the engine's name if it has one.
std::string run_folder(const config::JobConfig& config, const std::string& engine);

/// The paths of the runs in a run folder, newest first.
std::vector<std::string> runs_in(const std::string& run_folder);

/// One engine's run folder, locked while the object exists:
///   lock, 1/, 2/, ...   each with config.toml, metrics.jsonl, summary.json
///   latest -> 2         replaced atomically when a run is accepted
///   config.toml, metrics.jsonl, summary.json -> latest/...
/// Rank 0 only. Training thread.
class RunFolder {
 public:
  /// Creates the folder and locks it. Throws UserError naming the holder if another job holds the lock.
  RunFolder(const config::JobConfig& config, const std::string& engine);

  /// The rows of the newest run's metrics.jsonl up to `step`; "" if there is no run.
  std::string rows_up_to(int64_t step) const;
  /// True if the newest run has a summary.json whose `steps` is `steps`.
  bool has_summary_of(int64_t steps) const;
  /// Creates the folder of a new run, writes `config` and `rows` to it, and makes it the newest run. Call it once.
  /// Throws UserError if something else is where a link to the newest run belongs.
  void begin(const std::string& config, const std::string& rows);
  /// Appends to metrics.jsonl. Call it after begin().
  void append(const std::string& row);
  /// Writes summary.json. Call it after begin().
  void summarise(const std::string& text);
  /// The path of this run's folder. Call it after begin().
  const std::string& run() const { return run_->path(); }

 private:
  std::string of_newest(const std::string& file) const;
  std::string next_number() const;
  void make_newest(const std::string& number) const;
  Directory directory_;
  FileLock lock_;
  std::optional<Directory> run_;
  std::optional<File> metrics_;
  int64_t metrics_bytes_ = 0;
};

}  // namespace zr::host::run
