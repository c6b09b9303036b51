#include "run/run_folder.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>
#include <utility>

#include "base/error.hpp"

namespace zr::host::run {

namespace fs = std::filesystem;

namespace {
const std::string kLock = "lock", kLatest = "latest", kConfig = "config.toml", kMetrics = "metrics.jsonl",
                  kSummary = "summary.json";
const std::array kFiles{kConfig, kMetrics, kSummary};

// The number of a run's folder; 0 if `name` is not the name of one.
int64_t run_number(const std::string& name) {
  int64_t number = 0;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), number);
  const bool valid = error == std::errc() && end == name.data() + name.size() && name[0] != '0';
  return valid && number > 0 ? number : 0;
}

Directory open_folder(const config::JobConfig& config, const std::string& engine) {
  // job.runs itself may be a symbolic link; no links are followed below it.
  Directory folder =
      Directory::open(fs::absolute(config.job().runs.value).string(), true).subdirectory(config.job().name);
  return engine.empty() ? std::move(folder) : folder.subdirectory(engine);
}

FileLock take_lock(const Directory& folder) {
  std::string holder;
  auto lock = FileLock::try_take(folder, kLock, holder);
  if (!lock)
    fail_user(
        fmt::format("the run folder {} is in use by another job ({}); set job.name or job.runs to another folder, or "
                    "wait for that job to end",
                    folder.path(), holder));
  return std::move(*lock);
}
}  // namespace

std::string run_folder(const config::JobConfig& config, const std::string& engine) {
  const fs::path job = fs::absolute(config.job().runs.value) / config.job().name.value;
  return (engine.empty() ? job : job / engine).string();
}

std::vector<std::string> runs_in(const std::string& run_folder) {
  std::vector<int64_t> numbers;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(run_folder, error))
    if (const int64_t number = run_number(entry.path().filename().string())) numbers.push_back(number);
  std::sort(numbers.rbegin(), numbers.rend());
  std::vector<std::string> runs;
  for (const int64_t number : numbers) runs.push_back(fmt::format("{}/{}", run_folder, number));
  return runs;
}

RunFolder::RunFolder(const config::JobConfig& config, const std::string& engine)
    : directory_(open_folder(config, engine)), lock_(take_lock(directory_)) {}

std::string RunFolder::of_newest(const std::string& file) const {
  const auto newest = directory_.link_target(kLatest);
  if (!newest || !run_number(*newest)) return "";
  return directory_.subdirectory(*newest).read(file).value_or("");
}

bool RunFolder::has_summary_of(int64_t steps) const {
  const auto summary = nlohmann::json::parse(of_newest(kSummary), nullptr, false);
  return summary.is_object() && summary.value("steps", nlohmann::json()) == steps;
}

std::string RunFolder::rows_up_to(int64_t step) const {
  std::istringstream in(of_newest(kMetrics));
  std::string rows;
  for (std::string line; std::getline(in, line);) {
    const auto row = nlohmann::json::parse(line, nullptr, false);  // discarded if the row is incomplete
    const auto row_step = row.is_object() ? row.value("step", nlohmann::json()) : nlohmann::json();
    if (row_step.is_number_integer() && row_step <= step) rows += line + "\n";
  }
  return rows;
}

std::string RunFolder::next_number() const {
  int64_t number = 1;
  for (const std::string& name : directory_.list()) number = std::max(number, run_number(name) + 1);
  return std::to_string(number);
}

void RunFolder::make_newest(const std::string& number) const {
  for (const std::string& file : kFiles)
    if (const std::string target = fmt::format("{}/{}", kLatest, file); directory_.link_target(file) != target)
      directory_.link(target, file);
  directory_.link(number, kLatest);
}

void RunFolder::begin(const std::string& config, const std::string& rows) {
  for (const std::string& file : {kConfig, kMetrics, kSummary, kLatest})  // make_newest() would replace it
    if (directory_.has(file) && !directory_.link_target(file))
      fail_user(
          fmt::format("{}/{} is not a link, but a run folder has one there; move it to another folder, or set "
                      "job.name or job.runs to another folder",
                      directory_.path(), file));
  const std::string number = next_number();
  run_.emplace(directory_.subdirectory(number));
  run_->write(kConfig, config);
  metrics_.emplace(run_->create(kMetrics));
  append(rows);
  make_newest(number);
}

void RunFolder::append(const std::string& row) {
  metrics_->write(metrics_bytes_, row.data(), static_cast<int64_t>(row.size()));
  metrics_bytes_ += static_cast<int64_t>(row.size());
}

void RunFolder::summarise(const std::string& text) { run_->write(kSummary, text); }

}  // namespace zr::host::run
