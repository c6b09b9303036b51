// References that the parts of a training step share.
#pragma once

#include <functional>
#include <string>

#include "base/device_memory.hpp"
#include "base/error.hpp"
#include "base/ledger.hpp"
#include "base/thread_pool.hpp"
#include "comm/comm_runtime.hpp"
#include "job/optimizers.hpp"
#include "job/setup.hpp"
#include "job/strategy_parts.hpp"
#include "model/model.hpp"
#include "plan/plan.hpp"
#include "plugin/plugin_host.hpp"
#include "zr/mutex.hpp"

namespace zr::host::job {

/// Throws if a plug-in's call failed. If the communicator or the engine caused the failure, throws its exception.
/// `call` names the plug-in and the call.
using CallCheck = std::function<void(zr_code, const zr_error&, const std::string& call)>;

/// A rank's plan, communicator, threads and ledger. They must outlive every object that receives this context.
struct RankContext {
  comm::CommRuntime& comm;
  ThreadPool& pool;
  const plan::MemoryPlan& plan;
  Ledger& ledger;
  DeviceMemory* device = nullptr;  // where weights, gradients and states without a tier are; null: in host memory

  /// The device of weights and gradients.
  zr_device memory_device() const { return device ? device->device() : kHostMemory; }
};

/// A RankContext with the job's configuration, model and plug-ins. Immutable; the referenced objects have their own
/// thread rules.
struct StepContext : RankContext {
  const Setup& setup;
  model::Model& model;
  StrategyParts& strategy;
  const Optimizers& optimizers;
  CallCheck check;
  RecursiveMutex& use;  // locked during [use] and [step] calls of the strategy

  const config::JobConfig& config() const { return setup.config; }
  int rank() const { return setup.control->rank(); }
  int world() const { return setup.control->world(); }
  /// Calls fn, a call of a plug-in that gets use_of(), so that the device continues in the order of the calls.
  template <class Fn>
  zr_code call(zr_error* error, const Fn& fn) const {
    if (!device) return call_plugin(error, fn);
    zr_code code = ZR_OK;
    device->run([&](zr_stream*) { code = call_plugin(error, fn); });
    return code;
  }
  /// Like call(), but operations that were put off stay so: for calls whose results on the device only collectives use.
  template <class Fn>
  zr_code call_in_order(zr_error* error, const Fn& fn) const {
    if (!device) return call_plugin(error, fn);
    zr_code code = ZR_OK;
    device->call([&] { code = call_plugin(error, fn); });
    return code;
  }
  /// call() with fn(zr_error*), which calls the function `name` of the strategy. Throws if it fails.
  template <class Fn>
  void call_strategy(const char* name, const Fn& fn) const {
    CallError error;
    check(call(&error, [&] { return fn(&error); }), error, strategy.call_text(name));
  }
  /// Calls fn(zr_error*), which calls the function `name` of the optimizer. Throws if it fails.
  template <class Fn>
  void call_optimizer(const plugin::Instance& optimizer, const char* name, const Fn& fn) const {
    CallError error;
    check(call_plugin(&error, [&] { return fn(&error); }), error, optimizer.call_text(name));
  }
  /// Reports an event that belongs to no micro-step (such as ZR_STEP_END) to the strategy. flags: ZR_USE_*. Training
  /// thread.
  void report_event(uint32_t kind, uint32_t flags = 0) const {
    const RecursiveMutexLock lock(use);
    const zr_use use_now = use_of(kind == ZR_EVAL_BEGIN || kind == ZR_EVAL_END ? ZR_EVAL : ZR_UPDATE_PHASE, 0, flags);
    call_strategy("event", [&](zr_error* error) { return strategy.event(kind, &use_now, error); });
  }
  /// Lets the strategy complete the reduced gradients of a step. Training thread.
  void finish_gradients(uint32_t flags = 0) const {
    const RecursiveMutexLock lock(use);
    const zr_use use_now = use_of(ZR_UPDATE_PHASE, 0, flags);
    call_strategy("grads_finish", [&](zr_error* error) { return strategy.grads_finish(&use_now, error); });
  }
  /// The argument of a call of the strategy, which is complete on return, or on a device in the order of the stream.
  /// phase: ZR_FORWARD, ...; micro: of the step; flags: ZR_USE_*.
  zr_use use_of(uint32_t phase, uint32_t micro = 0, uint32_t flags = 0) const {
    return {sizeof(zr_use), phase, micro, flags, device ? device->abi() : nullptr, nullptr};
  }
};

}  // namespace zr::host::job
