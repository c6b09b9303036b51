#include "job/checkpoint_paths.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/path.hpp"
#include "base/text.hpp"
#include "checkpoint/folder.hpp"
#include "checkpoint/load.hpp"
#include "checkpoint/manifest.hpp"

namespace zr::host::job {

namespace fs = std::filesystem;

namespace {

// Whether a folder has checkpoints, itself or in a folder of a named engine.
bool has_checkpoints(const std::string& folder) {
  const auto directly = [](const std::string& path) {
    return path_exists(path + "/" + checkpoint::kManifest) || !checkpoint::checkpoints_in(path).empty();
  };
  std::error_code error;
  if (!fs::is_directory(folder, error)) return false;
  if (directly(folder)) return true;
  const std::vector<std::string> names = list_folder(folder);
  return std::any_of(names.begin(), names.end(), [&](const std::string& name) {
    return fs::is_directory(folder + "/" + name, error) && directly(folder + "/" + name);
  });
}

// What a path in a file would name if it were relative to the working directory; "" if it names the same file.
std::string in_working_directory(const config::Setting<std::string>& path) {
  if (path.origin.from != config::Origin::From::file || path.given_path.text.empty()) return "";
  std::error_code error;
  std::string problem;
  const std::string there = absolute_path(path.given_path.text, fs::current_path(error).string(), problem);
  return there == path.value || fs::equivalent(there, path.value, error) ? "" : there;
}

void check_folder(const config::Setting<std::string>& dir) {
  const std::string there = in_working_directory(dir);
  if (there.empty() || !has_checkpoints(there) || has_checkpoints(dir)) return;
  fail_user(fmt::format(
      "{0}: checkpoint.dir = \"{1}\" is {2}, because paths in a file are relative to its folder, and no checkpoint is "
      "there; but {3}, which the working directory has by the same name, contains checkpoints of an earlier run, and "
      "training would start again without them; move that folder to {2}, or write its absolute path in the file; if "
      "the checkpoints belong to another job, write checkpoint.dir = \"{2}\"",
      dir.origin.text(), printable(dir.given_path.text), printable(dir.value), printable(there)));
}

void check_initial_weights(const config::Setting<std::string>& init) {
  if (path_exists(init) && checkpoint::is_from_other_program(init)) return;
  try {
    checkpoint::find_checkpoint(init);
  } catch (const Error& failure) {
    const char* const other_form = path_exists(init) ? "" : ", or safetensors files";
    std::string text = fmt::format("{}: checkpoint.init: {}{}", init.origin.text(), failure.what(), other_form);
    if (const std::string there = in_working_directory(init); !there.empty() && path_exists(there))
      text += fmt::format("; {} exists, but paths in a file are relative to its folder", printable(there));
    fail_like(failure, text);
  }
}

}  // namespace

void check_checkpoint_paths(const config::CheckpointConfig& checkpoint) {
  if (!checkpoint.dir->empty()) check_folder(checkpoint.dir);
  if (checkpoint.init->empty() || (checkpoint.resume && has_checkpoints(checkpoint.dir))) return;
  check_initial_weights(checkpoint.init);
}

}  // namespace zr::host::job
