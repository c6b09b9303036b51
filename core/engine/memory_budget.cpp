#include "engine/memory_budget.hpp"

#include <algorithm>
#include <cstdio>

#include "base/error.hpp"
#include "base/text.hpp"
#include "engine/planning.hpp"

namespace zr::host::engine {

namespace {
std::vector<Suggestion> suggestions(const Setup& setup, const std::vector<plan::Parameter>& parameters,
                                    const BudgetShortfall& over) {
  const RequiredBytes need = [&](const Suggestion& suggestion) -> std::optional<int64_t> {
    try {
      return Planner(setup.revalidate(suggestion.overrides, suggestion.ranks), parameters, suggestion.ranks)
          .max_bytes();
    } catch (const Error&) {
      return {};  // the changed job is invalid
    }
  };
  return fitting_suggestions(setup, setup.control->world(), over, need);
}
}  // namespace

void check_budget(const Setup& setup, const plan::MemoryPlan& plan, const std::vector<plan::Parameter>& parameters,
                  const plugin::Instance* communicator) {
  const int world = setup.control->world();
  check_host_budget(setup.config, plan, setup.control->local_world(), plan_context_of(setup, communicator, world));
  const int64_t budget = setup.config.memory().device_budget_bytes;
  if (budget == 0 || plan.max_bytes <= budget) return;
  const Planner planner(setup, parameters, world);
  const BudgetShortfall over{budget, plan.max_bytes, 0};
  fail_user(plan_over_budget_text(setup.config, planner, plan.max_bytes,
                                  text_of(suggestions(setup, parameters, over), over)));
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
  const int local = context_.setup.control->local_world();
  const auto of_communicator = communicator_bytes(communicator, context_.world());
  const int64_t all = host_bytes(plan, local, of_communicator, snapshot);
  const int64_t mine = plan.bytes(Tier::host) + of_communicator.value_or(0) + (snapshot ? plan.snapshot_bytes() : 0);
  const int64_t share = mine + std::max<int64_t>(budget - all, 0) / local;
  context_.ledger.on_change(Tier::host, [this, share, budget](int64_t held) {
    if (held <= host_held_.exchange(held) || held <= share) return;  // freeing memory never fails
    fail_user("memory.host_budget is " + bytes_text(budget) + " (" +
              context_.config().memory().host_budget_bytes.origin.text() + "): rank " +
              std::to_string(context_.rank()) + " holds " + bytes_text(held) + " of host memory, but its share is " +
              bytes_text(share) + "; raise memory.host_budget, keep more on the device, or use a disk tier");
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
  std::string text = "memory.device_budget is " + bytes_text(budget) + " (" + budget.origin.text() + "): rank " +
                     std::to_string(context_.rank()) + " holds " + bytes_text(ledger + temporaries.held);
  text += requested > 0 ? ", and libtorch requests " + bytes_text(requested) + " more" : "";
  text += step > 0 ? ", in step " + std::to_string(step + 1) + "\n" : ", in the first step\n";
  const auto row = [&](std::string_view kind, const std::string& planned, int64_t held) {
    char line[120];
    std::snprintf(line, sizeof line, "  %-12s planned %12s, held %12s\n", std::string(kind).c_str(), planned.c_str(),
                  bytes_text(held).c_str());
    text += line;
  };
  for (const Ledger::Row& one : context_.ledger.rows())
    if (one.tier == Tier::device && one.kind != MemoryKind::activations)
      row(kMemoryKindNames[static_cast<std::size_t>(one.kind)], bytes_text(one.planned), one.now);
  row("activations", "unknown", temporaries.held);
  text += "  largest: ";
  std::size_t shown = 0;
  for (const auto& [tag, bytes] : context_.ledger.holders()) {
    if (shown++ == 4) break;
    text += (shown > 1 ? ", " : "") + tag + " " + bytes_text(bytes);
  }
  // After the first step the peak of activations is known. Before, the estimate is twice the bytes held so far, because
  // backward has yet to run.
  const int64_t activations =
      step > 0 ? std::max(temporaries.peak, temporaries.held + requested) : 2 * (temporaries.held + requested);
  const BudgetShortfall over{budget, context_.plan.max_bytes, activations};
  text += "\n" + text_of(suggestions(context_.setup, context_.model.parameters(), over), over);
  if (step == 0) text += "\n  (activations count twice, because the first step had not ended)";
  fail_user(text);
}

}  // namespace zr::host::engine
