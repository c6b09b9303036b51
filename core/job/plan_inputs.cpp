#include "job/plan_inputs.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "base/error.hpp"
#include "base/text.hpp"
#include "comm/comm_runtime.hpp"
#include "job/early_update_conditions.hpp"
#include "job/machine_profile.hpp"
#include "job/measured_activations.hpp"
#include "job/optimizer_description.hpp"
#include "offload/tier.hpp"
#include "plugin/extension.hpp"

namespace zr::host::job {

std::string table_of(const plugin::Component& component) {
  return fmt::format("{}.{}", role_of(component), component.table->id);
}

namespace {
[[noreturn]] void fail_unmatched(const config::GroupConfig& group, const std::string& pattern,
                                 const std::vector<plan::Parameter>& parameters) {
  std::vector<std::string> names;
  for (const plan::Parameter& parameter : parameters) {
    names.push_back(parameter.name);
    for (const std::string& alias : parameter.aliases)
      if (matches_glob(alias, pattern))
        fail_user(fmt::format(
            "{}: optimizer group pattern '{}' matches only a second name of a tied parameter, '{}'; write its first "
            "name, '{}'",
            group.origin.text(), pattern, alias, parameter.name));
  }
  const std::string near = nearest(pattern, names);
  fail_user(
      fmt::format("{}: optimizer group pattern '{}' matches no parameter{}; `*` matches any sequence of characters",
                  group.origin.text(), pattern, near.empty() ? "" : fmt::format("; the nearest is '{}'", near)));
}

// Assigns each parameter to the first group with a matching pattern. A pattern that matches no parameter is an error.
void match_groups(const std::vector<config::GroupConfig>& groups, std::vector<plan::Parameter>& parameters) {
  std::vector<std::vector<char>> used;
  for (const config::GroupConfig& group : groups) used.emplace_back(group.match.size(), 0);
  for (plan::Parameter& parameter : parameters)
    for (std::size_t g = 0; g < groups.size(); ++g)
      for (std::size_t i = 0; i < groups[g].match.size(); ++i)
        if (matches_glob(parameter.name, groups[g].match[i])) {
          used[g][i] = 1;
          if (parameter.group == 0) parameter.group = static_cast<uint32_t>(g + 1);
        }
  for (std::size_t g = 0; g < groups.size(); ++g)
    for (std::size_t i = 0; i < groups[g].match.size(); ++i)
      if (!used[g][i]) fail_unmatched(groups[g], groups[g].match[i], parameters);
}
// Marks the parameters that keep fp32. A pattern that matches no parameter is an error.
void keep_fp32(const config::Setting<std::vector<std::string>>& patterns, std::vector<plan::Parameter>& parameters,
               zr_dtype dtype) {
  for (const std::string& pattern : patterns.value) {
    bool used = false;
    for (plan::Parameter& parameter : parameters) {
      const auto matches = [&](const std::string& name) { return matches_glob(name, pattern); };
      if (!matches(parameter.name) && std::ranges::none_of(parameter.aliases, matches)) continue;
      used = true;
      parameter.keeps_fp32 = dtype != ZR_F32;
    }
    if (used) continue;
    std::vector<std::string> names;
    for (const plan::Parameter& parameter : parameters) names.push_back(parameter.name);
    const std::string near = nearest(pattern, names);
    fail_user(fmt::format("{}: {}: '{}' matches no parameter{}; `*` matches any sequence of characters",
                          patterns.origin.text(), patterns.key, printable(pattern),
                          near.empty() ? "" : fmt::format("; the nearest is '{}'", near)));
  }
  if (!patterns->empty() && std::ranges::all_of(parameters, [](const plan::Parameter& p) { return p.keeps_fp32; }))
    fail_user(fmt::format("{}: {} keeps all parameters of the model in fp32; set train.dtype = \"fp32\"",
                          patterns.origin.text(), patterns.key));
}
}  // namespace

std::vector<std::string> group_warnings(const std::vector<config::GroupConfig>& groups,
                                        const std::vector<plan::Parameter>& parameters) {
  const auto name_of_group = [&](std::size_t g) {
    return fmt::format("match = {}", config::toml_text(groups[g].match));
  };
  std::vector<std::string> warnings;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const auto belongs = [&](const plan::Parameter& p) { return p.group == g + 1; };
    if (std::any_of(parameters.begin(), parameters.end(), belongs)) continue;
    const auto matches = [&](const plan::Parameter& p) {
      return std::any_of(groups[g].match.begin(), groups[g].match.end(),
                         [&](const std::string& pattern) { return matches_glob(p.name, pattern); });
    };
    const auto first = std::find_if(parameters.begin(), parameters.end(), matches);
    if (first == parameters.end()) continue;  // plan_input() rejects such a group
    const std::size_t winner = first->group - 1;
    warnings.push_back(fmt::format(
        "{}: the group with {} in [[optimizer.groups]] has no effect: earlier groups match all of its parameters, for "
        "example the group with {} ({}) matches '{}'; the first matching group wins, so write special groups first",
        groups[g].origin.text(), name_of_group(g), name_of_group(winner), groups[winner].origin.text(), first->name));
  }
  return warnings;
}

