// Session's budget: refused at the start where the plan is over it, and wherever more is asked for than it has.
#include <algorithm>
#include <atomic>
#include <memory>

#include "base/failure.hpp"
#include "base/text.hpp"
#include "engine/planning.hpp"
#include "engine/session.hpp"

namespace zr::host {

std::vector<Suggestion> Session::suggestions(const BudgetShortfall& over) const {
  const RequiredBytes need = [this](const Suggestion& suggestion) -> std::optional<int64_t> {
    try {
      return Planner(setup_.revalidate(suggestion.overrides, suggestion.ranks), model_.parameters(), suggestion.ranks)
          .max_bytes();
    } catch (const Failure&) {
      return {};  // such a job cannot be
    }
  };
  return fitting_suggestions(setup_, world(), over, need);
}

void Session::check_budget() const {
  check_host_budget(config(), plan_, control_->local_world(), plan_context_of(setup_, communicator_.get(), world()));
  const int64_t budget = config().integer("memory.device_budget");
  if (budget == 0 || plan_.max_bytes <= budget) return;
  const Planner planner(setup_, model_.parameters(), world());
  const BudgetShortfall over{budget, plan_.max_bytes, 0};
  fail_user(plan_over_budget_text(config(), planner, plan_.max_bytes, text_of(suggestions(over), over)));
}

void Session::watch_budget() {
  if (const int64_t budget = config().integer("memory.host_budget"); budget > 0) {
    // Its own plan, and an even part of what nobody plans.
    const int local = control_->local_world();
    const auto communicator = communicator_bytes(communicator_.get(), world());
    const int64_t all = host_bytes(plan_, local, communicator, snapshots(config()));
    const int64_t mine =
        plan_.bytes(Tier::host) + communicator.value_or(0) + (snapshots(config()) ? plan_.snapshot_bytes() : 0);
    const int64_t share = mine + std::max<int64_t>(budget - all, 0) / local;
    ledger_.on_change(Tier::host, [this, share, budget,
                                   last = std::make_shared<std::atomic<int64_t>>(0)](int64_t held) {
      if (held <= last->exchange(held) || held <= share) return;  // what is given back is never too much
      fail_user("memory.host_budget is " + bytes_text(budget) + " (" + config().origin("memory.host_budget").text() +
                "): rank " + std::to_string(rank()) + " holds " + bytes_text(held) + " of host memory, its share is " +
                bytes_text(share) + "; raise it, leave more on the device, or use a tier of disk");
    });
  }
  const int64_t budget = config().integer("memory.device_budget");
  if (budget == 0) return;
  // What the ledger takes, libtorch has no longer.
  const auto changed = [this, budget](int64_t held) {
    model_.limit_temporaries(budget - held, [this](int64_t requested) { over_budget(requested); });
    if (held + model_.temporaries().held > budget) over_budget(0);
  };
  ledger_.on_change(Tier::device, changed);
  changed(ledger_.held(Tier::device));
}

void Session::over_budget(int64_t requested) const {
  const Model::Temporaries temporaries = model_.temporaries();
  const int64_t budget = config().integer("memory.device_budget"), ledger = ledger_.held(Tier::device);
  std::string text = "memory.device_budget is " + bytes_text(budget) + " (" +
                     config().origin("memory.device_budget").text() + "): rank " + std::to_string(rank()) + " holds " +
                     bytes_text(ledger + temporaries.held);
  text += requested > 0 ? ", and libtorch asks for " + bytes_text(requested) + " more" : "";
  text += step_ > 0 ? ", in step " + std::to_string(step_ + 1) + "\n" : ", in the first step\n";
  const auto row = [&](std::string_view kind, const std::string& planned, int64_t held) {
    char line[120];
    std::snprintf(line, sizeof line, "  %-12s planned %12s, held %12s\n", std::string(kind).c_str(), planned.c_str(),
                  bytes_text(held).c_str());
    text += line;
  };
  for (const Ledger::Row& one : ledger_.rows())
    if (one.tier == Tier::device && one.kind != MemoryKind::activations)
      row(kMemoryKindNames[static_cast<std::size_t>(one.kind)], bytes_text(one.planned), one.now);
  row("activations", "unknown", temporaries.held);
  text += "  largest: ";
  std::size_t shown = 0;
  for (const auto& [tag, bytes] : ledger_.holders()) {
    if (shown++ == 4) break;
    text += (shown > 1 ? ", " : "") + tag + " " + bytes_text(bytes);
  }
  // Once a step was made its peak is known; before, what is held is half of it at least, as backward is to come.
  const int64_t activations =
      step_ > 0 ? std::max(temporaries.peak, temporaries.held + requested) : 2 * (temporaries.held + requested);
  const BudgetShortfall over{budget, plan_.max_bytes, activations};
  text += "\n" + text_of(suggestions(over), over);
  if (step_ == 0) text += "\n  (activations counted twice: the first step had not ended)";
  fail_user(text);
}

}  // namespace zr::host
