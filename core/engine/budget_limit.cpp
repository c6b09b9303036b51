#include "engine/budget_limit.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "base/error.hpp"
#include "base/text.hpp"
#include "job/budget_check.hpp"
#include "job/plan_inputs.hpp"

namespace zr::host::engine {

BudgetLimit::BudgetLimit(const job::StepContext& context, const plugin::Instance* communicator,
                         const TrainingProgress& progress)
    : context_(context),
      progress_(progress),
      on_device_(context.config().job().device.value != config::kCpuDevice),
      watch_{context.ledger, context.model} {
  if (const int64_t budget = context.config().memory().host_budget; budget > 0) watch_host(budget, communicator);
  if (const auto& budget = context.config().memory().device_budget; budget > 0) watch_device(budget);
}

BudgetLimit::Watch::~Watch() {
  ledger.on_change(Tier::device, {});
  ledger.on_change(Tier::host, {});
  library.limit_temporaries(0, {});
}

void BudgetLimit::watch_host(int64_t budget, const plugin::Instance* communicator) {
  // This rank's share: its own planned bytes, and an equal part of the budget that no rank has planned.
  const plan::MemoryPlan& plan = context_.plan;
  const bool snapshot = job::snapshots(context_.config());
  const int ranks_per_node = context_.setup.control->local_world();
  const auto communicator_bytes_per_rank = job::communicator_bytes(communicator, context_.world());
  const int64_t planned = job::host_bytes(plan, ranks_per_node, communicator_bytes_per_rank, snapshot);
  const int64_t own = plan.bytes(Tier::host) + communicator_bytes_per_rank.value_or(0) + plan.device_staging.bytes() +
                      plan.save_staging + (snapshot ? plan.snapshot_bytes() : 0);
  const int64_t share = own + std::max<int64_t>(budget - planned, 0) / ranks_per_node;
  context_.ledger.on_change(Tier::host, [this, share, budget](int64_t held) {
    if (held <= host_held_.exchange(held) || held <= share) return;  // freeing memory never fails
    fail_user(
        fmt::format("memory.host_budget is {} ({}): rank {} holds {} of host memory, but its share is {}; raise "
                    "memory.host_budget, keep more on the device, or use a disk tier",
                    bytes_text(budget), context_.config().memory().host_budget.origin.text(), context_.rank(),
                    bytes_text(held), bytes_text(share)));
  });
}

void BudgetLimit::watch_device(const config::Setting<int64_t>& budget) {
  if (on_device_ && !context_.model.device_memory().counted)
    fail_user(fmt::format(
        "memory.device_budget is {} ({}), but libtorch's backend for job.device = \"{}\" does not count its memory; "
        "remove memory.device_budget",
        bytes_text(budget), budget.origin.text(), printable(context_.config().job().device.value)));
  if (on_device_ && !context_.device) return;  // the ledger's tier is host memory; check() compares
  const auto changed = [this, budget = budget.value] {
    const Held held = this->held();
    // Memory that the ledger holds is no longer available to libtorch.
    if (!on_device_)
      context_.model.limit_temporaries(budget - held.engine, [this](int64_t requested) { over_budget(requested); });
    const bool grew = held.engine > device_held_.exchange(held.engine);
    if (grew && held.engine + held.temporaries > budget) over_budget(0);
  };
  context_.ledger.on_change(Tier::device, [changed](int64_t) { changed(); });
  changed();
}

BudgetLimit::Held BudgetLimit::held() const {
  const Ledger& ledger = context_.ledger;
  const int64_t of_ledger =
      ledger.held(Tier::device) - ledger.held(Tier::device, MemoryKind::activations) + ledger.reserved(Tier::device);
  if (!on_device_) {
    const model::LibraryMemory::Temporaries temporaries = context_.model.temporaries();
    return {of_ledger, temporaries.held, temporaries.peak};
  }
  const model::DeviceBytes bytes = context_.model.device_memory();
  const int64_t engine = context_.device ? of_ledger : context_.plan.unsharded_weight_bytes();
  const int64_t other = bytes.of_engines + (context_.device ? 0 : engine);  // of libtorch's memory: not temporaries
  return {engine, std::max<int64_t>(bytes.held - other, 0), std::max<int64_t>(bytes.peak - other, 0)};
}

void BudgetLimit::check(BudgetCheck after) const {
  const int64_t budget = context_.config().memory().device_budget;
  if (!on_device_ || budget == 0) return;
  const Held held = this->held();
  if (held.engine + held.peak <= budget) return;
  constexpr std::string_view kNames[] = {"forward", "backward", "engine.step()"};
  const int64_t step = progress_.step() + (after == BudgetCheck::step ? 0 : 1);
  const bool estimated = step == 1 && after == BudgetCheck::forward;
  fail({fmt::format("held up to {} on the device by the end of {}", bytes_text(held.engine + held.peak),
                    kNames[static_cast<std::size_t>(after)]),
        step, held.peak, estimated ? 2 * held.peak : held.peak, estimated});
}

void BudgetLimit::over_budget(int64_t requested) const {
  const Held held = this->held();
  const int64_t step = progress_.step() + 1, temporaries = held.temporaries + requested;
  const std::string request =
      requested > 0 ? fmt::format(", and libtorch requests {} more", bytes_text(requested)) : "";
  // After the first step the peak of activations is known. Before, the estimate is twice the bytes held so far, because
  // backward has not run yet.
  fail({fmt::format("holds {}{}", bytes_text(held.engine + held.temporaries), request), step, held.temporaries,
        step > 1 ? std::max(held.peak, temporaries) : 2 * temporaries, step == 1});
}

// Planned and held bytes by kind, and the largest allocations.
std::string BudgetLimit::kinds_text(int64_t temporaries) const {
  std::string text;
  const auto row = [&](std::string_view kind, const std::string& planned, int64_t held) {
    text += fmt::format("  {:<12} planned {:>12}, held {:>12}\n", kind, planned, bytes_text(held));
  };
  const bool in_host_memory = on_device_ && !context_.device;
  if (const int64_t weights = context_.plan.unsharded_weight_bytes(); in_host_memory)
    row("weights", bytes_text(weights), weights);
  for (const Ledger::Row& ledger_row : context_.ledger.rows())
    if (!in_host_memory && ledger_row.tier == Tier::device && ledger_row.kind != MemoryKind::activations)
      row(kMemoryKindNames[static_cast<std::size_t>(ledger_row.kind)], bytes_text(ledger_row.planned), ledger_row.now);
  row("activations", "unknown", temporaries);
  if (const int64_t later = context_.ledger.reserved(Tier::device))
    text += fmt::format("  {} of it is reserved for later steps\n", bytes_text(later));
  if (in_host_memory) return text;
  text += "  largest: ";
  std::size_t shown = 0;
  for (const auto& [tag, bytes] : context_.ledger.holders()) {
    if (shown++ == 4) break;
    text += fmt::format("{}{} {}", shown > 1 ? ", " : "", tag, bytes_text(bytes));
  }
  return text + "\n";
}

MemoryInUse BudgetLimit::memory_in_use() const {
  MemoryInUse use{fmt::format("memory of rank {} by kind:\n", context_.rank()), 0, held().peak};
  if (on_device_ && !context_.device) use.state = context_.plan.unsharded_weight_bytes();
  for (const Ledger::Row& row : context_.ledger.rows()) {
    if (row.kind == MemoryKind::activations) continue;
    use.kinds += fmt::format(
        "  {:<12} {:<6} planned {:>12}, held {:>12}\n", kMemoryKindNames[static_cast<std::size_t>(row.kind)],
        kTierNames[static_cast<std::size_t>(row.tier)], bytes_text(row.planned), bytes_text(row.now));
    if (row.tier != Tier::disk) use.state += row.now;
  }
  use.less_activations = fmt::format(
      "lower train.micro_batch (now {}) and raise train.gradient_accumulation, use zr::checkpoint in the model, or set "
      "offload.activations",
      context_.config().train().micro_batch.value);
  use.less_state = fmt::format(
      "raise job.ranks (now {}), set offload.optimizer and offload.gradients to a tier, or use a strategy that shards "
      "more",
      context_.world());
  return use;
}

std::string MemoryInUse::text(int64_t requested) const {
  const std::string request = requested > 0 ? fmt::format("; {} more were requested", bytes_text(requested)) : "";
  const bool mainly_activations = activations + requested >= state;
  return fmt::format("{}  {:<12} {:<6} peak    {:>12}{}\n{}; otherwise {}; `zeroth plan` shows what each change saves",
                     kinds, "activations", "", bytes_text(activations), request,
                     mainly_activations ? less_activations : less_state,
                     mainly_activations ? less_state : less_activations);
}

void BudgetLimit::fail(const Excess& excess) const {
  const config::Setting<int64_t>& budget = context_.config().memory().device_budget;
  const plan::MemoryPlan& plan = context_.plan;
  std::string text = fmt::format("memory.device_budget is {} ({}): rank {} {}", bytes_text(budget),
                                 budget.origin.text(), context_.rank(), excess.what);
  text += excess.step > 1 ? fmt::format(", in step {}\n", excess.step) : ", in the first step\n";
  text += kinds_text(excess.temporaries);
  const job::BudgetShortfall shortfall{budget, plan.max_budgeted_bytes(), excess.activations};
  text += job::suggestions_text(context_.setup, plan, context_.model.parameters(), shortfall);
  if (excess.estimated) text += "\n  (activations count twice, because the first step had not ended)";
  fail_user(text);
}

}  // namespace zr::host::engine
