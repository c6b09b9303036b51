#include "arch/rules.hpp"

#include <algorithm>
#include <fstream>
#include <regex>
#include <set>

#include "arch/declarations.hpp"
#include "support/shell.hpp"

namespace zr::arch {

namespace {

const std::vector<std::string> kSubsystems{"base",    "config",  "plan",       "plugin", "control", "comm",  "model",
                                           "update",  "offload", "checkpoint", "run",    "job",     "state", "engine",
                                           "conform", "doctor",  "cli",        "api",    "python"};

bool is_code(const fs::path& file) {
  static const std::set<std::string> endings{".c", ".h", ".cpp", ".hpp", ".cu", ".cuh", ".cmake", ".in", ".py", ".sh"};
  return endings.count(file.extension().string()) > 0 || file.filename() == "CMakeLists.txt";
}
bool is_cmake(const fs::path& file) { return file.extension() == ".cmake" || file.filename() == "CMakeLists.txt"; }

class Tree {
 public:
  explicit Tree(const fs::path& root) : root_(root) {}

  std::vector<fs::path> code(const std::vector<std::string>& folders) const {
    std::vector<fs::path> files;
    for (const auto& folder : folders) {
      if (!fs::exists(root_ / folder)) continue;
      for (const auto& entry : fs::recursive_directory_iterator(root_ / folder))
        if (entry.is_regular_file() && is_code(entry.path())) files.push_back(entry.path());
    }
    std::sort(files.begin(), files.end());
    return files;
  }
  std::vector<fs::path> folders(const std::string& in) const {
    std::vector<fs::path> all;
    if (!fs::exists(root_ / in)) return all;
    for (const auto& entry : fs::directory_iterator(root_ / in))
      if (entry.is_directory()) all.push_back(entry.path());
    return all;
  }
  std::vector<fs::path> plugins() const {
    std::vector<fs::path> all;
    for (const char* in : {"plugins", "plugins/optimizers"})
      for (const fs::path& folder : folders(in))
        if (folder.filename() != "optimizers") all.push_back(folder);
    return all;
  }
  std::string path(const fs::path& file) const { return fs::relative(file, root_).string(); }
  bool below(const fs::path& file, const std::string& folder) const { return path(file).rfind(folder + "/", 0) == 0; }

  // Lines that contain `wrong`, apart from what `allowed` matches.
  Found hits(const std::vector<fs::path>& files, const std::regex& wrong,
             const std::regex& allowed = std::regex("(?!)")) const {
    Found found;
    for (const fs::path& file : files) {
      const auto lines = lines_of(file);
      for (std::size_t i = 0; i < lines.size(); ++i)
        if (std::regex_search(lines[i], wrong) && std::regex_search(std::regex_replace(lines[i], allowed, ""), wrong))
          found.push_back(path(file) + ":" + std::to_string(i + 1) + ": " + lines[i]);
    }
    return found;
  }

