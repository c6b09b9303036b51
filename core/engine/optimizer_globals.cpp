#include "engine/optimizer_globals.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/draft_abi.hpp"  // IWYU pragma: keep
#include "base/error.hpp"
#include "base/hex.hpp"
#include "base/log.hpp"
#include "base/text.hpp"

namespace zr::host::engine {

namespace {

// The id of the optimizer that saved a value, and the value's key. `ids`: the list of the saved job's
// optimizers, separated by ", ". Older files name the first one's values without its id.
std::pair<std::string, std::string> split(const std::string& ids, const std::string& name) {
  std::string first;
  for (std::size_t begin = 0; begin <= ids.size();) {
    const std::size_t end = std::min(ids.find(", ", begin), ids.size());
    const std::string id = ids.substr(begin, end - begin);
    if (name.starts_with(id + "/")) return {id, name.substr(id.size() + 1)};
    if (first.empty()) first = id;
    begin = end + 2;
  }
  return {first, name};
}

struct OwnGlobals {
  OptimizerGlobals values;
  std::string repeated;  // a key that was saved twice
};

void save(const job::StepContext& context, std::size_t index, OptimizerGlobals& globals) {
  const plugin::Instance& optimizer = context.optimizers[index];
  const auto* api = job::globals_of(optimizer);
  if (!api) return;
  OwnGlobals own;
  const auto sink = [](void* ctx, const char* key, const void* value, uint64_t bytes) {
    auto& to = *static_cast<OwnGlobals*>(ctx);
    if (!to.values.emplace(key, std::string(static_cast<const char*>(value), bytes)).second) to.repeated = key;
  };
  context.call_optimizer(optimizer, "save_globals",
                         [&](zr_error* error) { return api->save_globals(optimizer.self(), sink, &own, error); });
  const std::string text = optimizer.call_text("save_globals");
  if (!own.repeated.empty()) fail_plugin_bug(text, fmt::format("it saved the key '{}' twice", printable(own.repeated)));
  for (auto& [key, value] : own.values) {
    if (find_not_utf8(key) != std::string_view::npos)
      fail_plugin_bug(text, fmt::format("the key '{}' is not UTF-8", printable(key)));
    globals[context.optimizers.id(index) + "/" + key] = std::move(value);
  }
}

bool has(const job::Optimizers& optimizers, const std::string& id) {
  for (std::size_t i = 0; i < optimizers.size(); ++i)
    if (optimizers.id(i) == id) return true;
  return false;
}

// The name of the first value in which two texts of lines "name=value" differ.
std::string name_of_difference(const std::string& a, const std::string& b) {
  const auto at = static_cast<std::size_t>(std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin());
  const std::string& text = at == a.size() ? b : a;
  const std::size_t line = at == 0 ? 0 : text.rfind('\n', at - 1) + 1;  // npos + 1 is 0
  return text.substr(line, text.find('=', line) - line);
}

// The checkpoint has the values once.
void check_same_globals(const job::StepContext& context, const OptimizerGlobals& globals) {
  std::string own;
  for (const auto& [name, value] : globals) own += fmt::format("{}={}\n", name, hex_of_bytes(value));
  const std::vector<std::string> all = context.comm.all_gather_bytes(own, "values of optimizers");
  for (std::size_t rank = 1; rank < all.size(); ++rank)
    if (all[rank] != all[0])
      fail_user(
          fmt::format("a value of an optimizer that belongs to no parameter differs between rank 0 and rank {} "
                      "({}), and a checkpoint has it once; correct the plug-in, or choose another optimizer",
                      rank, printable(name_of_difference(all[0], all[rank]))));
}

}  // namespace

OptimizerGlobals save_globals(const job::StepContext& context) {
  OptimizerGlobals globals;
  bool any = false;
  for (std::size_t i = 0; i < context.optimizers.size(); ++i) {
    any |= job::globals_of(context.optimizers[i]) != nullptr;
    save(context, i, globals);
  }
  if (any) check_same_globals(context, globals);
  return globals;
}

void load_globals(const job::StepContext& context, const checkpoint::CheckpointMetadata& saved) {
  for (const auto& [name, bytes] : saved.globals) {
    const auto [id, key] = split(saved.optimizer, name);
    bool loaded = false;
    for (std::size_t i = 0; i < context.optimizers.size(); ++i) {
      const plugin::Instance& optimizer = context.optimizers[i];
      const auto* api = context.optimizers.id(i) == id ? job::globals_of(optimizer) : nullptr;
      if (!api) continue;
      context.call_optimizer(optimizer, "load_global", [&](zr_error* error) {
        return api->load_global(optimizer.self(), key.c_str(), bytes.data(), bytes.size(), error);
      });
      loaded = true;
    }
    if (!loaded && context.rank() == 0)
      log(ZR_LOG_WARN, fmt::format("the value '{}' that optimizer '{}' saved in the checkpoint is not loaded: {}",
                                   printable(key), printable(id),
                                   has(context.optimizers, id) ? "this version of the optimizer has no such values"
                                                               : "this job does not use the optimizer"));
  }
}

}  // namespace zr::host::engine
