#include "doctor/compute.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "base/cores.hpp"
#include "base/text.hpp"
#include "doctor/libraries.hpp"

namespace zr::host::doctor {

namespace fs = std::filesystem;

namespace {

std::string cores_text(const CoreFacts& facts) {
  std::string text = facts.usable == facts.online
                         ? count_text(facts.usable, "core")
                         : fmt::format("{} of {} cores (CPU affinity)", facts.usable, facts.online);
  if (facts.quota > 0)
    text += fmt::format(", and the time of {} of them (quota of control group {})", shortest(facts.quota), facts.group);
  return text;
}

// `file` for a command line; a placeholder if no file is given.
std::string file_word(const JobNeeds& needs) { return needs.given() ? shell_word(needs.file) : "FILE.toml"; }

std::string value_after_colon(const std::string& line) {
  const auto colon = line.find(':');
  const auto begin = colon == line.npos ? colon : line.find_first_not_of(" \t", colon + 1);
  return begin == line.npos ? "" : line.substr(begin);
}

std::string widest_set() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    return "AVX-512";
  if (__builtin_cpu_supports("avx2")) return "AVX2";
#endif
  return "portable";
}

// Folders in which drivers install libcuda.so.1, after those of LD_LIBRARY_PATH.
std::string find_libcuda(const std::string& root) {
  std::vector<std::string> folders;
  if (const char* variable = std::getenv("LD_LIBRARY_PATH")) {
    std::istringstream in(variable);
    for (std::string entry; std::getline(in, entry, ':');)
      if (!entry.empty()) folders.push_back(entry);
  }
  for (const char* folder :
       {"/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib/x86_64-linux-gnu/nvidia/current",
        "/usr/lib/aarch64-linux-gnu/nvidia/current", "/usr/lib64", "/usr/lib", "/lib64", "/usr/local/cuda/compat",
        "/usr/local/nvidia/lib64", "/usr/lib/wsl/lib", "/run/opengl-driver/lib"})
    folders.emplace_back(folder);
  std::error_code error;
  for (const std::string& folder : folders)
    if (const std::string file = folder + "/libcuda.so.1"; fs::exists(root + file, error)) return file;
  return "";
}

}  // namespace

CoreFacts core_facts(const std::string& root) {
  const UsableCores cores = usable_cores(root);
  return {std::max(1, static_cast<int>(::sysconf(_SC_NPROCESSORS_ONLN))), cores.affinity, cores.quota, cores.group};
}

Checks core_checks(const CoreFacts& facts, const JobNeeds& needs) {
  Check check{"cores", "cores", Verdict::ok, cores_text(facts)};
  const double cores = facts.quota > 0 ? std::min<double>(facts.quota, facts.usable) : facts.usable;
  const int whole = std::max(1, static_cast<int>(std::floor(cores)));
  const int threads = needs.threads > 0 ? needs.threads : std::max(1, whole / needs.ranks);
  const int wanted = needs.ranks * threads;
  if (needs.ranks > whole) {
    check.worsen(Verdict::warning,
                 fmt::format("; the job starts {}, which will wait for each other", count_text(needs.ranks, "rank")),
                 fmt::format("zeroth train {} job.ranks={}", file_word(needs), whole));
  } else if (wanted > cores && wanted > 1) {
    check.worsen(Verdict::warning,
                 fmt::format("; a job of {} starts {}, which will wait for each other", count_text(needs.ranks, "rank"),
                             count_text(wanted, "thread")),
                 fmt::format("zeroth train {} job.threads={}", file_word(needs), std::max(1, whole / needs.ranks)));
  }
  return {check};
}

CpuFacts cpu_facts(const std::string& root) {
  CpuFacts facts;
  utsname system{};
  if (::uname(&system) == 0) facts.machine = system.machine;
  std::ifstream in(root + "/proc/cpuinfo");
  for (std::string line; facts.model.empty() && std::getline(in, line);)
    if (line.starts_with("model name")) facts.model = value_after_colon(line);
  facts.widest = widest_set();
  const char* limit = std::getenv("ZR_ISA");
  facts.isa_variable = limit ? limit : "";
  return facts;
}

