#include "job/job_checks.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <optional>
#include <sstream>

#include "base/draft_abi.hpp"  // IWYU pragma: keep
#include "base/error.hpp"
#include "base/hex.hpp"
#include "base/text.hpp"

namespace zr::host::job {

namespace {
std::string plugin_lines(const StartedJob& job) {
  std::vector<std::optional<plugin::Component>> components{job.setup.strategy, job.setup.optimizer,
                                                           job.setup.communicator};
  components.insert(components.end(), job.setup.group_optimizers.begin(), job.setup.group_optimizers.end());
  components.insert(components.end(), job.setup.tiers.begin(), job.setup.tiers.end());
  std::string text;
  for (const auto& component : components)
    if (component)
      text += fmt::format("plug-in {} {} (file {})\n", component->table->id, component->table->version,
                          hex(plugin::loaded_file_hash(*component)));
  return text;
}

std::string parameter_lines(const StartedJob& job) {
  std::string text;
  for (const plan::Parameter& p : job.plan.input.parameters)
    text += fmt::format("parameter {}{} [{}]\n", p.name, p.frozen ? " (frozen)" : "", fmt::join(p.shape, ", "));
  return text;
}

// All settings except job.ranks, then the optimizer groups.
std::string config_lines(const config::JobConfig& config) {
  std::string text;
  for (const config::Entry& entry : config.entries())
    if (entry.key.path() != config.job().ranks.key)
      text += fmt::format("{} = {}\n", entry.key.path(), config::toml_text(entry.value));
  for (const config::GroupConfig& group : config.groups()) {
    text += fmt::format("optimizer group {}, lr_scale = {}{}", fmt::join(group.match, " "), shortest(group.lr_scale),
                        group.use.empty() ? "" : ", use = " + group.use);
    for (const config::Entry& entry : group.values)
      text += fmt::format(", {} = {}", entry.key.path(), config::toml_text(entry.value));
    text += "\n";
  }
  return text;
}

std::string model_lines(model::Model& model) {
  std::string text;
  if (model.deferred() > 0) text += fmt::format("construction of {} operators\n", model.deferred());
  for (const model::ModelBuffer& buffer : model.buffers())
    text += fmt::format("buffer {}, {} bytes\n", buffer.name, buffer.bytes);
  return text;
}

}  // namespace

std::string setup_text(const StartedJob& job, model::Model& model) {
  std::string text = job.setup.engine.empty() ? "" : fmt::format("engine '{}'\n", job.setup.engine);
  text += plugin_lines(job);
  text += parameter_lines(job);
  text += config_lines(job.config());
  text += model_lines(model);
  return text;
}

std::string first_difference(const std::string& own_setup, const std::string& rank_zero_setup, int rank) {
  std::istringstream own_lines(own_setup), rank_zero_lines(rank_zero_setup);
  std::string a, b;
  do {
    if (!std::getline(own_lines, a)) a = "no further entry";
    if (!std::getline(rank_zero_lines, b)) b = "no further entry";
  } while (a == b);
  return fmt::format("rank {} has '{}', rank 0 has '{}'", rank, a, b);
}

void check_strategy(const plan::MemoryPlan& plan, const plugin::Instance& strategy) {
  const auto* api = strategy.api<zr_strategy_api>();
  if (api->acquire && api->release) return;
  const std::vector<plan::Parameter>& parameters = plan.input.parameters;
  std::vector<char> unsharded(parameters.size(), 0);
  for (const plan::Piece& piece : plan.rank_plan.weights)
    unsharded[piece.param] |= piece.count == parameters[piece.param].count;
  for (std::size_t i = 0; i < parameters.size(); ++i)
    if (!unsharded[i] && parameters[i].count > 0)
      fail_user(
          fmt::format("strategy '{}' does not keep all of '{}' on rank {} and cannot gather it before its use; choose "
                      "another strategy",
                      strategy.component().table->id, parameters[i].name, plan.rank));
}

namespace {
// `pair`: the beginning of messages, which names optimizer and strategy.
void check_description(const plan::OptimizerDescription& description, const std::string& pair) {
  const bool local = description.needs & ZR_OPT_NEEDS_LOCAL_GRADS;
  if ((description.needs & ZR_OPT_NEEDS_COMM) && !local)
    fail_user(pair +
              "the optimizer communicates in steps with reduced gradients, which Zeroth does not support; choose "
              "another optimizer");
  if (local && !description.elementwise())
    fail_user(pair +
              "the optimizer needs gradients that are not reduced over ranks, but is not elementwise, which Zeroth "
              "does not support; choose another optimizer");
  for (const std::vector<zr_slot>* slots : {&description.slots, &description.private_slots})
    for (const zr_slot& slot : *slots) {
      if (slot.flags & ZR_SLOT_TRANSIENT)
        fail_user(fmt::format("{}its state '{}' is transient, which Zeroth does not support; choose another optimizer",
                              pair, slot.name));
      if (slot.flags == 0) continue;
      if (!local)
        fail_user(fmt::format(
            "{}its state '{}' is not sharded, which Zeroth supports only for optimizers that need gradients "
            "that are not reduced over ranks; choose another optimizer",
            pair, slot.name));
      if (slot.dtype != ZR_F32 || slot.shape != ZR_SLOT_LIKE_PARAM)
        fail_user(
            fmt::format("{}its state '{}' is not sharded, and is not an fp32 tensor of its parameter's shape, "
                        "which Zeroth does not support; choose another optimizer",
                        pair, slot.name));
    }
}
}  // namespace

void check_local_gradients(const config::JobConfig& config, const plan::MemoryPlan& plan, const Optimizers& optimizers,
                           const plugin::Instance& strategy) {
  if (!plan.input.exchange_plan) return;
  const std::string optimizer = fmt::format("optimizer '{}' needs gradients that are not reduced over ranks",
                                            local_optimizer_of(plan.input, optimizers).instance->component().table->id);
  if (!accepts_local_gradients(strategy))
    fail_user(
        fmt::format("{}, which strategy '{}' does not support; choose a strategy under which every rank has all "
                    "weights, or another optimizer",
                    optimizer, strategy.component().table->id));
  const auto reject = [&](const std::string& setting, const std::string& why, const std::string& remedy) {
    fail_user(fmt::format("{}: {}, {}; {}, or choose another optimizer", setting, optimizer, why, remedy));
  };
  if (optimizers.size() > 1)
    fail_user(
        fmt::format("{}, so it must update all parameters of the model, but the job uses the optimizers {}; remove "
                    "`use` from [[optimizer.groups]], or choose another optimizer",
                    optimizer, optimizers.ids()));
  if (const auto& clip = config.train().gradient_clipping; clip > 0)
    reject(fmt::format("{} = {} ({})", clip.key, shortest(clip), clip.origin.text()),
           "so the norm of the mean gradient is unknown", fmt::format("set {} = 0", clip.key));
  if (const auto& kept = config.train().keep_fp32; plan.input.parts() > 1)
    reject(fmt::format("{} ({})", kept.key, kept.origin.text()), "which Zeroth supports for weights of one dtype",
           fmt::format("remove {}", kept.key));
  const config::OffloadConfig& offload = config.offload();
  std::vector<std::string> settings, remedies;
  const auto conflict = [&](const auto& key, const std::string& value, const char* right) {
    settings.push_back(fmt::format("{} = \"{}\" ({})", key.key, value, key.origin.text()));
    remedies.push_back(fmt::format("{} = \"{}\"", key.key, right));
  };
  for (const config::Setting<config::TierChoice>* choice :
       {&offload.optimizer, &offload.gradients, &offload.parameters})
    if (!(*choice)->on_device()) conflict(*choice, (*choice)->text, config::kOnDevice);
  const bool has_tier = !settings.empty();
  const auto& device = config.job().device;
  const bool has_device = device.value != config::kCpuDevice;
  if (has_device) conflict(device, device.value, config::kCpuDevice);
  if (!settings.empty())
    reject(fmt::format("{}", fmt::join(settings, ", ")),
           !has_device ? "which it updates in memory of the ranks"
           : !has_tier ? "which Zeroth supports on the CPU only"
                       : "which Zeroth supports on the CPU only, in memory of the ranks",
           fmt::format("set {}", fmt::join(remedies, " and ")));
}

void check_optimizers(const plan::MemoryPlan& plan, const Optimizers& optimizers, const std::string& strategy) {
  const std::vector<plan::Parameter>& parameters = plan.input.parameters;
  const auto pair = [&](const plan::Parameter& parameter) {
    return fmt::format("optimizer '{}' with strategy '{}': ", optimizers.id(parameter.optimizer), strategy);
  };
  for (uint32_t i = 0; i < parameters.size(); ++i) check_description(plan.input.description(i), pair(parameters[i]));
  for (const plan::Piece& piece : plan.rank_plan.reduced_gradients) {
    const plan::Parameter& parameter = parameters[piece.param];
    const int64_t block = plan.input.cut_block(piece.param), end = piece.first + piece.count;
    if (piece.first % block == 0 && (end % block == 0 || end == parameter.count)) continue;
    const uint32_t granularity = plan.input.description(piece.param).granularity;
    const std::string parts = granularity == ZR_ROWWISE      ? "rows"
                              : granularity == ZR_TENSORWISE ? "tensors"
                                                             : fmt::format("blocks of {} elements", block);
    fail_user(
        fmt::format("{}the optimizer needs complete {}, but '{}' is split between ranks; choose a strategy that "
                    "assigns complete parameters to ranks",
                    pair(parameter), parts, parameter.name));
  }
}

void compare_ranks(StartedJob& job, model::Model& model) {
  const std::string own_setup = setup_text(job, model);
  const std::string rank_zero_setup = job.comm.broadcast_bytes(own_setup, 0, "set-up of rank 0");
  std::string difference;
  if (own_setup != rank_zero_setup) difference = first_difference(own_setup, rank_zero_setup, job.rank());
  difference.resize(400);
  for (const std::string& text : job.comm.all_gather_bytes(difference, "comparison of set-ups"))
    if (text[0])
      fail_user(fmt::format(
          "the ranks do not train the same job: {}; start all ranks with the same TOML file, model and plug-in files",
          text.substr(0, text.find('\0'))));
}

void fail_not_held(const std::string& strategy, const std::string& parameter) {
  fail_user(fmt::format(
      "strategy '{}' has no buffer to hold the gradient of '{}' across micro-steps, which gradients.reduce = "
      "\"last_micro_step\" requires; set gradients.reduce = \"each_micro_step\", or choose another strategy",
      strategy, parameter));
}

}  // namespace zr::host::job
