// A simulated job: ranks are threads of this process, and make the calls of training as the engine does.
#pragma once

#include <barrier>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "conform/final_gradients.hpp"
#include "conform/strategy_plan.hpp"
#include "conform/strategy_step.hpp"
#include "conform/world.hpp"

namespace zr::conform {

struct StrategyOptions {
  PlanRequest request{};  // rank is set by each rank
  int steps = 2;
  uint64_t seed = 1;            // of weights and gradients
  uint64_t order = 0;           // of the gradients, another one on each rank; 0: from the last parameter to the first
  bool lazy = false;            // collectives advance as late as possible
  bool other_threads = false;   // calls come from changing threads, one at a time
  bool completions = false;     // calls that may get a completion get one
  bool unknown = false;         // also events, phases and flags that the strategy does not know
  bool skips = false;           // the second step is skipped
  bool evaluates = false;       // an evaluation follows each step
  bool smallest_sizes = false;  // keys that are sizes have their smallest values: buckets are small
  Mode mode{};
  std::optional<uint64_t> fail_at{};  // the collective from which on all fail
  zr_code code = ZR_COMM;
  // What is checked; a check that is off leaves its errors to another rule.
  bool checks_sums = true, checks_weights = true;
  bool checks_last_use = false;         // reduced gradients do not change after the last collective that uses them
  int32_t device_type = ZR_DEVICE_CPU;  // another one: memory and streams of a SimulatedDevice
};

/// The call that failed on a rank because of a collective that failed on purpose.
struct FailedCall {
  std::string name;
  zr_code code = ZR_OK;
};

struct StrategyResult {
  std::vector<std::vector<std::string>> traces;         // the collectives of each rank
  std::vector<std::optional<FailedCall>> failed_calls;  // of each rank
};

/// Memory that ranks of a simulated job share, and what they wait for together.
struct SharedRun {
  SharedRun(const StrategyOptions& run_options, int world);
  const StrategyOptions& options;
  std::unique_ptr<SimulatedDevice> device;  // null: in host memory
  World world;
  std::barrier<> barrier;
  Mutex control;  // [control] functions are called one at a time
  Mutex mutex;
  // By host (see host_of_rank()) and number of the buffer.
  std::map<std::pair<int, std::size_t>, std::unique_ptr<Array>> shared_buffers ZR_GUARDED_BY(mutex);
  std::string problem ZR_GUARDED_BY(mutex);  // the first Failure of a rank
  std::string skipped ZR_GUARDED_BY(mutex);  // the reason of the first Skipped of a rank
};

/// One rank, on an instance that is not bound yet.
class StrategyRank final : private StrategyStep {
 public:
  StrategyRank(SharedRun& shared, Instance& instance, int rank);
  ~StrategyRank() {
    shared_.world.observe(request_.rank, {});
    shared_.world.forget(request_.rank);
  }
  StrategyRank(const StrategyRank&) = delete;
  /// Plans, binds and makes all steps. Throws Failure, or FailedCall if a collective failed on purpose.
  void run();

 private:
  struct Destination {
    void* data;
    int64_t count;
  };
  void bind();
  // Host memory of this rank, at `address`: as the strategy sees it.
  char* make_buffer(std::size_t bytes, char*& address);
  // The memory behind an address that the strategy returned; null: not in a buffer.
  char* memory_at(void* address) const {
    return shared_.device ? shared_.device->backing(address) : static_cast<char*>(address);
  }
  // Runs `work` on memory of this rank: now, or on its stream. `work` must stay valid until synchronize().
  void on_memory(std::function<void()> work);
  void synchronize();
  zr_device device() const { return shared_.device ? shared_.device->device() : zr_device{ZR_DEVICE_CPU, 0}; }
  static zr_use use_outside_steps(uint32_t phase) { return {sizeof(zr_use), phase, 0, 0, nullptr, nullptr}; }
  zr_use completed(zr_use use) const;
  template <class F>
  Answer call_from_any_thread(const std::string& name, F&& fn);
  void check(const std::string& name, const Answer& answer) const;
  enum class Tag { step, use };  // the thread tag of a function
  template <class F>
  void call_with_use(const std::string& name, Tag tag, const zr_use& use, bool may_complete, F&& fn);
  void event(uint32_t kind, const zr_use& use);
  void step();
  void use_in_order(const zr_use& use);
  void use_weights(const zr_use& use) override;
  std::vector<uint32_t> gradient_order(uint32_t part) const override;
  zr_code grad_destination(uint32_t param, int64_t* first, const zr_use& use, zr_view* dst) override;
  void write_gradient(uint32_t param, int64_t first, const zr_view& dst) override;
  void write_values(uint32_t param, int step, int micro, int64_t first, const Destination& to) const;
  void grad_ready(uint32_t param, int64_t first, int64_t count, const zr_use& use) override;
  void step_begin(const zr_use& use) override;
  void backward_end(uint32_t part, const zr_use& use) override;
  void grads_finish(const zr_use& use) override;
  std::string text_of(uint32_t param) const override { return "parameter " + std::to_string(param); }
  [[noreturn]] void fail_destination(const std::string& problem) const override;
  void acquire(const std::vector<uint32_t>& params, zr_use use);
  void release(const std::vector<uint32_t>& params, zr_use use);
  void set_own_weights(bool frozen_too);
  void check_sums();
  void check_weights(const char* when);
  void check_full(uint32_t param, const void* data, const char* when) const;
  void publish(bool frozen_too);
  std::vector<float> sum_of(uint32_t param) const;

  SharedRun& shared_;
  const StrategyOptions& options_;
  Instance& instance_;
  const zr_strategy_api& api_;
  PlanRequest request_;
  RankPlan plan_;
  ArgumentMemory bound_loan_;
  std::vector<std::unique_ptr<Array>> own_buffers_;
  std::vector<char*> buffers_;                                // host memory
  std::vector<std::vector<float>> weights_;                   // the values that all weights must have
  std::vector<uint32_t> gathered_;                            // parameters that this rank must acquire
  int number_ = 0;                                            // of the step
  std::optional<FinalGradients> final_;                       // with checks_last_use
  std::map<std::pair<uint32_t, int64_t>, Destination> held_;  // with ZR_PLAN_HOLD_GRADS, by parameter and first
};

/// Runs a job of options.request.world ranks, each with an instance of its own. Throws Failure.
StrategyResult run_strategy(Case& test, const StrategyOptions& options);

}  // namespace zr::conform