Checks cpu_checks(const CpuFacts& facts) {
  Check check{"cores", "processor", Verdict::ok,
              fmt::format("{} ({}); kernels use {}", facts.model.empty() ? "unknown model" : facts.model, facts.machine,
                          facts.widest == "portable" ? "no vector extension" : facts.widest)};
  const std::string& isa = facts.isa_variable;
  if (isa.empty()) return {check};
  if (isa != "portable" && isa != "avx2" && isa != "avx512") {
    check.worsen(Verdict::problem,
                 fmt::format("; the environment variable ZR_ISA is \"{}\", not portable, avx2 or avx512", isa));
  } else if (!(isa == "avx512" || (isa == "avx2" && facts.widest != "AVX-512") || facts.widest == "portable")) {
    check.worsen(Verdict::warning, fmt::format("; the environment variable ZR_ISA limits them to {}", isa));
  }
  if (check.verdict != Verdict::ok) check.command = "unset ZR_ISA";
  return {check};
}

DeviceFacts device_facts(const std::string& root, const std::string& libtorch) {
  DeviceFacts facts;
  std::error_code error;
  if (!libtorch.empty()) {
    facts.torch_folder = fs::path(libtorch).parent_path().string();
    facts.torch_has_cuda = fs::exists(fs::path(facts.torch_folder) / "libtorch_cuda.so", error);
    facts.torch_cuda = torch_cuda_of(libtorch);
  }
  constexpr std::string_view kName = "nvidia";
  for (fs::directory_iterator entry(root + "/dev", error), end; !error && entry != end; entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    if (!name.starts_with(kName) || name.size() == kName.size()) continue;
    if (!std::all_of(name.begin() + kName.size(), name.end(), [](unsigned char c) { return std::isdigit(c); }))
      continue;
    facts.devices.push_back("/dev/" + name);
    if (::access(entry->path().c_str(), R_OK | W_OK) != 0) facts.closed.push_back("/dev/" + name);
  }
  std::sort(facts.devices.begin(), facts.devices.end());
  std::sort(facts.closed.begin(), facts.closed.end());
  std::ifstream in(root + "/proc/driver/nvidia/version");  // "NVRM version: NVIDIA UNIX ... Kernel Module  550.54  Thu"
  std::string line;
  if (std::getline(in, line)) {
    std::istringstream words(line);
    for (std::string word; facts.driver.empty() && words >> word;)
      if (std::isdigit(static_cast<unsigned char>(word[0])) && word.find('.') != word.npos) facts.driver = word;
  }
  facts.libcuda = find_libcuda(root);
  if (const char* variable = std::getenv("CUDA_VISIBLE_DEVICES")) facts.visible = variable;
  facts.in_slurm_job = std::getenv("SLURM_JOB_ID") != nullptr;
  return facts;
}

