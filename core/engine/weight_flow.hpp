// Weights from the strategy to operators: parameters that are sharded on this rank are gathered around each use.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <thread>
#include <vector>

#include "job/step_context.hpp"
#include "state/sharded_state.hpp"

namespace zr::host::engine {

/// Any thread; calls of the strategy are serialised.
class WeightFlow {
 public:
  /// Releases the model's memory of sharded parameters. From then on these parameters are gathered around each use. If
  /// operators wrote to one in place, its values are stored in `state` before its memory is released. Both arguments
  /// outlive the flow.
  WeightFlow(const job::StepContext& context, state::ShardedState& state);
  ~WeightFlow();
  WeightFlow(const WeightFlow&) = delete;

  /// Call after the optimizer or a load wrote new weights: the strategy sends them to the ranks that need them.
  /// `frozen_too`: frozen parameters may have changed. flags: ZR_USE_*. Collective.
  void publish_weights(bool frozen_too = true, uint32_t flags = 0);
  /// Sets the phase of the following uses: ZR_FORWARD, ZR_BACKWARD, ZR_EVAL or ZR_EXPORT_PHASE; and their micro-step.
  void set_phase(uint32_t phase, int micro) {
    phase_ = phase;
    micro_ = plan_.input.accumulates_locally ? 0 : static_cast<uint32_t>(micro);
  }
  /// Gathers the parameters that have no memory. Every begin_use() needs one end_use(). phase: as in Model::Uses;
  /// during a backward or an evaluation, the phase of set_phase() replaces ZR_EVAL and ZR_FORWARD. Locks
  /// StepContext::use. Collective.
  void begin_use(const uint32_t* params, uint32_t n, uint32_t phase);
  /// Calls fn(memory) with the full parameter in the dtype of the weights, in host memory. Collective.
  void with_full(uint32_t param, const std::function<void(const void* memory)>& fn);
  /// Calls check(call) at the begin of every zr::gather scope, on the training thread; it may throw. Empty: no check.
  void on_gather(std::function<void(const std::string& call)> check) { check_gather_ = std::move(check); }
  /// The sharded parameters that the program may have written to since the last call, in place or in zr::gather scopes,
  /// with a hash of the values that this rank had gathered after each of these writes. All ranks must write the same.
  /// Empty if there is one rank. Locks StepContext::use.
  std::map<uint32_t, uint64_t> take_writes();
  /// Call when a parameter has got new values on all ranks: its earlier writes no longer matter. Locks
  /// StepContext::use.
  void forget_writes(uint32_t param);
  /// True if the parameter has memory on this rank only during a use.
  bool is_sharded(uint32_t param) const;
  /// Ends a use: the parameters' memory may be released. written[i]: whether params[i] was written to, which
  /// must be the same on all ranks (the next step checks it); `written` may be null. Locks StepContext::use.
  void end_use(const uint32_t* params, const bool* written, uint32_t n);

 private:
  void gather_scope(const uint32_t* params, uint32_t n, bool begins);
  // Checks the gathered weights, and gives them to the model.
  void attach(const std::vector<uint32_t>& absent, const std::vector<zr_view>& gathered, uint32_t phase)
      ZR_REQUIRES(context_.use);
  void release(const std::vector<uint32_t>& params, uint32_t phase) ZR_REQUIRES(context_.use);
  void store_write(uint32_t param) ZR_REQUIRES(context_.use);
  void store_shared_write(uint32_t param, const void* full);
  void install_callbacks();

  const job::StepContext& context_;
  state::ShardedState& state_;
  model::ParameterMemory& parameters_;
  const job::StrategyParts& strategy_;
  const plan::MemoryPlan& plan_;
  comm::CommRuntime& comm_;
  std::function<void(const std::string& call)> check_gather_;
  const std::vector<uint32_t> sharded_;  // MemoryPlan::sharded_parameters()
  std::atomic<uint32_t> phase_{ZR_FORWARD}, micro_{0};
  const std::thread::id thread_ = std::this_thread::get_id();  // the training thread
  // By parameter; used for sharded ones only.
  std::vector<int> use_counts_ ZR_GUARDED_BY(context_.use);        // number of begun uses
  std::vector<void*> memory_ ZR_GUARDED_BY(context_.use);          // gathered memory; null: none
  std::vector<uint32_t> gathered_in_ ZR_GUARDED_BY(context_.use);  // the phase of acquire()
  std::vector<char> written_ ZR_GUARDED_BY(context_.use);          // not 0 if it was written to since it was gathered
  bool scope_begins_ ZR_GUARDED_BY(context_.use) = false;  // a zr::gather scope is about to gather its parameters
  std::map<uint32_t, uint64_t> writes_ ZR_GUARDED_BY(context_.use);  // see take_writes()
};

}  // namespace zr::host::engine
