// memory.device_budget and memory.host_budget: a plan over one of them is rejected before the job starts, and so is
// what asks for more while it runs.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "engine/budget.hpp"
#include "engine/step_context.hpp"
#include "engine/training_progress.hpp"

namespace zr::host {

/// Throws Failure(user) with the plan, and with what could be changed, if that plan of `setup` is over a budget.
/// `communicator`: null for one rank.
void check_budget(const Setup& setup, const MemoryPlan& plan, const std::vector<Parameter>& parameters,
                  const Instance* communicator);

/// Limits the ledger, and together with it the memory of the model's library, while it lives. A change of the ledger is
/// checked on the thread that makes it. What is freed is never over a budget.
class MemoryBudget {
 public:
  /// Refers to all. Throws Failure(user) if more is held already.
  MemoryBudget(const StepContext& context, const Instance* communicator, const TrainingProgress& progress);
  MemoryBudget(const MemoryBudget&) = delete;

  /// Throws Failure(user) with what is held and what could be changed: `asked` bytes more would be over the budget; 0:
  /// what is held is.
  [[noreturn]] void over_budget(int64_t requested) const;

 private:
  struct Watch {  // ends it
    Ledger& ledger;
    Model& model;
    ~Watch();
  };
  void watch_host(int64_t budget, const Instance* communicator);
  void watch_device(int64_t budget);

  const StepContext& context_;
  const TrainingProgress& progress_;
  std::atomic<int64_t> host_held_{0}, device_held_{0};  // at the last change
  const Watch watch_;
};

}  // namespace zr::host
