// FlatStrategy for strategies that also support steps whose gradients are not reduced over ranks.
#pragma once

#include "zr/flat_shards.hpp"

#pragma GCC visibility push(hidden)
namespace zr {
inline namespace sdk {

/// As FlatStrategy. D's `flags` contain ZR_STRATEGY_LOCAL_GRADS.
template <class D, GradientMemory Gradients>
class LocalFlatStrategy : public FlatStrategy<D, Gradients> {
 public:
  using Base = FlatStrategy<D, Gradients>;  // what reduces and gathers
  using Base::Base;
  /// Called once the memory is allocated.
  void bind(const zr_plan_in& in, const Binding& bound) {
    shares_weights_ = shared_weights_flag(in) != 0;
    Base::bind(in, bound);
  }
  /// Completes the reduction at the end of a backward. Local gradients are not reduced.
  void event(uint32_t kind, const zr_use& use) {
    if (!(use.flags & ZR_USE_LOCAL_GRADS)) Base::event(kind, use);
  }
  /// Gives every rank the weights that it has not updated; with local gradients, those are shared.
  void updated(const zr_use& use) {
    if (shares_weights_ || !(use.flags & ZR_USE_LOCAL_GRADS)) Base::updated(use);
  }

 private:
  bool shares_weights_ = false;
};

}  // namespace sdk
}  // namespace zr
#pragma GCC visibility pop
