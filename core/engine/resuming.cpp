// Session's start from a checkpoint: which one of a folder, and what [checkpoint] resume and init ask for.
#include <algorithm>
#include <optional>
#include <sstream>

#include "base/failure.hpp"
#include "base/file.hpp"
#include "base/log.hpp"
#include "checkpoint/folder.hpp"
#include "checkpoint/load.hpp"
#include "engine/session.hpp"

namespace zr::host {

namespace {
// The training state of `folder` is one to resume from: its last step was applied, or skipped only because fp16's loss
// scale was being adjusted, which is routine. One that cannot be read counts, so that opening it reports why.
bool is_resumable(const std::string& folder) try {
  const std::string path = folder + "/" + kManifest;
  const CheckpointMetadata facts = parse_manifest(path, read_json(path)).metadata;
  return facts.last_step_applied || facts.loss_scale.dynamic;
} catch (const Failure&) {
  return true;
}

// Removes the newest of `folders` up to the first that is resumable, if any is.
void pass_over_skipped(std::vector<std::string>& folders) {
  const auto good = std::find_if(folders.begin(), folders.end(), is_resumable);
  if (good == folders.begin() || good == folders.end()) return;
  log(ZR_LOG_WARN,
      folders.front() + ": its last step was skipped because gradients were not finite; resuming from " + *good +
          ", the newest checkpoint whose last step was applied (engine.load() takes the other by " + "its own path)");
  folders.erase(folders.begin(), good);
}
}  // namespace

// What to try, newest first: the checkpoint `path` is, those that it holds, or weights of another program.
std::vector<std::string> Session::candidates(const std::string& path, bool fallback) {
  const CheckpointComm comm = saver_->peers();
  std::string text;
  run_on_all_ranks(comm, [&] {
    if (rank() != 0) return;
    if (is_foreign(path)) {
      text = path + "\n";
      return;
    }
    const std::string newest = find_checkpoint(path);
    std::vector<std::string> all{newest};
    if (newest != path) {
      const std::vector<std::string> names = checkpoints_in(path);
      for (auto name = names.rbegin(); name != names.rend(); ++name)
        if (path + "/" + *name != newest) all.push_back(path + "/" + *name);
      pass_over_skipped(all);
    }
    if (!fallback) all.resize(1);
    for (const std::string& one : all) text += one + "\n";
  });
  std::istringstream lines(comm.broadcast(text));
  std::vector<std::string> all;
  for (std::string line; std::getline(lines, line);) all.push_back(line);
  return all;
}

// Opened, and looked through before a byte of it is used where something is lost otherwise.
Checkpoint Session::open(const std::string& path, const LoadOptions& how) {
  const std::vector<std::string> all = candidates(path, how.fallback);
  for (std::size_t i = 0;; ++i) try {
      std::optional<Checkpoint> from;
      run_on_all_ranks(saver_->peers(), [&] {
        from.emplace(all[i]);
        if (step_ > 0 || how.fallback) from->verify([](int64_t) {}, rank(), world());
      });
      return std::move(*from);
    } catch (const Failure& failure) {
      const bool damaged = failure.exit() == Exit::user || failure.exit() == Exit::environment;
      if (!damaged || i + 1 == all.size()) throw;
      if (rank() == 0) log(ZR_LOG_WARN, std::string(failure.what()) + "; going back to " + all[i + 1]);
    }
}

namespace {
// Resuming is also how a job that restarts by itself is first started, so that this is not an error; but a folder with
// other things in it is likely the wrong one.
void report_no_checkpoint(const std::string& dir) {
  std::string where = dir;
  int level = ZR_LOG_INFO;
  if (!path_exists(dir)) {
    where += " (the folder does not exist yet)";
  } else if (const auto names = list_folder(dir); std::any_of(names.begin(), names.end(), [](const std::string& name) {
               return name != kLockName && !name.starts_with("step-");
             })) {
    where += " (the folder holds other files; see that checkpoint.dir names the right one)";
    level = ZR_LOG_WARN;
  }
  log(level, "no checkpoint in " + where + "; training starts at step 1");
}
}  // namespace

void Session::begin() {
  LoadOptions how;
  how.strict = config().boolean("checkpoint.strict");
  how.convert = config().boolean("checkpoint.convert");
  how.fallback = config().boolean("checkpoint.fallback");
  const std::string dir = checkpoint_dir();
  if (config().boolean("checkpoint.resume") && !dir.empty()) {
    const CheckpointComm comm = saver_->peers();
    std::string there;
    run_on_all_ranks(comm, [&] {
      if (rank() != 0) return;
      if (path_exists(dir + "/" + kManifest))
        fail_user(dir +
                  ": is a checkpoint itself, not a folder of checkpoints; set checkpoint.dir to the folder above "
                  "it");
      if (!checkpoints_in(dir).empty()) there = "yes";
    });
    const bool found = comm.broadcast(there) == "yes";
    if (found)
      load(dir, how);
    else if (rank() == 0)
      report_no_checkpoint(dir);
    if (rank() == 0)
      for (const std::string& line : name_.different_moments()) log(ZR_LOG_WARN, line);
    if (found) return;
  }
  if (const std::string& init = config().text("checkpoint.init"); !init.empty()) {
    how.weights_only = true;
    how.renames = config().renames();
    // A folder that engines of these names saved to has one folder for each.
    const CheckpointComm comm = saver_->peers();
    std::string own;
    if (rank() == 0 && !setup_.engine.empty() && path_exists(init + "/" + setup_.engine)) own = "/" + setup_.engine;
    load(init + comm.broadcast(own), how);
  }
}

}  // namespace zr::host
