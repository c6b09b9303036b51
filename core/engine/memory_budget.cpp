#include "engine/memory_budget.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "base/error.hpp"
#include "base/text.hpp"
#include "engine/planner.hpp"

namespace zr::host::engine {

namespace {
std::vector<Suggestion> suggestions(const Setup& setup, const std::vector<plan::Parameter>& parameters,
                                    const BudgetShortfall& shortfall) {
  const RequiredBytes required_bytes = [&](const Suggestion& suggestion) -> std::optional<int64_t> {
    try {
      return Planner(setup.revalidate(suggestion.overrides, suggestion.ranks), parameters, suggestion.ranks)
          .max_bytes();
    } catch (const Error&) {
      return {};  // the changed job is invalid
    }
  };
  return fitting_suggestions(setup, setup.control->world(), shortfall, required_bytes);
}
}  // namespace

void check_budget(const Setup& setup, const plan::MemoryPlan& plan, const std::vector<plan::Parameter>& parameters,
                  const plugin::Instance* communicator) {
  const int world = setup.control->world();
  check_host_budget(setup.config, plan, setup.control->local_world(), plan_context_of(setup, communicator, world));
  const int64_t budget = setup.config.memory().device_budget_bytes;
  if (budget == 0 || plan.max_bytes <= budget) return;
  const Planner planner(setup, parameters, world);
  const BudgetShortfall shortfall{budget, plan.max_bytes, 0};
  fail_user(plan_over_budget_text(setup.config, planner, plan.max_bytes,
                                  text_of(suggestions(setup, parameters, shortfall), shortfall)));
}

MemoryBudget::MemoryBudget(const StepContext& context, const plugin::Instance* communicator,
                           const TrainingProgress& progress)
    : context_(context), progress_(progress), watch_{context.ledger, context.model} {
  if (const int64_t budget = context.config().memory().host_budget_bytes; budget > 0) watch_host(budget, communicator);
  if (const int64_t budget = context.config().memory().device_budget_bytes; budget > 0) watch_device(budget);
}

MemoryBudget::Watch::~Watch() {
  ledger.on_change(Tier::device, {});
  ledger.on_change(Tier::host, {});
  model.limit_temporaries(0, {});
}

void MemoryBudget::watch_host(int64_t budget, const plugin::Instance* communicator) {
  // This rank's share: its own planned bytes, and an equal part of the budget that no rank has planned.
  const plan::MemoryPlan& plan = context_.plan;
  const bool snapshot = snapshots(context_.config());
  const int ranks_per_node = context_.setup.control->local_world();
  const auto communicator_bytes_per_rank = communicator_bytes(communicator, context_.world());
  const int64_t planned = host_bytes(plan, ranks_per_node, communicator_bytes_per_rank, snapshot);
  const int64_t own = plan.bytes(Tier::host) + communicator_bytes_per_rank.value_or(0) + plan.device_staging.bytes() +
                      plan.save_staging + (snapshot ? plan.snapshot_bytes() : 0);
  const int64_t share = own + std::max<int64_t>(budget - planned, 0) / ranks_per_node;
  context_.ledger.on_change(Tier::host, [this, share, budget](int64_t held) {
    if (held <= host_held_.exchange(held) || held <= share) return;  // freeing memory never fails
    fail_user(
        fmt::format("memory.host_budget is {} ({}): rank {} holds {} of host memory, but its share is {}; raise "
                    "memory.host_budget, keep more on the device, or use a disk tier",
                    bytes_text(budget), context_.config().memory().host_budget_bytes.origin.text(), context_.rank(),
                    bytes_text(held), bytes_text(share)));
  });
}

void MemoryBudget::watch_device(int64_t budget) {
  // Memory that the ledger holds is no longer available to libtorch.
  const auto changed = [this, budget](int64_t held) {
    context_.model.limit_temporaries(budget - held, [this](int64_t requested) { over_budget(requested); });
    const bool grew = held > device_held_.exchange(held);
    if (grew && held + context_.model.temporaries().held > budget) over_budget(0);
  };
  context_.ledger.on_change(Tier::device, changed);
  changed(context_.ledger.held(Tier::device));
}

void MemoryBudget::over_budget(int64_t requested) const {
  const config::Setting<int64_t>& budget = context_.config().memory().device_budget_bytes;
  const model::Model::Temporaries temporaries = context_.model.temporaries();
  const int64_t ledger = context_.ledger.held(Tier::device);
  const int64_t step = progress_.step();
  std::string text = fmt::format("memory.device_budget is {} ({}): rank {} holds {}", bytes_text(budget),
                                 budget.origin.text(), context_.rank(), bytes_text(ledger + temporaries.held));
  text += requested > 0 ? fmt::format(", and libtorch requests {} more", bytes_text(requested)) : "";
  text += step > 0 ? fmt::format(", in step {}\n", step + 1) : ", in the first step\n";
  const auto row = [&](std::string_view kind, const std::string& planned, int64_t held) {
    text += fmt::format("  {:<12} planned {:>12}, held {:>12}\n", kind, planned, bytes_text(held));
  };
  for (const Ledger::Row& ledger_row : context_.ledger.rows())
    if (ledger_row.tier == Tier::device && ledger_row.kind != MemoryKind::activations)
      row(kMemoryKindNames[static_cast<std::size_t>(ledger_row.kind)], bytes_text(ledger_row.planned), ledger_row.now);
  row("activations", "unknown", temporaries.held);
  text += "  largest: ";
  std::size_t shown = 0;
  for (const auto& [tag, bytes] : context_.ledger.holders()) {
    if (shown++ == 4) break;
    text += fmt::format("{}{} {}", shown > 1 ? ", " : "", tag, bytes_text(bytes));
  }
  // After the first step the peak of activations is known. Before, the estimate is twice the bytes held so far, because
  // backward has not run yet.
  const int64_t activations =
      step > 0 ? std::max(temporaries.peak, temporaries.held + requested) : 2 * (temporaries.held + requested);
  const BudgetShortfall shortfall{budget, context_.plan.max_bytes, activations};
  text += "\n" + text_of(suggestions(context_.setup, context_.model.parameters(), shortfall), shortfall);
  if (step == 0) text += "\n  (activations count twice, because the first step had not ended)";
  fail_user(text);
}

}  // namespace zr::host::engine