std::vector<int> ranks_of_hosts(const control::Control& control) {
  const std::vector<int> hosts = control.hosts();
  if (!std::ranges::is_sorted(hosts)) return std::vector<int>(hosts.size(), 1);
  std::vector<int> ranks(static_cast<std::size_t>(hosts.back()) + 1);
  for (const int host : hosts) ++ranks[static_cast<std::size_t>(host)];
  return ranks;
}

namespace {
std::string sharing_obstacle(const plan::PlanInput& input, const config::JobConfig& config,
                             const plugin::Instance* communicator, bool ordered) {
  if (input.world == 1 || !communicator) return "the job has one rank";
  if (!config.communicator().share_weights) return "communicator.share_weights is false";
  if (config.job().device.value != config::kCpuDevice)
    return fmt::format("job.device is \"{}\"", printable(config.job().device.value));
  if (config.memory().device_budget > 0) return "memory.device_budget is set";
  if (!config.offload().parameters->on_device()) return "offload.parameters selects a tier";
  if (input.several_hosts() && input.rounds_weights) return "communicator.weights rounds the weights that are gathered";
  if (input.several_hosts() && input.exchange_plan)
    return fmt::format("optimizer '{}' uses gradients that are not reduced over ranks", input.optimizer_ids[0]);
  if (!ordered) return "the ranks are not numbered host by host (mpirun --map-by slot, srun --distribution=block)";
  return comm::sharing_obstacle(*communicator, input.several_hosts() ? input.hosts : std::vector<int>{input.world});
}

// Whether the ranks of a host have one copy of the masters and states with which steps with local gradients update all
// weights. communicator.share_weights decides about the weights only.
bool shares_states(const plan::PlanInput& input, const config::JobConfig& config, const plugin::Instance* communicator,
                   bool ordered) {
  return input.exchange_plan && input.world > 1 && communicator && ordered && config.memory().device_budget == 0 &&
         comm::sharing_obstacle(*communicator, input.several_hosts() ? input.hosts : std::vector<int>{input.world})
             .empty();
}
}  // namespace

void choose_sharing(plan::PlanInput& input, const config::JobConfig& config, const plugin::Instance* communicator,
                    bool ordered) {
  input.sharing_obstacle = sharing_obstacle(input, config, communicator, ordered);
  input.share_weights = input.sharing_obstacle.empty();
  input.share_states = shares_states(input, config, communicator, ordered);
}

bool snapshots(const config::JobConfig& config) {
  return config.checkpoint().async && !config.checkpoint().dir->empty();
}

namespace {
// The optimizer outlives the result.
plan::ExchangePlan exchange_plan(const plan::PlanInput& input, const Optimizers& optimizers) {
  const LocalOptimizer local = local_optimizer_of(input, optimizers);
  if (!local.api) return {};
  return [local](const std::vector<int64_t>& counts, const std::vector<int64_t>& served, int world) {
    zr_exchange_plan sizes{sizeof(zr_exchange_plan),
                           world,
                           counts.data(),
                           served.data(),
                           static_cast<uint32_t>(counts.size()),
                           static_cast<uint32_t>(served.size()),
                           0,
                           0};
    local.instance->call("plan",
                         [&](zr_error* error) { return local.api->plan(local.instance->self(), &sizes, error); });
    return plan::ExchangeSizes{static_cast<int64_t>(sizes.scratch), static_cast<int64_t>(sizes.received)};
  };
}
}  // namespace

