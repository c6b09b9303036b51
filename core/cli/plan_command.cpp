#include "cli/plan_command.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <iostream>
#include <memory>
#include <numeric>

#include "base/dtype.hpp"
#include "base/error.hpp"
#include "base/log.hpp"
#include "base/text.hpp"
#include "cli/hosts.hpp"
#include "cli/job_file.hpp"
#include "cli/traffic_table.hpp"
#include "job/checkpoint_paths.hpp"
#include "job/offline_plan.hpp"

namespace zr::host::cli {

namespace {

void check_budget(const ModelQuery& query, const plugin::ResolvedJob& job, const job::OfflinePlan& offline, int ranks) {
  const plan::PlanContext context = offline.context();
  const plan::MemoryPlan plan = offline.plan(0);
  const job::HostSizes hosts = query.hosts(ranks);
  const job::MakeOfflinePlan with = [&](const job::Suggestion& change) {
    return std::make_unique<job::OfflinePlan>(query.resolved_job(change.overrides, change.ranks), query.parameters(),
                                              change.ranks, change.ranks == ranks ? hosts : job::HostSizes{});
  };
  const int ranks_per_node = hosts.empty() ? ranks : *std::max_element(hosts.begin(), hosts.end());
  job::check_host_budget(job.config, plan, ranks_per_node, context,
                         [&](int64_t bytes) { return host_suggestions_text(job, ranks, ranks_per_node, bytes, with); });
  const int64_t budget = job.config.memory().device_budget, max_bytes = offline.max_bytes();
  if (budget == 0 || max_bytes <= budget) return;
  fail_user(plan_over_budget_text(
      job.config, offline, max_bytes,
      suggestions_text(job, ranks, plan.on_device,
                       job::BudgetShortfall{budget, max_bytes, context.activations.value_or(0)}, with)));
}

// ---- --compare ----

struct Column {
  const char* name;
  std::vector<MemoryKind> kinds;                           // of which the column has the sum
  int64_t (*all)(const plan::MemoryPlan& plan) = nullptr;  // if it has no kinds
  int64_t bytes(const plan::MemoryPlan& plan, const std::map<MemoryKind, int64_t>& by_kind) const {
    if (all) return all(plan);
    int64_t bytes = 0;
    for (const MemoryKind kind : kinds)
      if (const auto at = by_kind.find(kind); at != by_kind.end()) bytes += at->second;
    return bytes;
  }
};

const Column kColumns[] = {
    {"weights", {MemoryKind::weights}},
    {"gradients", {MemoryKind::gradients}},
    {"master", {MemoryKind::master}},
    {"optimizer", {MemoryKind::optimizer}},
    {"= model states", {MemoryKind::weights, MemoryKind::gradients, MemoryKind::master, MemoryKind::optimizer}},
    {"buckets", {MemoryKind::buckets}},
    {"all-gather", {MemoryKind::all_gather}},
    {"other", {MemoryKind::other}},
    {"= total", {}, [](const plan::MemoryPlan& plan) { return plan.bytes(); }},
    {"communication", {}, [](const plan::MemoryPlan& plan) { return plan.communicated_bytes(); }},
};

// Where the training state is; once, if it is the same under all strategies.
std::string locations_text(const std::vector<std::pair<std::string, plan::MemoryPlan>>& plans) {
  const std::string& first = plans.front().second.state_location;
  if (first.empty()) return "";
  const bool alike =
      std::all_of(plans.begin(), plans.end(), [&](const auto& plan) { return plan.second.state_location == first; });
  std::string text;
  for (const auto& [id, plan] : plans) {
    if (alike && !text.empty()) break;
    text += fmt::format("  {}{}\n", alike ? "" : id + ": ", plan.state_location);
  }
  return text;
}

void print_comparison(const ModelQuery& query, const std::vector<std::pair<std::string, plan::MemoryPlan>>& plans,
                      const plugin::ResolvedJob& job, const plan::PlanContext& context) {
  int64_t max_bytes = 0, elements = 0;
  std::size_t widest = 0;
  for (const auto& [id, plan] : plans) {
    max_bytes = std::max(max_bytes, plan.bytes());
    widest = std::max(widest, id.size());
  }
  for (const plan::Parameter& p : query.parameters()) elements += p.count;
  const bool large = max_bytes >= 1'000'000'000;
  const plan::PlanInput& input = plans.front().second.input;
  std::cout << query.model() << elements << " parameters, " << name_of(input.weight_dtype) << ", gradients reduced in "
            << name_of(input.reduced_grad_dtype) << ", " << job.optimizer.table->id << ", " << input.world
            << (input.world == 1 ? " rank; " : " ranks; ") << (large ? "GB (10^9 bytes)" : "MB (10^6 bytes)")
            << " on rank 0\n  " << std::string(widest, ' ');
  for (const Column& column : kColumns) std::cout << fmt::format("  {:>9}", column.name);
  std::cout << "\n";
  for (const auto& [id, plan] : plans) {
    const std::map<MemoryKind, int64_t> kinds = plan.bytes_by_kind();
    std::cout << fmt::format("  {:<{}}", id, widest);
    for (const Column& column : kColumns) {
      const double number = static_cast<double>(column.bytes(plan, kinds)) / (large ? 1e9 : 1e6);
      std::cout << fmt::format("  {:>{}.1f}", number, std::max<std::size_t>(9, std::string_view(column.name).size()));
    }
    std::cout << "\n";
  }
  std::cout << "  plus, per rank: activations "
            << (context.activations
                    ? fmt::format("{} (measured: {})", bytes_text(*context.activations), context.measured_by)
                    : "(unknown until measured by a run)");
  if (context.communicator)
    std::cout << "; " << bytes_text(*context.communicator) << " of host memory for the communicator";
  std::cout << "\n  communication: received per step by all ranks together; all-gathers: " << plan::kGatherBound << "\n"
            << locations_text(plans);
  if (!context.communicator_choice.empty()) std::cout << "  " << context.communicator_choice << "\n";
}

// Takes the number of ranks from the hosts.
void add_hosts(ModelQueryOptions& query, const std::string& text) {
  query.hosts = parse_host_sizes("plan", text);
  const int ranks = std::accumulate(query.hosts.begin(), query.hosts.end(), 0);
  if (query.ranks != 0 && query.ranks != ranks)
    fail_user(fmt::format("zeroth plan: --hosts {} has {} ranks, but --ranks is {}; remove --ranks", printable(text),
                          ranks, query.ranks));
  query.ranks = ranks;
}
}  // namespace

int print_plan(ModelQueryOptions query_options, const PlanOptions& options, const std::filesystem::path& bin) {
  if (options.link && !options.hosts) fail_user("zeroth plan: --link is the speed between hosts; add --hosts");
  if (options.hosts) add_hosts(query_options, *options.hosts);
  std::optional<double> link;
  if (options.link) link = bits_per_second("plan", *options.link);
  ModelQuery query("zeroth plan", query_options);
  if (const int code = query.resolve(bin)) return code;
  const plugin::ResolvedJob job = query.resolved_job({}, query.ranks());
  for (const std::string& warning : job.config.warnings()) log(ZR_LOG_WARN, warning);
  if (query.runs_here()) job::check_checkpoint_paths(job.config.checkpoint());
  const int ranks = query.ranks() > 0 ? query.ranks() : job.config.job().ranks;
  const job::HostSizes hosts = query.hosts(ranks);
  const job::OfflinePlan chosen(job, query.parameters(), ranks, hosts);
  if (!options.compare) {
    check_budget(query, job, chosen, ranks);
    std::cout << query.model() << chosen.plan(0).text(chosen.title(), chosen.context());
    if (options.hosts) std::cout << traffic_table(query, hosts, link, {job.strategy.table->id});
    std::cout << unchecked_text(job.unchecked);
    return 0;
  }
  std::vector<std::pair<std::string, plan::MemoryPlan>> plans;
  std::vector<std::string> impossible;  // strategies that cannot train this job, and why
  for (const std::string& id : job.strategies) try {
      plans.emplace_back(
          id, job::OfflinePlan(query.resolved_job({"strategy=" + id}, query.ranks()), query.parameters(), ranks, hosts)
                  .plan(0));
    } catch (const UserError& failure) {
      impossible.push_back(fmt::format("  {}: {}\n", id, failure.what()));
      if (impossible.size() == job.strategies.size()) throw;
    }
  print_comparison(query, plans, job, chosen.context());
  for (const std::string& line : impossible) std::cout << line;
  std::vector<std::string> possible;
  for (const auto& [id, plan] : plans) possible.push_back(id);
  if (options.hosts) std::cout << traffic_table(query, hosts, link, possible);
  std::cout << unchecked_text(job.unchecked);
  check_budget(query, job, chosen, ranks);
  return 0;
}

int explain_placement(const ModelQueryOptions& options, const std::filesystem::path& bin) {
  ModelQuery query("zeroth explain", options);
  const config::Document document = query.document({});
  bool placed = false;
  for (const config::Setting<config::TierChoice>& choice : document.tier_choices()) placed |= !choice->on_device();
  if (!placed) return 0;
  std::cout << "\n[offload] tiers of the state of rank 0\n";
  if (document.program()->empty()) {
    std::cout << "  unknown: job.program is not set, so the model is unknown; use zeroth plan with --safetensors or "
                 "--params\n";
    return 0;
  }
  if (!options.run) {
    std::cout << "  unknown: the program, which reports the model, was not started (--no-run)\n";
    return 0;
  }
  if (const int code = query.resolve(bin)) return code;
  const plugin::ResolvedJob job = query.resolved_job({}, 0);
  const int ranks = job.config.job().ranks;
  const job::OfflinePlan offline(job, query.parameters(), ranks, {ranks});
  std::cout << offline.plan(0).placement_text();
  return 0;
}

}  // namespace zr::host::cli
