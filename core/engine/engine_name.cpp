#include "engine/engine_name.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "base/file.hpp"
#include "checkpoint/folder.hpp"
#include "zr/mutex.hpp"

namespace zr::host::engine {

namespace {
struct Alive {
  std::string name, checkpoints;
  int64_t step = 0, begun = 0;            // steps made so far; the step of the checkpoint that it resumed from
  std::map<std::string, int64_t> others;  // steps of the other engines when that checkpoint was saved
};

Mutex g_mutex;
std::map<std::string, Alive>& alive() ZR_REQUIRES(g_mutex) {  // by run folder
  static std::map<std::string, Alive> engines;
  return engines;
}

bool are_together(const Alive& a, const Alive& b) {
  return a.checkpoints == b.checkpoints && !a.checkpoints.empty() && a.name != b.name && !a.name.empty() &&
         !b.name.empty();
}

// The step of `other` when the checkpoint that `one` resumed from was saved; -1: unknown.
int64_t step_then(const Alive& one, const Alive& other) {
  const auto found = one.others.find(other.name);
  return found == one.others.end() ? -1 : found->second;
}

std::string difference(const Alive& one, const Alive& other) {
  const int64_t then = step_then(one, other);
  const auto text = [](int64_t step) { return std::to_string(step); };
  const std::string folder = other.checkpoints + "/" + other.name;
  return "engine '" + one.name + "' resumes from step " + text(one.begun) + ", saved when engine '" + other.name +
         "' was at step " + text(then) + ", but engine '" + other.name + "' starts from step " + text(other.begun) +
         ": the job ended between their saves, or a checkpoint was removed; " +
         (!path_exists(folder + "/" + checkpoint::checkpoint_name(then))
              ? folder + " has no checkpoint of step " + text(then) +
                    ", so they cannot resume from the same point; keep more checkpoints (checkpoint.keep)"
          : other.begun > then ? "to resume both from the same point, remove the checkpoints of '" + other.name +
                                     "' after step " + text(then) + " in " + folder + " and resume again"
                               : "its checkpoint of step " + text(then) + " was not loaded; run `zeroth verify " +
                                     folder + "` to check whether it is damaged");
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
    fail_user("zr::Engine(program, model, \"" + name + "\"): an engine's name is 1 to 64 letters, digits, '-' and " +
              "'_', begins with a letter, and is not \"lock\", \"latest\" or \"step-...\"");
  const MutexLock lock(g_mutex);
  if (alive().emplace(run_folder, Alive{name, checkpoints, 0, 0, {}}).second) return;
  fail_user((name.empty() ? "this process already has a zr::Engine without a name"
                          : "this process already has a zr::Engine named '" + name + "'") +
            " that writes to " + run_folder + "; give each engine its own name, as in zr::Engine(program, model, " +
            "\"generator\"), or destroy the existing engine first");
}

EngineName::~EngineName() {
  const MutexLock lock(g_mutex);
  alive().erase(run_folder_);
}

void EngineName::at_step(int64_t step) {
  const MutexLock lock(g_mutex);
  alive().at(run_folder_).step = step;
}

void EngineName::loaded(int64_t step, const std::map<std::string, int64_t>& others) {
  const MutexLock lock(g_mutex);
  Alive& own = alive().at(run_folder_);
  own.step = own.begun = step;
  own.others = others;
}

std::map<std::string, int64_t> EngineName::others() const {
  const MutexLock lock(g_mutex);
  std::map<std::string, int64_t> steps;
  for (const auto& [folder, one] : alive())
    if (are_together(one, alive().at(run_folder_))) steps[one.name] = one.step;
  return steps;
}

// Of two engines that were saved together, the checkpoint saved last contains the step of the other one's save.
std::vector<std::string> EngineName::mismatch_warnings() const {
  const MutexLock lock(g_mutex);
  std::vector<std::string> lines;
  const Alive& own = alive().at(run_folder_);
  for (const auto& [folder, one] : alive()) {
    if (!are_together(one, own) || one.step != one.begun) continue;
    const int64_t theirs = step_then(own, one), mine = step_then(one, own);
    if (theirs == one.begun || mine == own.begun || (theirs < 0 && mine < 0)) continue;
    const bool other_ahead = theirs >= 0 && (one.begun > theirs || mine < 0 || own.begun < mine);
    lines.push_back(other_ahead ? difference(own, one) : difference(one, own));
  }
  return lines;
}

}  // namespace zr::host::engine
