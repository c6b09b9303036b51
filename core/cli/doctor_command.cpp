// `zeroth doctor`: checks the machine, the installation, and what a job needs of them.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>

#include "base/error.hpp"
#include "cli/commands.hpp"
#include "cli/doctor_job.hpp"
#include "cli/program_libraries.hpp"
#include "doctor/compute.hpp"
#include "doctor/libraries.hpp"
#include "doctor/limits.hpp"
#include "doctor/memory.hpp"
#include "doctor/plugins.hpp"

namespace zr::host::cli {

namespace fs = std::filesystem;
namespace po = boost::program_options;

void doctor_options(po::options_description& options) {
  options.add_options()("json", po::value<std::string>(),
                        "also write the results to this file as JSON; - instead of the text");
}

namespace {

doctor::LibraryFacts library_facts(const fs::path& bin) {
  doctor::LibraryFacts facts;
  std::error_code error;
  const fs::path base = bin.parent_path();
  facts.folder = (base / "lib").string();
  for (const fs::path& folder : {base / "lib", base / ZR_LIBDIR})
    if (facts.libzeroth.empty() && fs::exists(folder / "libzeroth.so.0", error)) {
      facts.folder = folder.string();
      facts.libzeroth = (folder / "libzeroth.so.0").string();
    }
  facts.built_with = ZR_BUILT_WITH;
  if (const char* root = std::getenv("TORCH_ROOT"); root && fs::exists(fs::path(root) / "lib/libtorch_cpu.so", error))
    facts.torch_root = fs::absolute(root, error).string();
  if (facts.libzeroth.empty()) return facts;
  for (const LinkedLibrary& library : linked_libraries(facts.libzeroth)) {
    if (library.path.empty()) facts.missing.push_back(library.name);
    if (library.name == "libtorch_cpu.so" && !library.path.empty())
      facts.libtorch = fs::weakly_canonical(library.path, error).string();
  }
  facts.version = doctor::torch_version_of(facts.libtorch);
  return facts;
}

doctor::Report report_of(const ExaminedJob& job, const fs::path& bin) {
  doctor::Report report{ZR_VERSION, fmt::format("{}.{}", ZR_ABI_MAJOR, ZR_ABI_MINOR), job.checks};
  const auto add = [&](const doctor::Checks& checks) {
    report.checks.insert(report.checks.end(), checks.begin(), checks.end());
  };
  const bool is_root = ::geteuid() == 0;
  const doctor::JobNeeds& needs = job.needs;
  add(doctor::plugin_checks(doctor::plugin_facts(), needs));
  doctor::LibraryFacts libraries = library_facts(bin);
  libraries.program_has_all = job.program_has_all;
  add(doctor::library_checks(libraries));
  add(doctor::core_checks(doctor::core_facts(), needs));
  add(doctor::cpu_checks(doctor::cpu_facts()));
  add(doctor::memory_checks(doctor::memory_facts(), needs, is_root));
  add(doctor::shared_memory_checks(doctor::shared_memory_facts(), needs, is_root));
  add(doctor::device_checks(doctor::device_facts("", libraries.libtorch), needs));
  add(doctor::limit_checks(doctor::limit_facts(), needs));
  add(doctor::io_uring_checks(doctor::io_uring_facts(), needs, is_root));
  for (const doctor::FolderFacts& folder : job.folders) add(doctor::folder_checks(folder, needs, is_root));
  return report;
}

}  // namespace

int examine_machine(const Command& command, const Parsed& parsed, const fs::path& bin) {
  Arguments files, overrides;
  for (const std::string& word : parsed.positionals) (word.find('=') == word.npos ? files : overrides).push_back(word);
  if (files.size() > 1)
    fail_usage(command, fmt::format("only one TOML file is allowed, not {} and {}", files[0], files[1]));
  if (files.empty() && !overrides.empty()) fail_usage(command, fmt::format("{} needs a TOML file", overrides[0]));

  ExaminedJob job;
  if (files.empty())
    job.folders.push_back(doctor::folder_facts("current folder", ".", doctor::FolderUse::output));
  else
    job = examine_job(files[0], overrides, bin);
  const doctor::Report report = report_of(job, bin);

  const std::string json = parsed.value("json");
  std::cout << (json == "-" ? doctor::json_of(report) : doctor::text_of(report));
  if (!json.empty() && json != "-" && !(std::ofstream(json) << doctor::json_of(report) << std::flush))
    fail_environment(fmt::format("cannot write {}: {}; choose another file for --json", json, std::strerror(errno)));

  const int problems = report.count(doctor::Verdict::problem);
  const auto of_job = std::count_if(job.checks.begin(), job.checks.end(), [](const doctor::Check& check) {
    return check.verdict == doctor::Verdict::problem;
  });
  if (problems == 0) return 0;
  return problems == of_job ? job.code : exit_code::environment;
}

}  // namespace zr::host::cli
