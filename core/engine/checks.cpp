// Session's start: what must hold before memory is taken, of strategy and optimizer, and between the ranks.
#include <xxhash.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>

#include "base/failure.hpp"
#include "base/text.hpp"
#include "engine/session.hpp"

namespace zr::host {

namespace {
std::string hash_of_file(const std::filesystem::path& file) {
  std::ifstream in(file, std::ios::binary | std::ios::ate);
  std::string bytes(in ? static_cast<std::size_t>(in.tellg()) : 0, '\0');
  in.seekg(0).read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  char text[20];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(XXH3_64bits(bytes.data(), bytes.size())));
  return text;
}
}  // namespace

// Parameters that are not whole must be gathered before use.
void Session::check_strategy() const {
  const auto* api = strategy_->api<zr_strategy_api>();
  if (api->acquire && api->release) return;
  const std::vector<Parameter>& parameters = plan_.input.parameters;
  std::vector<char> whole(parameters.size(), 0);
  for (const Piece& piece : plan_.mine.weights) whole[piece.param] |= piece.count == parameters[piece.param].count;
  for (std::size_t i = 0; i < parameters.size(); ++i)
    if (!whole[i] && parameters[i].count > 0)
      fail_user("strategy '" + std::string(setup_.strategy.table->id) + "' keeps no whole '" + parameters[i].name +
                "' on rank " + std::to_string(rank()) +
                ", and offers no way to gather it before its use; choose another strategy");
}

void Session::check_optimizer() {
  zr_optimizer_desc desc{};
  desc.size = sizeof desc;
  CallError error;
  check(optimizer_->api<zr_optimizer_api>()->describe(optimizer_->self(), &desc, &error), error,
        optimizer_->who("describe"));
  granularity_ = desc.granularity;
  const std::string pair =
      "optimizer '" + std::string(setup_.optimizer.table->id) + "' with strategy '" + setup_.strategy.table->id + "': ";
  if (desc.needs & (ZR_OPT_NEEDS_COMM | ZR_OPT_NEEDS_LOCAL_GRADS))
    fail_user(pair +
              "the optimizer needs gradients that are not yet reduced, which this host does not offer; choose another "
              "optimizer");
  for (const zr_slot& slot : plan_.input.slots)
    if (slot.shape != ZR_SLOT_LIKE_PARAM || (slot.flags & (ZR_SLOT_RANK_PRIVATE | ZR_SLOT_UNSHARDED)))
      fail_user(pair + "its state '" + slot.name +
                "' is not one element for each of the parameter's, which is what this host offers; choose another "
                "optimizer");
  if (desc.granularity == ZR_ELEMENTWISE) return;
  for (const Piece& piece : plan_.mine.reduced_gradients) {
    const Parameter& parameter = plan_.input.parameters[piece.param];
    const int64_t row = parameter.shape.empty() ? 1 : parameter.count / std::max<int64_t>(parameter.shape[0], 1);
    const bool whole = piece.count == parameter.count, rows = piece.first % row == 0 && piece.count % row == 0;
    if (!(whole || (desc.granularity == ZR_ROWWISE && rows)))
      fail_user(pair + "the optimizer needs whole " + (desc.granularity == ZR_ROWWISE ? "rows" : "tensors") +
                ", but '" + parameter.name +
                "' is cut between ranks; choose a strategy that deals out whole parameters");
  }
}

void Session::compare_ranks() {
  std::string mine = setup_.engine.empty() ? "" : "engine '" + setup_.engine + "'\n";
  std::vector<std::optional<Component>> components{setup_.strategy, setup_.optimizer, setup_.communicator};
  components.insert(components.end(), setup_.tiers.begin(), setup_.tiers.end());
  for (const auto& component : components)
    if (component)
      mine += "plug-in " + std::string(component->table->id) + " " + component->table->version + " (file " +
              hash_of_file(component->file) + ")\n";
  for (const Parameter& p : plan_.input.parameters) {
    mine += "parameter " + p.name + (p.frozen ? " (frozen)" : "") + " [";
    for (const int64_t size : p.shape) mine += std::to_string(size) + " ";
    mine += "]\n";
  }
  for (const Entry& entry : config().entries())
    if (entry.key.path() != "job.ranks") mine += entry.key.path() + " = " + toml_text(entry.value) + "\n";
  for (const GroupConfig& group : config().groups()) {
    mine += "optimizer group";
    for (const std::string& pattern : group.match) mine += " " + pattern;
    mine += ", lr_scale = " + shortest(group.lr_scale);
    for (const Entry& entry : group.values) mine += ", " + entry.key.path() + " = " + toml_text(entry.value);
    mine += "\n";
  }
  if (model_.deferred() > 0) mine += "construction of " + std::to_string(model_.deferred()) + " operators\n";
  for (const ModelBuffer& buffer : model_.buffers())
    mine += "buffer " + buffer.name + ", " + std::to_string(buffer.bytes) + " bytes\n";
  const std::string theirs = comm_->broadcast_bytes(mine, 0, "set-up of rank 0");
  std::string difference;
  if (mine != theirs) {
    std::istringstream own(mine), other(theirs);
    std::string a, b;
    do {
      if (!std::getline(own, a)) a = "nothing more";
      if (!std::getline(other, b)) b = "nothing more";
    } while (a == b);
    difference = "rank " + std::to_string(rank()) + " has '" + a + "', rank 0 has '" + b + "'";
  }
  difference.resize(400);
  for (const std::string& said : comm_->all_gather_bytes(difference, "comparison of set-ups"))
    if (said[0])
      fail_user("the ranks do not train the same job: " + said.substr(0, said.find('\0')) +
                "; start all of them with one TOML file and one model");
}

}  // namespace zr::host
