#include "job/measured_activations.hpp"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <sstream>

#include "config/key.hpp"
#include "run/run_folder.hpp"

namespace zr::host::job {

namespace fs = std::filesystem;

namespace {
// The lines of an effective configuration that activation memory depends on: the program's own tables, train.dtype,
// train.micro_batch and job.device; and unless `anywhere`, which means offload.activations = "auto", the tier of
// activations.
std::set<std::string> relevant_lines(std::istream& toml, bool anywhere) {
  std::set<std::string> engine_tables;
  for (const config::ConfigKey& key : config::host_keys())
    engine_tables.insert(key.path().substr(0, key.path().find('.')));
  std::set<std::string> lines;
  std::string table;
  for (std::string line; std::getline(toml, line);) {
    if (line.rfind("# ", 0) == 0) line.erase(0, 2);  // derived values are written as comments
    if (!line.empty() && line[0] == '[') table = line.substr(line.find_first_not_of('['));
    const std::string root = table.substr(0, table.find_first_of(".]"));
    const bool decides = line.rfind("dtype ", 0) == 0 || line.rfind("micro_batch ", 0) == 0;
    const bool sets_tier = !anywhere && table.rfind("offload]", 0) == 0 && line.rfind("activation", 0) == 0;
    const bool device = root == "job" && line.rfind("device ", 0) == 0;
    const bool of_engine = engine_tables.count(root) > 0;
    if (line.find(" = ") == line.npos || (of_engine && !sets_tier && !device && !(root == "train" && decides)))
      continue;
    lines.insert(table + line.substr(0, line.find(" #")));
  }
  return lines;
}

// The measurement of one run; nullopt if the run is not comparable.
std::optional<plan::PlanContext> measured_by_run(const std::string& run, const config::JobConfig& config) {
  std::error_code error;
  for (const char* file : {"/config.toml", "/summary.json"})
    if (!fs::is_regular_file(run + file, error)) return {};  // a FIFO would block
  std::ifstream then(run + "/config.toml"), summary(run + "/summary.json");
  std::istringstream now(config.to_toml());
  const bool anywhere = config.offload().activations->automatic();
  if (!then || !summary || relevant_lines(then, anywhere) != relevant_lines(now, anywhere)) return {};
  const auto json = nlohmann::json::parse(summary, nullptr, false);
  const auto peak = [](const std::string& tier) {
    return nlohmann::json::json_pointer("/memory/" + tier + "/activations/peak");
  };
  if (!json.contains(peak("device"))) return {};
  for (const char* tier : {"device", "host", "disk"})
    if (json.contains(peak(tier)) && !json[peak(tier)].is_number_integer()) return {};
  plan::PlanContext context;
  for (const char* tier : {"host", "disk"}) context.offloaded_activations += json.value(peak(tier), int64_t{0});
  context.activations = json[peak("device")].get<int64_t>();
  return context;
}

constexpr std::size_t kRuns = 8;  // number of runs to read, newest first
}  // namespace

plan::PlanContext measured_activations(const config::JobConfig& config, const std::string& engine) {
  const std::string folder = run::run_folder(config, engine);
  const std::vector<std::string> runs = run::runs_in(folder);
  for (std::size_t i = 0; i < std::min(runs.size(), kRuns); ++i)
    if (auto context = measured_by_run(runs[i], config)) {
      context->measured_by = folder;
      return *context;
    }
  return {};
}

}  // namespace zr::host::job