plan::PlanInput plan_input(const config::JobConfig& config, const Optimizers& optimizers,
                           std::vector<plan::Parameter> parameters, int world) {
  match_groups(config.groups(), parameters);
  keep_fp32(config.train().keep_fp32, parameters, config.train().dtype);
  optimizers.assign(parameters);
  OptimizerDescriptions described = describe_parameters(optimizers, parameters);
  const config::Precision& types = config.precision();
  plan::PlanInput input;
  input.parameters = std::move(parameters);
  input.world = world;
  input.weight_dtype = types.weights;
  input.communicated_grad_dtype = types.gradients;
  input.fp32_grad_dtype = types.fp32_gradients;
  input.reduced_grad_dtype = types.reduced_gradients;
  input.accumulation = config.train().gradient_accumulation;
  input.accumulates_locally = config.gradients().reduce == config::GradientReduction::last_micro_step;
  input.descriptions = std::move(described.descriptions);
  input.description_of = std::move(described.description_of);
  input.exchange_plan = exchange_plan(input, optimizers);
  input.optimizer_ids.clear();
  for (std::size_t i = 0; i < optimizers.size(); ++i) input.optimizer_ids.push_back(optimizers.id(i));
  return input;
}

void add_tiers(plan::PlanInput& input, const plugin::ResolvedJob& job,
               const std::vector<std::shared_ptr<const plugin::Instance>>& tiers, int ranks_per_node,
               int64_t other_bytes) {
  const config::JobConfig& config = job.config;
  for (const auto& tier : tiers) input.tiers.push_back(offload::tier_info_of(*tier));
  const auto index = [&](const config::TierChoice& choice) {
    if (choice.on_device()) return 0;
    if (choice.automatic()) return plan::kAnyTier;
    const std::string& id = choice.text;
    for (std::size_t i = 0; i < tiers.size(); ++i)
      if (id == job.tiers[i].table->id || id == job.tiers[i].file) return static_cast<int>(i) + 1;
    fail_internal(fmt::format("the tier '{}' was not loaded", id));
  };
  plan::TierRequest& request = input.tier_request;
  const config::OffloadConfig& offload = config.offload();
  request.states = index(offload.optimizer);
  request.reduced_gradients = index(offload.gradients);
  request.shards = index(offload.parameters);
  request.activations = index(offload.activations);
  request.device_fraction = offload.device_fraction;
  const plan::PlanContext known = measured_activations(config, job.engine);
  request.activations_known = known.activations.has_value();
  request.activations_on_device = known.activations.value_or(0);
  request.activations_offloaded = known.offloaded_activations;
  request.device_capacity = config.memory().device_budget;
  if (const int64_t budget = config.memory().host_budget; budget > 0)
    request.host_capacity = std::max<int64_t>(budget / ranks_per_node - other_bytes, 1);
  request.snapshot = snapshots(config);
  const bool on_cpu = config.job().device.value == config::kCpuDevice;
  request.copies_gradients = !on_cpu && offload.overlap && request.reduced_gradients == 0 && request.shards == 0;
}

namespace {
// Why a plan has no sharded parameters, and a remedy; the text follows "strategy '<id>' ".
std::string why_unsharded(const config::JobConfig& config, const plan::MemoryPlan& plan, const std::string& strategy) {
  int64_t largest = 0;
  for (const plan::Parameter& parameter : plan.input.parameters) largest = std::max(largest, parameter.count);
  for (const config::Entry* entry : config.table("strategy." + strategy)) {
    const int64_t* threshold = std::get_if<int64_t>(&entry->value);
    if (entry->key.name != "persistence_threshold" || !threshold || *threshold <= 0) continue;
    return fmt::format(
        "keeps all parameters of this model unsharded on the device: the largest has {} elements, and parameters of at "
        "most {} = {} elements are not sharded; lower that key, or set offload.parameters = \"{}\"",
        largest, entry->key.path(), *threshold, config::kOnDevice);
  }
  return "keeps full parameters on the device, so they cannot be offloaded; choose a strategy that shards parameters";
}
}  // namespace

