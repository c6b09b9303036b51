#include "doctor/libraries.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <regex>

#include "base/text.hpp"

namespace zr::host::doctor {

namespace fs = std::filesystem;

namespace {

// The numbers of `major.minor` of a version.
std::string release_of(const std::string& version) {
  const auto first = version.find('.');
  return first == version.npos ? version : version.substr(0, version.find('.', first + 1));
}

// The first group of the pattern in the line with the version of the libtorch with this libtorch_cpu.so; "" without a
// match.
std::string version_part(const std::string& libtorch, const std::regex& pattern) {
  const fs::path root = fs::path(libtorch).parent_path().parent_path();
  for (const auto& [file, start] : {std::pair{"build-version", ""}, {"version.py", "__version__"}}) {
    std::ifstream in(root / file);
    std::string line;
    for (int i = 0; i < 100 && std::getline(in, line); ++i)
      if (std::smatch match; line.starts_with(start) && line.size() < 200 && std::regex_search(line, match, pattern))
        return match[1];
  }
  return "";
}

}  // namespace

Checks library_checks(const LibraryFacts& facts) {
  Check own{"libraries", "libzeroth", Verdict::ok, facts.libzeroth};
  if (facts.libzeroth.empty()) {
    own.verdict = Verdict::warning;
    own.message = fmt::format(
        "{} has no libzeroth.so, so programs cannot be linked or run; install the component "
        "\"engine\" of a build with libtorch",
        facts.folder);
    return {own};
  }
  const bool no_torch = std::find(facts.missing.begin(), facts.missing.end(), "libtorch_cpu.so") != facts.missing.end();
  if (!facts.missing.empty() && !no_torch) {
    own.worsen(
        Verdict::problem,
        fmt::format(": shared libraries were not found: {}; install them, or add their folder to LD_LIBRARY_PATH",
                    fmt::join(facts.missing, ", ")));
  }
  const std::string wanted = facts.built_with.empty() ? "" : " " + release_of(facts.built_with);
  const std::string link = facts.folder + "/libtorch";
  Check torch{"libraries", "libtorch", Verdict::ok, ""};
  const auto replace_it = [&] {
    torch.verdict = Verdict::problem;
    torch.command =
        fmt::format("ln -sfn {} {}", facts.torch_root.empty() ? "/path/to/libtorch" : shell_word(facts.torch_root),
                    shell_word(link));
  };
  if (no_torch || facts.libtorch.empty()) {
    torch.message =
        fmt::format("no libtorch{} beside libzeroth.so; {}", wanted,
                    facts.program_has_all ? "the program of the file finds one of its own"
                                          : "programs that link libtorch find it by themselves, and `zeroth doctor "
                                            "FILE.toml` checks the program of a job; other programs need it as " +
                                                link);
    if (!facts.torch_root.empty() && !facts.program_has_all) torch.message += "; at run time, TORCH_ROOT has no effect";
    if (!facts.program_has_all) replace_it();
    torch.verdict = facts.program_has_all ? Verdict::ok : Verdict::warning;
  } else {
    torch.message = fmt::format("{}: {}", facts.version.empty() ? "version unknown" : facts.version, facts.libtorch);
    if (!facts.version.empty() && !facts.built_with.empty() &&
        release_of(facts.version) != release_of(facts.built_with)) {
      torch.message +=
          fmt::format("; libzeroth.so was built with libtorch{}, and other versions are not binary compatible", wanted);
      replace_it();
    }
  }
  return {own, torch};
}

std::string torch_version_of(const std::string& libtorch) {
  return version_part(libtorch, std::regex("(\\d+\\.\\d+(\\.\\d+)?)"));
}

int torch_cuda_of(const std::string& libtorch) {
  return std::atoi(version_part(libtorch, std::regex("\\d\\+cu(\\d+)\\d\\b")).c_str());
}

}  // namespace zr::host::doctor
