#include "engine/engine_name.hpp"

#include <algorithm>
#include <mutex>
#include <set>

#include "base/failure.hpp"

namespace zr::host {

namespace {
std::mutex g_mutex;
std::set<std::string>& alive() {
  static std::set<std::string> folders;
  return folders;
}

bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }

// Other names in a run folder and in a checkpoint folder: "lock", "latest", "1", "metrics.jsonl", "step-00000001".
bool is_valid(const std::string& name) {
  return !name.empty() && name.size() <= 64 && is_letter(name[0]) && name != "lock" && name != "latest" &&
         !name.starts_with("step-") && std::all_of(name.begin(), name.end(), [](char c) {
           return is_letter(c) || (c >= '0' && c <= '9') || c == '-' || c == '_';
         });
}
}  // namespace

EngineName::EngineName(const std::string& name, const std::string& run_folder) : run_folder_(run_folder) {
  if (!name.empty() && !is_valid(name))
    fail_user("zr::Engine(program, model, \"" + name + "\"): an engine's name is 1 to 64 letters, digits, '-' and " +
              "'_', begins with a letter, and is not \"lock\", \"latest\" or \"step-...\"");
  const std::lock_guard lock(g_mutex);
  if (alive().insert(run_folder).second) return;
  fail_user((name.empty() ? "this process already has a zr::Engine without a name"
                          : "this process already has a zr::Engine named '" + name + "'") +
            " that writes to " + run_folder + "; give each engine its own name, as in zr::Engine(program, model, " +
            "\"generator\"), or destroy the first one before");
}

EngineName::~EngineName() {
  const std::lock_guard lock(g_mutex);
  alive().erase(run_folder_);
}

}  // namespace zr::host
