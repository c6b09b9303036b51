// Optimizers that need sums over a full parameter, such as its norm, in C++ (draft; see zr/abi/draft/partial_sums.h).
//
// clang-format off
//   struct NormDescent : zr::SummingOptimizer<NormDescent> {  // divides the gradient of each tensor by its norm
//     static void describe(const zr_param&, zr::Description&) {}  // no states
//     static void passes(const zr_param&, std::vector<uint32_t>& sums) { sums = {1}; }
//     void add_up(const zr::Update& u) const {
//       for (int64_t i = 0; i < u.count; ++i) u.sums->partial[i / u.sums->block] += double(u.grad[i]) * u.grad[i];
//     }
//     void update(const zr::Update& u) const {
//       const float rate = float(u.lr / std::sqrt(u.sums->totals[0]));
//       for (int64_t i = 0; i < u.count; ++i) u.weight[i] -= rate * u.grad[i];
//     }
//   };
//   ZR_OPTIMIZER(NormDescent, "norm_descent", "example", "1.0.0");
// clang-format on
#pragma once

#include "zr/abi/draft/optimizer_shapes.h"
#include "zr/abi/draft/partial_sums.h"
#include "zr/optimizer.hpp"

#pragma GCC visibility push(hidden)
namespace zr {
inline namespace sdk {

/// An optimizer state with one element per `block` elements of the parameter.
constexpr zr_slot slot_per_block(const char* name, uint32_t block, zr_dtype dtype = ZR_F32) {
  return zr_slot{name, dtype, ZR_SLOT_PER_BLOCK, 0, block};
}
/// An optimizer state with one element per column for every `block` elements, which are complete rows.
constexpr zr_slot slot_per_column(const char* name, uint32_t block, zr_dtype dtype = ZR_F32) {
  return zr_slot{name, dtype, ZR_SLOT_PER_COLUMN, 0, block};
}

template <class D>
class SummingLayer : public OptimizerLayer<D> {
  using Base = OptimizerLayer<D>;
  static_assert(has_describe<D>, "an optimizer with passes declares its states in describe()");

 public:
  using Base::Base;
  static zr_code passes(void* self, const zr_param* param, uint32_t* n_passes, uint32_t* n_sums,
                        zr_error* error) noexcept {
    return guard(error, [&] {
      std::vector<uint32_t> sums;
      static_cast<const SummingLayer*>(self)->group_of(*param).passes(*param, sums);
      if (sums.size() > ZR_MAX_PASSES)
        throw PluginError(ZR_UNSUPPORTED, std::to_string(sums.size()) + " passes, but an optimizer may have at most " +
                                              std::to_string(int{ZR_MAX_PASSES}));
      *n_passes = static_cast<uint32_t>(sums.size());
      std::copy(sums.begin(), sums.end(), n_sums);
    });
  }
  static zr_code add_up(void* self, const zr_step* step, const zr_update_slice* slice, const zr_sums* sums,
                        zr_error* error) noexcept {
    return guard(error, [&] {
      const SummingLayer& layer = *static_cast<const SummingLayer*>(self);
      layer.check(*slice);
      const zr_step job = taken(*step);
      layer.for_each_part(*slice, job, sums, [&](const Update& part) { layer.group(*slice).add_up(part); });
    });
  }
  static zr_code update(void* self, const zr_step* step, const zr_update_slice* slice, const zr_sums* sums,
                        zr_error* error) noexcept {
    return guard(error, [&] {
      const SummingLayer& layer = *static_cast<const SummingLayer*>(self);
      layer.check(*slice);
      const zr_step job = taken(*step);
      layer.Base::update(*slice, job, sums);
    });
  }
  /// For parameters without passes. The host calls update() below for the others.
  static zr_code step(void* self, const zr_step* step, const zr_update_slice* const* slices, uint32_t n,
                      zr_stream* stream, zr_done* done, zr_error* error) noexcept {
    const zr_code code = guard(error, [&] {
      for (uint32_t i = 0; i < n; ++i) {
        const zr_update_slice& u = *slices[i];
        zr_param param{sizeof(zr_param), 0, u.name, u.shape, u.ndim, u.group, 1, 0, 0};
        for (int32_t d = 0; d < u.ndim; ++d) param.count *= u.shape[d];
        std::vector<uint32_t> sums;
        static_cast<const SummingLayer*>(self)->group_of(param).passes(param, sums);
        if (!sums.empty())
          throw PluginError(ZR_STATE, std::string("parameter ") + u.name +
                                          ": step() was called, but its update needs sums over the parameter");
      }
    });
    return code == ZR_OK ? Base::step(self, step, slices, n, stream, done, error) : code;
  }
  static constexpr zr_optimizer_api api{sizeof(zr_optimizer_api), 0, Base::add_group, Base::describe, step};
  static const void* extension(const char* id) noexcept {
    return std::string_view(id) == "zr.optimizer.partial_sums/1" ? &partial_sums : Base::extension(id);
  }
  static constexpr zr_partial_sums_api partial_sums{sizeof(zr_partial_sums_api), 0, passes, add_up, update};
};

/// Base class of an author's optimizer with passes. In place of slots and granularity it has
/// `void describe(const zr_param&, zr::Description&) const`. Its other methods:
/// `void passes(const zr_param&, std::vector<uint32_t>& sums) const`: the number of sums per block of each pass; empty:
/// update() is called without passes, with u.sums null.
/// `void add_up(const zr::Update& u) const`: pass u.sums->pass; must not change weights.
/// `void update(const zr::Update& u) const`: the update; u.sums->totals has the totals of all passes.
template <class D>
struct SummingOptimizer : Optimizer<D> {
  using Layer = SummingLayer<D>;
};

}  // namespace sdk
}  // namespace zr
#pragma GCC visibility pop