 private:
  fs::path root_;
};

const std::vector<std::string> kAll{"core", "plugins", "sdk", "tests", "examples"};

void append(Found& to, const Found& more) { to.insert(to.end(), more.begin(), more.end()); }

}  // namespace

std::vector<std::string> lines_of(const fs::path& file) {
  std::ifstream in(file);
  std::vector<std::string> lines;
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

Found plugin_names_in_core(const fs::path& root) {
  static const std::regex declared("zr_add_plugin\\([^)]*\\bID\\s+(\\w+)");
  const Tree tree(root);
  std::set<std::string> names;
  for (const fs::path& folder : tree.plugins()) {
    const std::string name = folder.filename().string();
    names.insert(name);
    for (const std::string& line : lines_of(folder / "CMakeLists.txt"))
      if (std::smatch match; std::regex_search(line, match, declared)) names.insert(match[1]);
  }
  if (names.empty()) return {};
  std::string pattern;
  for (const std::string& name : names)  // "cpu" is the plug-in's id only in quotes
    pattern += (pattern.empty() ? "" : "|") + (name == "cpu" ? "(?=cpu\")" + name : name);
  // Linux's folder, libtorch's name of the CPU and a launcher's variables have words that are also ids of plug-ins.
  static const std::regex other_meanings("/dev/shm\\b|kCpuDevice = \"cpu\"|\"MPI_[A-Z]+\"");
  return tree.hits(tree.code({"core", "sdk/conform"}),
                   std::regex("(^|[^a-z0-9])(" + pattern + ")([^a-z0-9]|$)", std::regex::icase), other_meanings);
}

Found stages_in_core(const fs::path& root) {
  const Tree tree(root);
  return tree.hits(tree.code({"core", "sdk/conform"}),
                   std::regex(R"(zero_?stage|(\.|->)stage\b(?!\()|stage_?\s*[=!<>]=|[=!<>]=\s*stage_?\b)"
                              R"(|\b(if|switch|while)\s*\([^;]*\b(\w+_)?stage_?\b(?!\s*\())",
                              std::regex::icase));
}

Found process_exits(const fs::path& root) {
  const Tree tree(root);
  std::vector<fs::path> sources;
  for (const fs::path& file : tree.code({"core"}))
    if (!tree.below(file, "core/cli") && file != root / "core/plugin/probe.cpp" &&
        file != root / "core/api/include/zr/program.hpp" && !is_cmake(file))
      sources.push_back(file);
  return tree.hits(sources, std::regex(R"((^|[^\w.>])(_exit|_Exit|exit|quick_exit)\s*\(|std::(abort|terminate)\s*\()"));
}

Found destroyed_statics(const fs::path& root) {
  const Tree tree(root);
  std::vector<fs::path> sources;
  for (const fs::path& file : tree.code({"core", "plugins", "sdk/include"}))
    if (!is_cmake(file)) sources.push_back(file);
  const std::regex variable(R"(^\s+(static|thread_local)\s+(?!constexpr\b|inline constexpr\b)[^()]*[;={])");
  const std::string type = R"((bool|char|int|unsigned|long|u?int\d+_t|(std::)?size_t|std::atomic<.*>|std::once_flag)"
                           R"(|(std::)?(recursive_)?mutex|(Recursive)?Mutex|zr_\w+|auto(?= \w+ = static_cast<)))";
  const std::regex safe(R"(^\s+(static|thread_local)\s+((thread_local|inline|const)\s+)*()" + type +
                        R"(\s|[^=;({]*[*&]\s*(const\s+)?\w+\s*(\[\w*\])?\s*[=;{]).*|.*// destroyed: .*)");
  Found found;
  for (const std::string& hit : tree.hits(sources, variable))
    if (!std::regex_match(hit.substr(hit.find(": ") + 2), safe)) found.push_back(hit);
  return found;
}

Found libtorch_outside_its_subsystems(const fs::path& root) {
  const Tree tree(root);
  std::vector<fs::path> sources, builds;
  for (const fs::path& file : tree.code({"core", "plugins", "sdk"})) {
    if (tree.below(file, "core/model") || tree.below(file, "core/api") || tree.below(file, "core/python")) continue;
    sources.push_back(file);
    if (is_cmake(file) && !tree.below(file, "sdk")) builds.push_back(file);  // sdk/cmake locates libtorch
  }
  Found found = tree.hits(sources, std::regex(R"re(#\s*include\s+["<](torch|ATen|c10|caffe2)/)re"));
  append(found, tree.hits(builds, std::regex(R"(zr::torch|zr_find_torch|zr_torch|torch_cpu|torch_python|\bc10\b)")));
  return found;
}

Found host_headers_in_plugins(const fs::path& root) {
  const Tree tree(root);
  std::string names;
  for (const std::string& name : kSubsystems) names += (names.empty() ? "" : "|") + name;
  return tree.hits(tree.code({"plugins"}), std::regex("#\\s*include\\s+[\"<](core/)?(" + names + ")/"));
}

Found more_than_the_sdk_in_conform(const fs::path& root) {
  const Tree tree(root);
  return tree.hits(tree.code({"sdk/conform"}),
                   std::regex(R"re(#\s*include\s+(<(fmt|boost|torch|ATen|c10|toml\+\+)/|"(?!(zr|conform)/)))re"));
}

Found conform_in_core(const fs::path& root) {
  static const std::set<std::string> allowed{
      "core/cli/conform_command.cpp: conform/conform.hpp",
      "core/job/simulated_step.cpp: conform/strategy_step.hpp",
  };
  const Tree tree(root);
  const std::regex include(R"re(#\s*include\s+["<](conform/[^">]+))re");
  Found found;
  for (const fs::path& file : tree.code({"core"}))
    for (const std::string& line : lines_of(file))
      if (std::smatch match; std::regex_search(line, match, include))
        if (const std::string hit = tree.path(file) + ": " + match[1].str(); !allowed.count(hit)) found.push_back(hit);
  return found;
}

Found configuration_read_by_path(const fs::path& root) {
  // Files outside core/config that may read a key by its path, with the reason.
  static const std::set<std::string> allowed{
      "core/api/program.cpp",  // a program reads its own keys, which have no struct, by name
  };
  const Tree tree(root);
  std::vector<fs::path> sources;
  for (const fs::path& file : tree.code({"core", "plugins", "sdk"}))
    if (!tree.below(file, "core/config") && !allowed.count(tree.path(file))) sources.push_back(file);
  // The headers that give access by path, and the search of a JobConfig's entries for a path or for a host's table.
  return tree.hits(sources, std::regex(R"re(config/key_reader\.hpp|\bKeyReader\b)re"
                                       R"re(|\.path\(\)\s*[!=]=\s*"|\btable\("(?!strategy\.|optimizer\.))re"));
}

Found vendors_in_core(const fs::path& root) {
  // Files that may name a vendor of devices, with the reason.
  static const std::set<std::string> allowed{
      "core/base/device_memory.hpp",  // DLPack's number of a type of device, by libtorch's name
      "core/config/keys.cpp",         // an example in the description of job.device
      "core/model/device.cpp",        // an example in an error about job.device
  };
  const Tree tree(root);
  std::vector<fs::path> sources;
  for (const fs::path& file : tree.code({"core"}))
    if (!tree.below(file, "core/doctor") && !allowed.count(tree.path(file))) sources.push_back(file);  // examines GPUs
  return tree.hits(
      sources,
      std::regex(R"(cuda|nvidia|nccl|cublas|\brocm|\bhip(malloc|memcpy|stream|event|get|set|free)|\bxpu\b|\bmps\b)",
                 std::regex::icase),
      std::regex("//.*"));
}

Found zeroth_in_models(const fs::path& root) {
  const Tree tree(root);
  std::vector<fs::path> models;
  for (const fs::path& file : tree.code({"examples"}))
    if (file.filename().string().rfind("model.", 0) == 0) models.push_back(file);
  return tree.hits(models, std::regex("zeroth|\\bzr\\b|\\bzr_", std::regex::icase));
}

Found long_files(const fs::path& root) {
  const Tree tree(root);
  Found found;
  for (const fs::path& file : tree.code(kAll))
    if (const auto n = lines_of(file).size(); n > 600)
      found.push_back(tree.path(file) + ": " + std::to_string(n) + " lines");
  return found;
}

Found wide_lines(const fs::path& root) {
  const Tree tree(root);
  Found found;
  for (const fs::path& file : tree.code(kAll)) {
    const auto lines = lines_of(file);
    for (std::size_t i = 0; i < lines.size(); ++i) {
      const auto columns = std::count_if(lines[i].begin(), lines[i].end(), [](char c) { return (c & 0xc0) != 0x80; });
      if (columns > 120)
        found.push_back(tree.path(file) + ":" + std::to_string(i + 1) + ": " + std::to_string(columns) + " columns");
    }
  }
  return found;
}

Found missing_readmes(const fs::path& root) {
  const Tree tree(root);
  Found found;
  std::vector<fs::path> folders = tree.plugins();
  for (const fs::path& folder : tree.folders("core")) folders.push_back(folder);
  folders.push_back(root / "sdk/conform");
  for (const fs::path& folder : folders)
    if (fs::exists(folder / "CMakeLists.txt") && !fs::exists(folder / "README.md"))
      found.push_back(tree.path(folder) + ": no README.md");
  return found;
}

Found undocumented_functions(const fs::path& root) {
  const Tree tree(root);
  Found found;
  for (const fs::path& file : tree.code({"core", "sdk/include", "sdk/conform"})) {
    if (file.extension() != ".hpp" && file.extension() != ".h") continue;
    const bool installed = tree.below(file, "core/api/include") || tree.below(file, "sdk/include");
    for (const std::string& one : undocumented(lines_of(file), !installed))
      found.push_back(tree.path(file) + ":" + one);
  }
  return found;
}

Found untagged_slots(const fs::path& root) {
  const Tree tree(root);
  Found found;
  for (const fs::path& file : tree.code({"sdk/include/zr/abi"}))
    for (const std::string& one : untagged(lines_of(file))) found.push_back(tree.path(file) + ":" + one);
  return found;
}

Found broken_scripts(const fs::path& root) {
  static const std::regex shell("^#!.*\\b(ba)?sh\\b");
  Found found;
  for (const char* folder : {".ci", "tests"}) {
    if (!fs::exists(root / folder)) continue;
    for (const auto& entry : fs::recursive_directory_iterator(root / folder)) {
      const fs::path& file = entry.path();
      if (!entry.is_regular_file()) continue;
      const auto lines = lines_of(file);
      if (file.extension() != ".sh" && (lines.empty() || !std::regex_search(lines[0], shell))) continue;
      const auto parsed =
          testing::shell("cd '" + root.string() + "' && LC_ALL=C bash -n '" + fs::relative(file, root).string() + "'");
      if (parsed.code != 0) found.push_back(parsed.lines().front());
    }
  }
  std::sort(found.begin(), found.end());
  return found;
}

Found unlinted_headers(const fs::path& root) {
  static const std::regex setting("HeaderFilterRegex: '(.*)'");
  std::string pattern;
  for (const std::string& line : lines_of(root / ".clang-tidy"))
    if (std::smatch match; std::regex_match(line, match, setting)) pattern = match[1];
  if (pattern.empty()) return {".clang-tidy: no HeaderFilterRegex"};
  const std::regex filter(pattern);
  const Tree tree(root);
  Found found;
  for (const fs::path& file : tree.code({"core"})) {
    if (file.extension() != ".hpp") continue;
    const fs::path in_core = fs::relative(file, root / "core");
    const bool is_public = tree.below(file, "core/api/include");
    const fs::path included =
        is_public ? file : fs::path("/build/lint/include") / *in_core.begin() / in_core;  // zr_include_root in CMake
    if (!std::regex_search(included.string(), filter)) found.push_back(tree.path(file));
  }
  return found;
}

Found strange_folders(const fs::path& root) {
  static const std::set<std::string> allowed{
      "core",  "plugins", "sdk",  "tests", "examples", "docs",       ".github",
      "build", "runs",    ".git", ".ci",   ".cache",   "checkpoints"};  // of make train
  Found found;
  for (const fs::path& folder : Tree(root).folders("."))
    if (!allowed.count(folder.filename().string())) found.push_back(folder.filename().string());
  return found;
}

}  // namespace zr::arch
