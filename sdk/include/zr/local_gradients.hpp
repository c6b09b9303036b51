// Optimizers in C++ that use gradients which are not reduced over ranks (1-bit Adam). This is a draft: the library
// loads only on a host of this version, and no strategy offers local gradients yet (zr/abi/draft/local_gradients.h).
//
// A class with this header included has
//
//   static constexpr uint32_t needs = ZR_OPT_NEEDS_LOCAL_GRADS;
//   uint32_t gradients(int64_t step);  // [step] ZR_GRADS_*: which gradients a step needs; called for group 0
//
// and, if its `needs` have ZR_OPT_NEEDS_COMM,
//
//   void bind(const zr::Comm&);  // [control] the communicator of all ranks, for step(); called for group 0
#pragma once

#include "zr/abi/draft/local_gradients.h"
#include "zr/collective.hpp"
#include "zr/optimizer.hpp"

#pragma GCC visibility push(hidden)
namespace zr {
inline namespace sdk {

template <class D>
struct LocalGradientsLayer {
  static constexpr const char* id = "zr.optimizer.local_gradients/1";  // of the extension
  static zr_code gradients(void* self, int64_t step, uint32_t* grads, zr_error* error) noexcept {
    return guard(error, [&] { *grads = D::Layer::first_group(self).gradients(step); });
  }
  static zr_code bind(void* self, zr_comm_ref comm, zr_error* error) noexcept {
    return guard(error, [&] {
      if constexpr (has_bind<D>) D::Layer::first_group(self).bind(Comm(D::Layer::host(self), comm));
    });
  }
  static constexpr zr_local_gradients_api api{sizeof(zr_local_gradients_api), 0, gradients,
                                              has_bind<D> ? bind : nullptr};
};

}  // namespace sdk
}  // namespace zr
#pragma GCC visibility pop
