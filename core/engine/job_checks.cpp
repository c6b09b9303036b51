#include "engine/job_checks.hpp"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>

#include "base/error.hpp"
#include "base/hex.hpp"
#include "base/text.hpp"
#include "checkpoint/manifest.hpp"

namespace zr::host::engine {

namespace {
std::string hash_of_file(const std::filesystem::path& file) {
  std::ifstream in(file, std::ios::binary | std::ios::ate);
  std::string bytes(in ? static_cast<std::size_t>(in.tellg()) : 0, '\0');
  in.seekg(0).read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  return hex(checkpoint::hash_of(bytes.data(), std::ssize(bytes)));
}
}  // namespace

void check_strategy(const PlannedJob& job) {
  const auto* api = job.strategy.api<zr_strategy_api>();
  if (api->acquire && api->release) return;
  const std::vector<plan::Parameter>& parameters = job.plan.input.parameters;
  std::vector<char> unsharded(parameters.size(), 0);
  for (const plan::Piece& piece : job.plan.rank_plan.weights)
    unsharded[piece.param] |= piece.count == parameters[piece.param].count;
  for (std::size_t i = 0; i < parameters.size(); ++i)
    if (!unsharded[i] && parameters[i].count > 0)
      fail_user("strategy '" + std::string(job.setup.strategy.table->id) + "' does not keep all of '" +
                parameters[i].name + "' on rank " + std::to_string(job.rank()) +
                " and cannot gather it before its use; choose another strategy");
}

void check_optimizer(const PlannedJob& job) {
  zr_optimizer_desc desc{};
  desc.size = sizeof desc;
  CallError error;
  check(job.optimizer.api<zr_optimizer_api>()->describe(job.optimizer.self(), &desc, &error), error,
        job.optimizer.call_text("describe"));
  const std::string pair = "optimizer '" + std::string(job.setup.optimizer.table->id) + "' with strategy '" +
                           job.setup.strategy.table->id + "': ";
  if (desc.needs & (ZR_OPT_NEEDS_COMM | ZR_OPT_NEEDS_LOCAL_GRADS))
    fail_user(pair +
              "the optimizer needs gradients before they are reduced, which Zeroth does not support; choose another "
              "optimizer");
  for (const zr_slot& slot : job.plan.input.slots)
    if (slot.shape != ZR_SLOT_LIKE_PARAM || (slot.flags & (ZR_SLOT_RANK_PRIVATE | ZR_SLOT_UNSHARDED)))
      fail_user(pair + "its state '" + slot.name +
                "' is not a sharded state with one element per parameter element, the only kind that Zeroth supports; "
                "choose another optimizer");
  if (desc.granularity == ZR_ELEMENTWISE) return;
  for (const plan::Piece& piece : job.plan.rank_plan.reduced_gradients) {
    const plan::Parameter& parameter = job.plan.input.parameters[piece.param];
    const int64_t row = parameter.shape.empty() ? 1 : parameter.count / std::max<int64_t>(parameter.shape[0], 1);
    const bool complete = piece.count == parameter.count, rows = piece.first % row == 0 && piece.count % row == 0;
    if (!(complete || (desc.granularity == ZR_ROWWISE && rows)))
      fail_user(pair + "the optimizer needs complete " + (desc.granularity == ZR_ROWWISE ? "rows" : "tensors") +
                ", but '" + parameter.name +
                "' is split between ranks; choose a strategy that assigns complete parameters to ranks");
  }
}

void compare_ranks(PlannedJob& job, model::Model& model) {
  std::string mine = job.setup.engine.empty() ? "" : "engine '" + job.setup.engine + "'\n";
  std::vector<std::optional<plugin::Component>> components{job.setup.strategy, job.setup.optimizer,
                                                           job.setup.communicator};
  components.insert(components.end(), job.setup.tiers.begin(), job.setup.tiers.end());
  for (const auto& component : components)
    if (component)
      mine += "plug-in " + std::string(component->table->id) + " " + component->table->version + " (file " +
              hash_of_file(component->file) + ")\n";
  for (const plan::Parameter& p : job.plan.input.parameters) {
    mine += "parameter " + p.name + (p.frozen ? " (frozen)" : "") + " [";
    for (const int64_t size : p.shape) mine += std::to_string(size) + " ";
    mine += "]\n";
  }
  for (const config::Entry& entry : job.config().entries())
    if (entry.key.path() != job.config().job().ranks.key)
      mine += entry.key.path() + " = " + config::toml_text(entry.value) + "\n";
  for (const config::GroupConfig& group : job.config().groups()) {
    mine += "optimizer group";
    for (const std::string& pattern : group.match) mine += " " + pattern;
    mine += ", lr_scale = " + shortest(group.lr_scale);
    for (const config::Entry& entry : group.values)
      mine += ", " + entry.key.path() + " = " + config::toml_text(entry.value);
    mine += "\n";
  }
  if (model.deferred() > 0) mine += "construction of " + std::to_string(model.deferred()) + " operators\n";
  for (const model::ModelBuffer& buffer : model.buffers())
    mine += "buffer " + buffer.name + ", " + std::to_string(buffer.bytes) + " bytes\n";
  const std::string theirs = job.comm.broadcast_bytes(mine, 0, "set-up of rank 0");
  std::string difference;
  if (mine != theirs) {
    std::istringstream own(mine), other(theirs);
    std::string a, b;
    do {
      if (!std::getline(own, a)) a = "no further entry";
      if (!std::getline(other, b)) b = "no further entry";
    } while (a == b);
    difference = "rank " + std::to_string(job.rank()) + " has '" + a + "', rank 0 has '" + b + "'";
  }
  difference.resize(400);
  for (const std::string& text : job.comm.all_gather_bytes(difference, "comparison of set-ups"))
    if (text[0])
      fail_user("the ranks do not train the same job: " + text.substr(0, text.find('\0')) +
                "; start all ranks with the same TOML file and the same model");
}

}  // namespace zr::host::engine
