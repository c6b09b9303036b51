// The instances of a job's strategy: one for each part of the job (plan::PlanInput::part_of()), because a strategy
// serves weights of one dtype.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "plan/plan.hpp"
#include "plugin/plugin_host.hpp"
#include "zr/abi/strategy.h"

namespace zr::host::job {

/// Calls of a strategy for parameters as the model numbers them; an instance numbers those of its part. Calls that have
/// no parameter go to all parts, in order, and return the first failure. Thread rules as in zr/abi/strategy.h.
class StrategyParts {
 public:
  /// instances: by part; they outlive the object, as `plan` does.
  StrategyParts(const std::vector<const plugin::Instance*>& instances, const plan::MemoryPlan& plan);
  StrategyParts(const StrategyParts&) = delete;

  /// The number of parts; that of a parameter.
  uint32_t parts() const { return static_cast<uint32_t>(parts_.size()); }
  uint32_t part_of(uint32_t param) const { return part_of_[param]; }
  /// Of the instances, which are of one component; and the name of one of its functions, for messages.
  const plugin::Component& component() const { return parts_[0].instance->component(); }
  std::string call_text(const char* function) const { return parts_[0].instance->call_text(function); }

  /// buffers: of the plan. Once.
  zr_code bind(const std::vector<zr_view>& buffers, const zr_comm_ref& comm, zr_error* error);
  /// The calls of zr_strategy_api for a gradient, by the instance of the parameter's part.
  zr_code grad_destination(uint32_t param, int64_t* first, const zr_use* use, zr_view* dst, zr_error* error) const;
  zr_code grad_ready(uint32_t param, int64_t first, int64_t count, const zr_use* use, zr_error* error) const;
  /// The calls without a parameter, by all instances in order; event_of() by one.
  zr_code event(uint32_t kind, const zr_use* use, zr_error* error) const;
  zr_code event_of(uint32_t part, uint32_t kind, const zr_use* use, zr_error* error) const;
  zr_code grads_finish(const zr_use* use, zr_error* error) const;
  zr_code updated(const zr_use* use, zr_error* error) const;
  /// The calls for several parameters, by the instances of their parts. If one fails, none stays acquired.
  zr_code acquire(const uint32_t* params, uint32_t n, const zr_use* use, zr_view* full, zr_error* error) const;
  zr_code release(const uint32_t* params, uint32_t n, const zr_use* use, zr_error* error) const;

 private:
  struct PartInstance {
    const plugin::Instance* instance;
    const zr_strategy_api* api;
    std::unique_ptr<plan::PlanInputView> input{};  // from bind() on: the instance keeps it
  };
  template <class Fn>
  zr_code on_all(const Fn& fn) const;
  // Calls fn(part, numbers in the part, indices in `params`) for each part that has some of the parameters.
  template <class Fn>
  zr_code by_part(const uint32_t* params, uint32_t n, const Fn& fn) const;

  const plan::MemoryPlan& plan_;
  std::vector<PartInstance> parts_;
  std::vector<uint32_t> part_of_, number_of_;  // by parameter: its part, and its number there
};

}  // namespace zr::host::job