void check_offload(const config::JobConfig& config, const plan::MemoryPlan& plan, const std::string& strategy) {
  const config::OffloadConfig& offload = config.offload();
  const auto text_of = [](const config::Setting<config::TierChoice>& choice) {
    return fmt::format("{} = \"{}\" ({}): ", choice.key, choice->text, choice.origin.text());
  };
  bool shards = std::any_of(plan.rank_plan.buffers.begin(), plan.rank_plan.buffers.end(),
                            [](const plan::Buffer& b) { return b.role == ZR_ROLE_WEIGHT_SHARD && b.elements > 0; });
  std::vector<int64_t> unsharded(plan.input.parameters.size(), 0);  // per parameter; a rank's part may be empty
  for (const plan::Piece& piece : plan.rank_plan.weights)
    if (!piece.shard) unsharded[piece.param] = std::max(unsharded[piece.param], piece.count);
  for (std::size_t i = 0; i < unsharded.size(); ++i) shards |= unsharded[i] < plan.input.parameters[i].count;
  if (offload.parameters->names_tier() && !shards)
    fail_user(fmt::format("{}strategy '{}' {}", text_of(offload.parameters), strategy,
                          why_unsharded(config, plan, strategy)));
  if (offload.device_fraction > 0 && !offload.optimizer->names_tier())
    fail_user(fmt::format(
        "{}: offload.device_fraction is the fraction of the optimizer states that stays on the device, but {}",
        offload.device_fraction.origin.text(),
        offload.optimizer->on_device()
            ? "offload.optimizer = \"device\" keeps all of them there; set offload.optimizer to a tier"
            : "offload.optimizer = \"auto\" computes it from memory.device_budget; set "
              "offload.optimizer to a tier, or remove offload.device_fraction"));
  // Only buffers that nothing but collectives accesses can be on a disk tier.
  const auto on_disk = [&](int tier) { return !plan.input.tiers[static_cast<std::size_t>(tier)].in_memory(); };
  const auto role_of = [&](const plan::Piece& piece) { return plan.rank_plan.buffers[piece.buffer].role; };
  const bool reduces_last = config.gradients().reduce == config::GradientReduction::last_micro_step;
  if (on_disk(plan.placement.reduced_gradients) && !offload.gradients->automatic())
    for (const plan::Piece& piece : plan.rank_plan.reduced_gradients)
      if (role_of(piece) != ZR_ROLE_REDUCED_GRAD)
        fail_user(fmt::format(
            "{}strategy '{}' accumulates gradients in place in the buffer '{}', which cannot be on a disk tier; choose "
            "a strategy with a separate buffer for reduced gradients, {}or a tier in memory",
            text_of(offload.gradients), strategy, plan.rank_plan.buffers[piece.buffer].tag,
            reduces_last ? "gradients.reduce = \"each_micro_step\", " : ""));
  if (on_disk(plan.placement.shards))
    for (const plan::Piece& piece : plan.rank_plan.weights)
      if (role_of(piece) == ZR_ROLE_WEIGHT_SHARD && !piece.shard)
        fail_user(
            fmt::format("{}strategy '{}' keeps '{}' unsharded, and operators access it in place, so it cannot be on a "
                        "disk tier; train on more ranks, or choose a tier in memory",
                        text_of(offload.parameters), strategy, plan.input.parameters[piece.param].name));
}

int64_t host_bytes(const plan::MemoryPlan& plan, int ranks_per_node, std::optional<int64_t> communicator,
                   bool snapshot) {
  const int64_t bytes_per_rank = communicator.value_or(0) + plan.device_staging.bytes() + plan.save_staging +
                                 (snapshot ? plan.snapshot_bytes() : 0);
  return plan.max_host_bytes / plan.input.world * ranks_per_node + bytes_per_rank * ranks_per_node;
}

void check_host_budget(const config::JobConfig& config, const plan::MemoryPlan& plan, int ranks_per_node,
                       const plan::PlanContext& context, const std::function<std::string(int64_t)>& suggest) {
  const config::Setting<int64_t>& budget = config.memory().host_budget;
  const int64_t bytes = host_bytes(plan, ranks_per_node, context.communicator, context.snapshot);
  if (budget == 0 || bytes <= budget) return;
  // The largest use of host memory determines the suggested change.
  std::map<MemoryKind, int64_t> kinds = plan.bytes_by_kind(Tier::host);
  const std::pair<int64_t, const char*> holders[] = {
      {context.communicator.value_or(0),
       "start fewer ranks on this node, because the communicator of each rank takes memory"},
      {context.snapshot ? plan.snapshot_bytes() : 0, "set checkpoint.async = false, which needs no copy"},
      {kinds[MemoryKind::master] + kinds[MemoryKind::optimizer],
       "keep more of offload.optimizer on the device, or set it to a disk tier"},
      {kinds[MemoryKind::gradients], "set offload.gradients to \"device\" or to a disk tier"},
      {kinds[MemoryKind::weights], "set offload.parameters to \"device\" or to a disk tier"},
      {plan.device_staging.bytes(), plan.device_staging.bytes() > plan_device_staging(plan, false).bytes()
                                        ? "set offload.overlap = false, which copies gradients after backward"
                                        : "keep more of offload.optimizer on the device"},
      {kinds[MemoryKind::staging] + kinds[MemoryKind::other],
       "use smaller or fewer blocks on the disk tier, or keep gradients and parameters in memory"}};
  const auto largest_use = std::max_element(std::begin(holders), std::end(holders),
                                            [](const auto& a, const auto& b) { return a.first < b.first; });
  fail_user(fmt::format(
      "memory.host_budget is {} ({}), but the plan takes {} of host memory for all ranks of a node together\n{}raise "
      "memory.host_budget, or {}{}",
      bytes_text_beside(budget, bytes), budget.origin.text(), bytes_text_beside(bytes, budget),
      plan.text("plan", context), largest_use->second, suggest ? suggest(bytes) : ""));
}

