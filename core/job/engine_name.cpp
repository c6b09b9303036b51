#include "job/engine_name.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "base/error.hpp"
#include "base/file.hpp"
#include "checkpoint/folder.hpp"
#include "zr/mutex.hpp"

namespace zr::host::job {

namespace {
struct EngineSteps {
  std::string name, checkpoints;
  int64_t step = 0, resumed_from = 0;     // steps made so far; the step of the checkpoint that it resumed from
  std::map<std::string, int64_t> others;  // steps of the other engines when that checkpoint was saved
};

Mutex g_mutex;
std::map<std::string, EngineSteps>& engines_by_folder() ZR_REQUIRES(g_mutex) {  // by run folder
  static auto* engines = new std::map<std::string, EngineSteps>;  // never destroyed: engines may outlive statics
  return *engines;
}

bool are_together(const EngineSteps& a, const EngineSteps& b) {
  return a.checkpoints == b.checkpoints && !a.checkpoints.empty() && a.name != b.name && !a.name.empty() &&
         !b.name.empty();
}

// The step of `other` when the checkpoint that `engine` resumed from was saved; -1: unknown.
int64_t step_then(const EngineSteps& engine, const EngineSteps& other) {
  const auto found = engine.others.find(other.name);
  return found == engine.others.end() ? -1 : found->second;
}

std::string difference(const EngineSteps& engine, const EngineSteps& other) {
  const int64_t then = step_then(engine, other);
  const auto text = [](int64_t step) { return std::to_string(step); };
  const std::string folder = fmt::format("{}/{}", other.checkpoints, other.name);
  return fmt::format(
      "engine '{}' resumes from step {}, saved when engine '{}' was at step {}, but engine '{}' starts from step {}: "
      "the job ended between their saves, or a checkpoint was removed; {}",
      engine.name, text(engine.resumed_from), other.name, text(then), other.name, text(other.resumed_from),
      !path_exists(folder + "/" + checkpoint::checkpoint_name(then))
          ? fmt::format("{} has no checkpoint of step {}, so they cannot resume from the same point; keep more "
                        "checkpoints (checkpoint.keep)",
                        folder, text(then))
      : other.resumed_from > then
          ? fmt::format("to resume both from the same point, remove the checkpoints of '{}' after step {} in {} and "
                        "resume again",
                        other.name, text(then), folder)
          : fmt::format(
                "its checkpoint of step {} was not loaded; run `zeroth verify {}` to check whether it is damaged",
                text(then), folder));
}

bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }

// Rejects the other names in run folders and checkpoint folders: "lock", "latest", "1", "metrics.jsonl",
// "step-00000001".
bool is_valid(const std::string& name) {
  return !name.empty() && name.size() <= 64 && is_letter(name[0]) && name != "lock" && name != "latest" &&
         !name.starts_with("step-") && std::all_of(name.begin(), name.end(), [](char c) {
           return is_letter(c) || (c >= '0' && c <= '9') || c == '-' || c == '_';
         });
}
}  // namespace

EngineName::EngineName(const std::string& name, const std::string& run_folder, const std::string& checkpoints)
    : run_folder_(run_folder) {
  if (!name.empty() && !is_valid(name))
    fail_user(
        fmt::format("zr::Engine(program, model, \"{}\"): an engine's name is 1 to 64 letters, digits, '-' and '_', "
                    "begins with a letter, and is not \"lock\", \"latest\" or \"step-...\"",
                    name));
  const MutexLock lock(g_mutex);
  if (engines_by_folder().emplace(run_folder, EngineSteps{name, checkpoints, 0, 0, {}}).second) return;
  fail_user(
      fmt::format("{} that writes to {}; give each engine its own name, as in zr::Engine(program, model, "
                  "\"generator\"), or destroy the existing engine first",
                  name.empty() ? "this process already has a zr::Engine without a name"
                               : fmt::format("this process already has a zr::Engine named '{}'", name),
                  run_folder));
}

EngineName::~EngineName() {
  const MutexLock lock(g_mutex);
  engines_by_folder().erase(run_folder_);
}

void EngineName::record_step(int64_t step) {
  const MutexLock lock(g_mutex);
  engines_by_folder().at(run_folder_).step = step;
}

void EngineName::record_load(int64_t step, const std::map<std::string, int64_t>& others) {
  const MutexLock lock(g_mutex);
  EngineSteps& self = engines_by_folder().at(run_folder_);
  self.step = self.resumed_from = step;
  self.others = others;
}

std::map<std::string, int64_t> EngineName::steps_of_other_engines() const {
  const MutexLock lock(g_mutex);
  std::map<std::string, int64_t> steps;
  for (const auto& [folder, engine] : engines_by_folder())
    if (are_together(engine, engines_by_folder().at(run_folder_))) steps[engine.name] = engine.step;
  return steps;
}

// Of two engines that were saved together, the checkpoint saved last contains the step of the other one's save.
std::vector<std::string> EngineName::mismatch_warnings() const {
  const MutexLock lock(g_mutex);
  std::vector<std::string> lines;
  const EngineSteps& self = engines_by_folder().at(run_folder_);
  for (const auto& [folder, engine] : engines_by_folder()) {
    if (!are_together(engine, self) || engine.step != engine.resumed_from) continue;
    const int64_t their_step = step_then(self, engine), our_step = step_then(engine, self);
    if (their_step == engine.resumed_from || our_step == self.resumed_from || (their_step < 0 && our_step < 0))
      continue;
    const bool other_ahead =
        their_step >= 0 && (engine.resumed_from > their_step || our_step < 0 || self.resumed_from < our_step);
    lines.push_back(other_ahead ? difference(self, engine) : difference(engine, self));
  }
  return lines;
}

}  // namespace zr::host::job
