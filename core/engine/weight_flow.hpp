// From the strategy to operators: parameters that are not whole on this rank are made so around each use.
#pragma once

#include <atomic>
#include <functional>
#include <thread>
#include <vector>

#include "engine/sharded_state.hpp"
#include "engine/step_context.hpp"

namespace zr::host {

/// Any thread; calls of the strategy are serialised.
class WeightFlow {
 public:
  /// Takes the memory of sharded parameters away; from here on they are gathered around each use, and what operators
  /// wrote to them in place is stored in `state` before their memory goes. Both outlive the flow.
  WeightFlow(const StepContext& context, ShardedState& state);
  ~WeightFlow();
  WeightFlow(const WeightFlow&) = delete;

  /// The optimizer, or a load, wrote new weights: the strategy sends them where they are needed. Collective.
  void updated();
  /// What uses are for from now on: ZR_FORWARD, ZR_BACKWARD, ZR_EVAL, ZR_EXPORT_PHASE.
  void set_phase(uint32_t phase) { phase_ = phase; }
  /// Makes parameters whole, those that are not. Collective; every begin has one end. `phase`: see Model::Uses; within
  /// a backward or an evaluation ZR_EVAL and ZR_FORWARD are that. [use]
  void begin(const uint32_t* params, uint32_t n, uint32_t phase);
  /// `use(memory)` with the full parameter in the weights' dtype. Collective. [use]
  void with_full(uint32_t param, const std::function<void(const void* memory)>& use);
  /// Not bound to full memory on this rank.
  bool is_sharded(uint32_t param) const;
  /// They may go; written[i]: the caller wrote to params[i], on all ranks alike. written may be null.
  void end(const uint32_t* params, const bool* written, uint32_t n);

 private:
  void scope(const uint32_t* params, uint32_t n, bool begins);
  void detach(const std::vector<uint32_t>& params);

  void start();

  const StepContext& context_;
  ShardedState& state_;
  Model& model_;
  const Instance& strategy_;
  const zr_strategy_api* api_;
  const MemoryPlan& plan_;
  CommRuntime& comm_;
  std::vector<uint32_t> sharded_;  // no whole piece on this rank: not bound to memory
  std::atomic<uint32_t> phase_{ZR_FORWARD};
  const std::thread::id thread_ = std::this_thread::get_id();  // that trains
  // By parameter; of use to sharded ones only.
  std::vector<int> users_;
  std::vector<void*> memory_;
  std::vector<char> dirty_;
};

}  // namespace zr::host
