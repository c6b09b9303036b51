// Enforces memory.device_budget and memory.host_budget: a plan that exceeds one of them is rejected before the job
// starts; an allocation that exceeds one of them fails while the job runs.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "engine/training_progress.hpp"
#include "job/step_context.hpp"

namespace zr::host::engine {

/// What has ended when BudgetLimit::check() compares.
enum class BudgetCheck { forward, backward, step };

/// What a rank holds, for the message about an allocation that has failed.
struct MemoryInUse {
  std::string kinds;                                // a table of bytes by kind, without activations
  int64_t state = 0, activations = 0;               // bytes; those of activations are the peak
  std::string less_activations = {}, less_state{};  // the keys to change
  /// The table and the keys. `requested`: the bytes of the allocation; 0 if unknown.
  std::string text(int64_t requested) const;
};

/// While the object exists, limits device memory (the ledger plus libtorch's allocations) and host memory (the ledger).
/// Each change of the ledger is checked on the thread that makes it. Freeing memory never fails. libtorch's allocations
/// are checked where they are made, or for a model on a device by check(), because libtorch offers no hook for them
/// there. If the training state of such a job is in host memory, only libtorch's memory of the device is limited.
class BudgetLimit {
 public:
  /// Keeps references to all arguments. Throws UserError if a budget is already exceeded.
  BudgetLimit(const job::StepContext& context, const plugin::Instance* communicator, const TrainingProgress& progress);
  BudgetLimit(const BudgetLimit&) = delete;

  /// For a model on a device: throws UserError with the held bytes and suggested changes if the device budget was
  /// exceeded since Model::forget_peak(). Training thread.
  void check(BudgetCheck after) const;
  /// Throws UserError with the held bytes and suggested changes, because an allocation of `requested` bytes would
  /// exceed the device budget; 0: the held bytes already exceed it.
  [[noreturn]] void over_budget(int64_t requested) const;
  /// For the message about an allocation that has failed in the program or in libtorch. Training thread.
  MemoryInUse memory_in_use() const;

 private:
  struct Watch {  // removes the limits in its destructor
    Ledger& ledger;
    model::LibraryMemory& library;
    ~Watch();
  };
  struct Held {  // bytes of memory that the device budget limits
    int64_t engine, temporaries;
    int64_t peak;  // of temporaries
  };
  struct Excess {
    std::string what;  // this rank did, as the text after its name
    int64_t step;
    int64_t temporaries, activations;  // bytes: held; that the job needs
    bool estimated;                    // the latter is an estimate
  };
  void watch_host(int64_t budget, const plugin::Instance* communicator);
  void watch_device(const config::Setting<int64_t>& budget);
  Held held() const;
  std::string kinds_text(int64_t temporaries) const;
  [[noreturn]] void fail(const Excess& excess) const;

  const job::StepContext& context_;
  const TrainingProgress& progress_;
  const bool on_device_;                                // the model is on a device
  std::atomic<int64_t> host_held_{0}, device_held_{0};  // bytes at the last change
  const Watch watch_;
};

}  // namespace zr::host::engine
