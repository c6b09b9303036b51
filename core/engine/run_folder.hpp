// The run folder on disk: its lock, a numbered folder for each run, and links to the newest.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/directory.hpp"
#include "config/config.hpp"

namespace zr::host {

/// Absolute path of an engine's run folder: job.runs / job.name, and below it the engine's name if it has one.
std::string run_folder(const JobConfig& config, const std::string& engine);

/// The folders of the runs in a run folder, the newest first; the run folder itself first of all if it holds the files
/// of a run, as earlier versions left them.
std::vector<std::string> runs_in(const std::string& run_folder);

/// One engine's run folder, locked for the life of the object:
///   lock, 1/, 2/, ...   each with config.toml, metrics.jsonl, summary.json
///   latest -> 2         switched in one step when a run is accepted
///   config.toml, metrics.jsonl, summary.json -> latest/...
/// Rank 0 only. Training thread.
class RunFolder {
 public:
  /// Creates the folder and takes its lock. Throws Failure(user) naming the holder if another job has it.
  RunFolder(const JobConfig& config, const std::string& engine);

  /// Rows of the newest run's metrics.jsonl up to `step`; "" if there is no such run.
  std::string rows_up_to(int64_t step) const;
  /// True if the newest run has a summary.json that says it made `steps` steps.
  bool has_summary_of(int64_t steps) const;
  /// Makes the folder of a new run, with `config` and `rows` in it, and makes it the newest. Once.
  void begin(const std::string& config, const std::string& rows);
  /// Appends to metrics.jsonl. After begin(), as the next.
  void append(const std::string& row);
  /// Writes summary.json.
  void summarise(const std::string& text);
  /// Path of the folder of this run.
  const std::string& run() const { return run_->path(); }

 private:
  std::string of_newest(const std::string& file) const;
  std::string next_number() const;
  void make_newest(const std::string& number) const;
  void adopt_old_files() const;
  Directory directory_;
  FileLock lock_;
  std::optional<Directory> run_;
  std::optional<File> metrics_;
  int64_t metrics_bytes_ = 0;
};

}  // namespace zr::host
