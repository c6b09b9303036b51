#include "cli/plan_command.hpp"

#include <algorithm>
#include <iostream>

#include "base/dtype.hpp"
#include "base/failure.hpp"
#include "base/text.hpp"
#include "engine/budget.hpp"
#include "engine/planning.hpp"

namespace zr::host {

namespace {

void check_budget(const Asked& asked, const JudgedJob& job, const Planner& planner, int ranks) {
  const Besides besides = planner.besides();
  const Plan plan = planner.plan(0);
  check_host_budget(job.config, plan, ranks, besides);
  const int64_t budget = job.config.integer("memory.device_budget"), most = planner.most_bytes();
  if (budget == 0 || most <= budget) return;
  const Need need = [&](const Edit& edit) -> std::optional<int64_t> {
    try {
      return Planner(asked.judged(edit.overrides, edit.ranks), asked.parameters(), edit.ranks, asked.ranks() == 0)
          .most_bytes();
    } catch (const Failure&) {
      return {};
    }
  };
  const Overdraft over{budget, most, 0};
  fail_user(over_plan_text(job.config, planner, most, text_of(edits_that_fit(job, ranks, over, need), over)));
}

// ---- --compare ----

struct Column {
  const char* name;
  int64_t (*bytes)(const Plan&, const std::map<Kind, int64_t>&);
};
int64_t of(const std::map<Kind, int64_t>& kinds, std::initializer_list<Kind> wanted) {
  int64_t bytes = 0;
  for (const Kind kind : wanted)
    if (const auto at = kinds.find(kind); at != kinds.end()) bytes += at->second;
  return bytes;
}
using Kinds = std::map<Kind, int64_t>;
constexpr Column kColumns[] = {
    {"weights", [](const Plan&, const Kinds& k) { return of(k, {Kind::weights}); }},
    {"gradients", [](const Plan&, const Kinds& k) { return of(k, {Kind::gradients}); }},
    {"master", [](const Plan&, const Kinds& k) { return of(k, {Kind::master}); }},
    {"slots", [](const Plan&, const Kinds& k) { return of(k, {Kind::slots}); }},
    {"= model states",
     [](const Plan&, const Kinds& k) {
       return of(k, {Kind::weights, Kind::gradients, Kind::master, Kind::slots});
     }},
    {"buckets", [](const Plan&, const Kinds& k) { return of(k, {Kind::buckets}); }},
    {"window", [](const Plan&, const Kinds& k) { return of(k, {Kind::window}); }},
    {"other", [](const Plan&, const Kinds& k) { return of(k, {Kind::other}); }},
    {"= in all", [](const Plan& plan, const Kinds&) { return plan.bytes(); }},
    {"wire a step", [](const Plan& plan, const Kinds&) { return plan.traffic().bytes(); }},
};

std::string right(const std::string& text, std::size_t width) {
  return std::string(width > text.size() ? width - text.size() : 0, ' ') + text;
}
std::string left(const std::string& text, std::size_t width) {
  return text + std::string(width > text.size() ? width - text.size() : 0, ' ');
}

void print_comparison(const Asked& asked, const std::vector<std::pair<std::string, Plan>>& plans, const JudgedJob& job,
                      const Besides& besides) {
  int64_t most = 0, elements = 0;
  std::size_t widest = 0;
  for (const auto& [id, plan] : plans) {
    most = std::max(most, plan.bytes());
    widest = std::max(widest, id.size());
  }
  for (const Parameter& p : asked.parameters()) elements += p.count;
  const bool large = most >= 1'000'000'000;
  const PlanInput& input = plans.front().second.input;
  std::cout << asked.model() << elements << " parameters, " << name_of(input.weight_dtype) << ", gradients summed in "
            << name_of(input.sum_dtype) << ", " << job.optimizer.table->id << ", " << input.world
            << (input.world == 1 ? " rank; " : " ranks; ") << (large ? "GB (10^9 bytes)" : "MB (10^6 bytes)")
            << " of rank 0\n  " << left("", widest);
  for (const Column& column : kColumns) std::cout << "  " << right(column.name, 9);
  std::cout << "\n";
  for (const auto& [id, plan] : plans) {
    const Kinds kinds = plan.bytes_by_kind();
    std::cout << "  " << left(id, widest);
    for (const Column& column : kColumns) {
      char number[40];
      std::snprintf(number, sizeof number, "%.1f",
                    static_cast<double>(column.bytes(plan, kinds)) / (large ? 1e9 : 1e6));
      std::cout << "  " << right(number, std::max<std::size_t>(9, std::string_view(column.name).size()));
    }
    std::cout << "\n";
  }
  std::cout << "  besides, on each rank: activations "
            << (besides.activations ? bytes_text(*besides.activations) + " (measured: " + besides.measured_by + ")"
                                    : "unknown until a run has measured them");
  if (besides.communicator)
    std::cout << "; the communicator " << bytes_text(*besides.communicator) << " of host memory";
  std::cout << "\n  wire a step: received, all ranks together; with gathers, at most\n";
}

}  // namespace

int print_plan(const AskedOptions& options, bool compare, const std::filesystem::path& bin) {
  Asked asked("zeroth plan", options);
  if (const int code = asked.gather(bin)) return code;
  const JudgedJob job = asked.judged({}, asked.ranks());
  const int ranks = asked.ranks() > 0 ? asked.ranks() : static_cast<int>(job.config.integer("job.ranks"));
  const Planner chosen(job, asked.parameters(), ranks, asked.ranks() == 0);
  if (!compare) {
    check_budget(asked, job, chosen, ranks);
    std::cout << asked.model() << chosen.plan(0).text(chosen.title(), chosen.besides());
    return 0;
  }
  std::vector<std::pair<std::string, Plan>> plans;
  for (const std::string& id : job.strategies)
    plans.emplace_back(
        id, Planner(asked.judged({"strategy=" + id}, asked.ranks()), asked.parameters(), ranks, asked.ranks() == 0)
                .plan(0));
  print_comparison(asked, plans, job, chosen.besides());
  check_budget(asked, job, chosen, ranks);
  return 0;
}

int explain_placement(const AskedOptions& options, const std::filesystem::path& bin) {
  Asked asked("zeroth explain", options);
  const Document document = asked.document({});
  bool placed = false;
  for (const char* path : kPlaced) placed |= std::get<std::string>(document.early(path).value) != kOnDevice;
  if (!placed) return 0;
  std::cout << "\n[offload] places, of rank 0\n";
  if (std::get<std::string>(document.early("job.program").value).empty()) {
    std::cout << "  unknown: job.program names no trainer that would tell its model; see zeroth plan\n";
    return 0;
  }
  if (!options.run) {
    std::cout << "  unknown: the program, which would report its model, was not run (--no-run)\n";
    return 0;
  }
  if (const int code = asked.gather(bin)) return code;
  const JudgedJob job = asked.judged({}, 0);
  const Planner planner(job, asked.parameters(), static_cast<int>(job.config.integer("job.ranks")), true);
  std::cout << planner.plan(0).placement_text();
  return 0;
}

}  // namespace zr::host
