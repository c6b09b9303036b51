#include "cli/doctor_job.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <sstream>

#include "cli/program_libraries.hpp"
#include "cli/trainer.hpp"
#include "job/machine_profile.hpp"
#include "job/plan_inputs.hpp"
#include "zr/error.hpp"

namespace zr::host::cli {

namespace fs = std::filesystem;
using doctor::FolderUse;
using doctor::Verdict;

namespace {

constexpr const char* kTopic = "job";
// Of a disk tier that neither the file nor a measurement configures; four tiles of a step are in memory at a time.
constexpr int64_t kBlockBytes = int64_t{1} << 20, kDepth = 8, kTiles = 4;

void add_failure(ExaminedJob& job, const std::string& name, const Error& failure) {
  job.checks.push_back({kTopic, name, Verdict::problem, failure.what()});
  if (job.code == 0) job.code = failure.exit_code();
}

int64_t bytes_of_communicator(const plugin::ResolvedJob& job) {
  if (!job.communicator) return 0;
  Ledger ledger;
  ThreadPool pool(1);
  job::EngineHost host(ledger, pool);
  const plugin::Instance communicator(host, *job.communicator, job.config, job::table_of(*job.communicator));
  return job::communicator_bytes(&communicator, job.config.job().ranks).value_or(0);
}

// The value of a key of a tier's table; null if the tier has no such key.
const config::Entry* entry_of(const plugin::ResolvedJob& job, const plugin::Component& tier, const char* name) {
  for (const config::Entry* entry : job.config.table(job::table_of(tier)))
    if (entry->key.name == name) return entry;
  return nullptr;
}

int64_t number_of(const config::Entry* entry) {
  const auto* number = entry ? std::get_if<int64_t>(&entry->value) : nullptr;
  return number ? *number : 0;
}

// Tiers with a key `path` store states on disks, in one folder or in several that ':' separates.
void add_disk_tiers(ExaminedJob& examined, const plugin::ResolvedJob& job) {
  const job::MachineProfile profile;
  for (const plugin::Component& tier : job.tiers) {
    const config::Entry* path = entry_of(job, tier, "path");
    const auto* paths = path ? std::get_if<std::string>(&path->value) : nullptr;
    if (!paths) continue;
    examined.needs.has_disk_tier = true;
    const job::DiskProfile* measured = nullptr;
    std::istringstream in(*paths);
    for (std::string folder; std::getline(in, folder, ':');) {
      if (folder.empty()) continue;
      examined.folders.push_back(
          doctor::folder_facts(fmt::format("offload folder of '{}'", tier.table->id), folder, FolderUse::offload));
      if (!measured && !examined.folders.back().error) measured = profile.find(job::file_system_of(folder));
    }
    const int64_t block_set = number_of(entry_of(job, tier, "block_bytes")),
                  depth_set = number_of(entry_of(job, tier, "depth"));
    const int64_t block = block_set > 0 ? block_set : measured ? measured->block_bytes : kBlockBytes;
    const int64_t depth = depth_set > 0 ? depth_set : measured ? measured->depth : kDepth;
    examined.needs.registered_bytes = std::max(examined.needs.registered_bytes, kTiles * block * depth);
  }
}

std::string validity_text(const plugin::ResolvedJob& job) {
  std::string text = fmt::format("valid for {}", doctor::count_text(job.config.job().ranks, "rank")), keys;
  for (const config::UncheckedValue& value : job.unchecked) keys += (keys.empty() ? "" : ", ") + value.path;
  return text + (keys.empty() ? "" : fmt::format("; not checked, because the program was not started: {}", keys));
}

void add_program(ExaminedJob& job, const config::Setting<std::string>& program, const fs::path& bin) {
  if (program->empty()) {
    job.checks.push_back(
        {kTopic, "program", Verdict::ok, "job.program is not set, so `zeroth train` cannot start this file"});
    return;
  }
  try {
    const std::string path = find_trainer(program, job.needs.file, bin).string();
    provide_libraries(path);
    job.checks.push_back({kTopic, "program", Verdict::ok, fmt::format("{}, with all of its libraries", path)});
    job.program_has_all = true;
  } catch (const Error& failure) {
    add_failure(job, "program", failure);
  }
}

}  // namespace

ExaminedJob examine_job(const std::string& file, const std::vector<std::string>& overrides, const fs::path& bin) {
  ExaminedJob examined;
  examined.needs.file = file;
  try {
    const config::Document document = config::Document::load(file, overrides);
    const plugin::ResolvedJob job = resolve_job(document, plugin::Registry(), {}, 0, false);
    const config::JobConfig& config = job.config;
    examined.needs.ranks = config.job().ranks;
    examined.needs.threads = config.job().threads;
    if (config.job().device.value != config::kCpuDevice) examined.needs.device = config.job().device;
    examined.needs.device_library = config.job().device_library;
    examined.needs.communicator_bytes = bytes_of_communicator(job);
    examined.checks.push_back({kTopic, file, Verdict::ok, validity_text(job)});
    add_program(examined, document.program(), bin);
    examined.folders.push_back(doctor::folder_facts("folder of the run", config.job().runs, FolderUse::output));
    if (const std::string& folder = config.checkpoint().dir; !folder.empty())
      examined.folders.push_back(doctor::folder_facts("checkpoint folder", folder, FolderUse::checkpoint));
    add_disk_tiers(examined, job);
  } catch (const Error& failure) {
    add_failure(examined, file, failure);
  }
  return examined;
}

}  // namespace zr::host::cli
