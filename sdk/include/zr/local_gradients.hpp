// Optimizers in C++ that use gradients which are not reduced over ranks (1-bit Adam). This is a draft: the library
// loads only on a host of this version (zr/abi/draft/local_gradients.h).
//
// A class with this header included has
//
//   static constexpr uint32_t needs = ZR_OPT_NEEDS_LOCAL_GRADS | ZR_OPT_NEEDS_COMM;
//   uint32_t gradients(int64_t step, const zr_param_updates*);  // [step] ZR_GRADS_*: which gradients a step needs;
//                                                               // null: asked about a later step; called for group 0
//   void plan_exchange(zr_exchange_plan&) const;   // [control] sizes; called for group 0
//   void exchange(const zr::Exchange<Class>&);     // [step] replaces local gradients; called for group 0
//   void bind(const zr::Comm&);  // [control] with ZR_OPT_NEEDS_COMM: the communicator of all ranks; called for group 0
//
// and both or neither of
//
//   int32_t summed_state(int64_t step);          // [step] after each update with reduced gradients: index of the state
//                                                // whose sum is needed, or -1; called for group 0
//   void state_sum(int64_t step, double sum);    // [step] that sum over all parameters; called for group 0
#pragma once

#include "zr/abi/draft/local_gradients.h"
#include "zr/collective.hpp"
#include "zr/optimizer.hpp"

#pragma GCC visibility push(hidden)
namespace zr {
inline namespace sdk {

ZR_DETECT(has_exchange, exchange);
ZR_DETECT(has_plan_exchange, plan_exchange);
ZR_DETECT(has_summed_state, summed_state);
ZR_DETECT(has_state_sum, state_sum);

/// The arguments of exchange(). D: the author's class.
template <class D>
class Exchange {
 public:
  /// `scratch`: memory that peers can read.
  Exchange(const OptimizerLayer<D>& layer, const zr_step& step, const zr_local_gradient* const* list, uint32_t n,
           const zr_view& memory)
      : job(step), scratch(memory), layer_(layer), list_(list), n_(n) {}
  uint32_t size() const { return n_; }  // number of parameters
  /// Parameter i.
  const zr_local_gradient& operator[](uint32_t i) const { return *list_[i]; }
  const D& group(uint32_t i) const { return layer_.group_at(list_[i]->group); }  // of parameter i
  const zr_step& job;      // the step, with the factor of the gradients
  const zr_view& scratch;  // memory that peers can read, of the planned size

 private:
  const OptimizerLayer<D>& layer_;
  const zr_local_gradient* const* list_;
  uint32_t n_;
};

template <class D>
struct LocalGradientsLayer {
  static constexpr const char* id = "zr.optimizer.local_gradients/1";  // of the extension
  static_assert(has_summed_state<D> == has_state_sum<D>,
                "an optimizer has both summed_state and state_sum, or neither");
  static zr_code gradients(void* self, int64_t step, const zr_param_updates* updates, uint32_t* grads,
                           zr_error* error) noexcept {
    return guard(error, [&] { *grads = D::Layer::first_group(self).gradients(step, updates); });
  }
  static zr_code bind(void* self, zr_comm_ref comm, zr_error* error) noexcept {
    return guard(error, [&] {
      if constexpr (has_bind<D>) D::Layer::first_group(self).bind(Comm(D::Layer::host(self), comm));
    });
  }
  static zr_code plan(void* self, zr_exchange_plan* sizes, zr_error* error) noexcept {
    return guard(error, [&] {
      if constexpr (has_plan_exchange<D>) D::Layer::first_group(self).plan_exchange(*sizes);
    });
  }
  static zr_code exchange(void* self, const zr_step* step, const zr_local_gradient* const* list, uint32_t n,
                          const zr_view* scratch, zr_error* error) noexcept {
    return guard(error, [&] {
      if constexpr (has_exchange<D>) {
        const zr_step job = taken(*step);
        const auto& layer = *static_cast<const OptimizerLayer<D>*>(self);
        for (uint32_t i = 0; i < n; ++i) layer.group_at(list[i]->group);
        D::Layer::first_group(self).exchange(Exchange<D>(layer, job, list, n, *scratch));
      }
    });
  }
  static zr_code summed_state(void* self, int64_t step, int32_t* slot, zr_error* error) noexcept {
    return guard(error, [&] {
      if constexpr (has_summed_state<D>) *slot = D::Layer::first_group(self).summed_state(step);
    });
  }
  static zr_code state_sum(void* self, int64_t step, double sum, zr_error* error) noexcept {
    return guard(error, [&] {
      if constexpr (has_state_sum<D>) D::Layer::first_group(self).state_sum(step, sum);
    });
  }
  static constexpr zr_local_gradients_api api{sizeof(zr_local_gradients_api),
                                              0,
                                              gradients,
                                              has_bind<D> ? bind : nullptr,
                                              has_plan_exchange<D> ? plan : nullptr,
                                              has_exchange<D> ? exchange : nullptr,
                                              has_summed_state<D> ? summed_state : nullptr,
                                              has_state_sum<D> ? state_sum : nullptr};
};

}  // namespace sdk
}  // namespace zr
#pragma GCC visibility pop