namespace {
zr_strategy_desc describe_strategy(const plugin::Instance& strategy) {
  zr_strategy_desc desc{};
  desc.size = sizeof desc;
  const auto* api = strategy.api<zr_strategy_api>();
  strategy.call("describe", [&](zr_error* error) { return api->describe(strategy.self(), &desc, error); });
  return desc;
}
}  // namespace

uint64_t stream_types_of(const plugin::Instance& strategy) {
  const zr_strategy_desc desc = describe_strategy(strategy);
  return desc.flags & ZR_STRATEGY_STREAMS ? desc.device_types : 0;
}

bool accepts_local_gradients(const plugin::Instance& strategy) {
  return (describe_strategy(strategy).flags & ZR_STRATEGY_LOCAL_GRADS) != 0;
}

plan::StrategyPlan strategy_plan(const plugin::Instance& strategy) {
  const zr_strategy_desc desc = describe_strategy(strategy);
  constexpr uint64_t kCpuMemory = uint64_t{1} << ZR_DEVICE_CPU;
  if (!(desc.device_types & kCpuMemory))
    fail_environment(
        fmt::format("{}: device_types is {:#x}, without CPU memory ({:#x}), which every strategy must accept; choose "
                    "another strategy",
                    strategy.call_text("describe"), desc.device_types, kCpuMemory));
  return [&strategy](const zr_plan_in& in, const zr_plan_sink& sink) {
    const auto* api = strategy.api<zr_strategy_api>();
    strategy.call("plan", [&](zr_error* error) { return api->plan(strategy.self(), &in, &sink, error); });
  };
}

void describe_part(const plugin::Instance& strategy, const plan::MemoryPlan& plan, uint32_t part) {
  const plan::PlanInputView view(plan.input, plan.rank, part);
  const zr_plan_sink ignored{sizeof(zr_plan_sink), 0, nullptr, [](void*, const zr_buffer*) {},
                             [](void*, const zr_piece*) {}};
  strategy_plan(strategy)(view.in(), ignored);
}

std::optional<int64_t> communicator_bytes(const plugin::Instance* communicator, int world) {
  int64_t plugin = 0;
  if (communicator) {
    const auto* plan = plugin::extension_of<zr_communicator_plan>(communicator->component(), "zr.communicator.plan/1",
                                                                  ZR_SIZE_0_9(zr_communicator_plan),
                                                                  {offsetof(zr_communicator_plan, open_bytes)});
    if (!plan) return {};
    communicator->call("open_bytes", [&](zr_error*) {
      plugin = static_cast<int64_t>(plan->open_bytes(communicator->self(), world));
      return zr_code{ZR_OK};
    });
  }
  return plugin + comm::CommRuntime::staging_bytes(world);
}

std::string update_time(const config::JobConfig& config, const plan::MemoryPlan& plan) {
  if (!plan.has_offloaded_states()) return "";
  const std::string obstacle = early_update_obstacle(config, plan);
  return obstacle.empty() ? "during backward" : fmt::format("after backward: {}", obstacle);
}

EngineHost::EngineHost(Ledger& ledger, ThreadPool& pool) : PluginHost(ledger, pool) {
  comm::offer_async(*this);
  offer_machine_profile(*this);
}

plan::PlanContext plan_context_of(const plugin::ResolvedJob& job, const plugin::Instance* communicator, int world) {
  plan::PlanContext context = measured_activations(job.config, job.engine);
  context.communicator = communicator_bytes(communicator, world);
  context.communicator_choice = job.communicator_choice;
  context.snapshot = snapshots(job.config);
  return context;
}

std::string plan_title(const plugin::ResolvedJob& job, const Optimizers& optimizers) {
  return fmt::format("plan: {} + {}", job.strategy.table->id, optimizers.ids());
}

}  // namespace zr::host::job