namespace {
// The oldest driver for programs that were built with this major version of CUDA; 0 if unknown. Source: the table "CUDA
// Toolkit and Minimum Required Driver Version for CUDA Minor Version Compatibility" in NVIDIA's CUDA release notes.
int oldest_driver(int cuda) {
  switch (cuda) {
    case 11: return 450;
    case 12: return 525;
    case 13: return 580;
    default: return 0;
  }
}

// Whether CUDA_VISIBLE_DEVICES hides all devices: CUDA ignores the list from its first entry that is no device on.
bool hides_all(const DeviceFacts& facts) {
  if (!facts.visible) return false;
  const std::string first = facts.visible->substr(0, facts.visible->find(','));
  if (first.starts_with("GPU-") || first.starts_with("MIG-")) return false;
  const auto begin = first.find_first_not_of(' ');
  if (begin == first.npos || !std::isdigit(static_cast<unsigned char>(first[begin]))) return true;
  return std::atoi(first.c_str()) >= std::ssize(facts.devices);
}

// Whether this machine has what job.device names.
void check_needed_device(const DeviceFacts& facts, const JobNeeds& needs, Checks& checks) {
  if (needs.device.empty()) return;
  Check check{"devices", "device of the job", Verdict::ok, fmt::format("job.device = \"{}\"", needs.device)};
  std::error_code error;
  if (!needs.device_library.empty()) {
    const bool exists = fs::exists(needs.device_library, error);
    check.verdict = exists ? Verdict::ok : Verdict::problem;
    check.message += fmt::format(", with the library {}{}", needs.device_library,
                                 exists ? "" : ", which does not exist; correct job.device_library");
  } else if (needs.device.starts_with("cuda") && !facts.torch_folder.empty() && !facts.torch_has_cuda) {
    check.worsen(Verdict::problem,
                 fmt::format("; this libtorch was built for the CPU only, {} has no libtorch_cuda.so: use one that was "
                             "built for CUDA, or set job.device = \"cpu\"",
                             facts.torch_folder));
  } else if (needs.device.starts_with("cuda") && facts.devices.empty()) {
    check.worsen(Verdict::problem,
                 "; this machine has no NVIDIA device, or no driver: install it, or set job.device = \"cpu\"");
  } else if (needs.device.starts_with("cuda") && facts.libcuda.empty()) {
    check.worsen(Verdict::problem, "; libcuda.so.1 was not found: install the user-space part of the NVIDIA driver");
  } else if (needs.device.starts_with("cuda") && hides_all(facts)) {
    check.worsen(Verdict::problem,
                 fmt::format("; the environment variable CUDA_VISIBLE_DEVICES is \"{}\", which hides all devices",
                             *facts.visible));
    if (facts.in_slurm_job)  // to unset the variable would take GPUs of other jobs
      check.message +=
          "; Slurm sets it to the GPUs of the job's allocation: request one, with srun --gres=gpu:1 or --gpus=1";
    else
      check.command = "unset CUDA_VISIBLE_DEVICES";
  } else if (const int needed = oldest_driver(facts.torch_cuda);
             needs.device.starts_with("cuda") && !facts.driver.empty() && std::atoi(facts.driver.c_str()) < needed) {
    check.worsen(
        Verdict::warning,
        fmt::format("; the NVIDIA driver {} is too old for the CUDA {} of this libtorch, which needs driver {} or "
                    "newer: update it, install NVIDIA's package cuda-compat, or use a libtorch for an older CUDA",
                    facts.driver, facts.torch_cuda, needed));
  }
  checks.push_back(std::move(check));
}
}  // namespace

Checks device_checks(const DeviceFacts& facts, const JobNeeds& needs) {
  Checks checks;
  if (facts.devices.empty()) {
    checks.push_back({"devices", "devices", Verdict::ok,
                      facts.driver.empty() ? "no NVIDIA device; jobs train on CPU cores"
                                           : fmt::format("the NVIDIA driver {} is loaded, but this environment has no "
                                                         "device file /dev/nvidia0; jobs train on CPU cores",
                                                         facts.driver)});
    check_needed_device(facts, needs, checks);
    return checks;
  }
  checks.push_back(
      {"devices", "devices", Verdict::ok,
       fmt::format("{} ({}), driver {}; job.device = \"cuda\" trains on {}",
                   count_text(std::ssize(facts.devices), "NVIDIA device"), fmt::join(facts.devices, ", "),
                   facts.driver.empty() ? "unknown" : facts.driver, facts.devices.size() == 1 ? "it" : "them")});
  if (facts.libcuda.empty())
    checks.push_back({"devices", "driver library", Verdict::warning,
                      "libcuda.so.1 was not found, so programs cannot use the device; install the user-space part of "
                      "the NVIDIA driver, or start the container with its GPUs"});
  if (!facts.closed.empty())
    checks.push_back({"devices", "access", Verdict::warning,
                      fmt::format("this user cannot open {}", fmt::join(facts.closed, ", ")),
                      fmt::format("sudo chmod a+rw {}", fmt::join(facts.closed, " "))});
  check_needed_device(facts, needs, checks);
  return checks;
}

}  // namespace zr::host::doctor
