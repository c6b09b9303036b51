// Optimizers in C++: the arithmetic for one range of elements. The host owns all memory, the learning-rate schedule,
// gradient clipping, and the decision when to update.
//
// clang-format off
//   struct Descent : zr::Optimizer<Descent> {
//     static constexpr zr_key keys[] = {
//         zr::per_group(zr::key_float("momentum", "0.9", 0, 1, "Share of the last update that is kept"))};
//     static constexpr zr_slot slots[] = {zr::slot("velocity")};
//     float momentum;
//     explicit Descent(const zr::Config& config) : momentum(float(config.number("momentum"))) {}
//     void update(const zr::Update& u) const {
//       float* v = u.slot(0);
//       for (int64_t i = 0; i < u.count; ++i) {
//         v[i] = momentum * v[i] + u.mul * u.grad[i];
//         u.weight[i] -= float(u.lr) * v[i];
//       }
//     }
//   };
//   ZR_OPTIMIZER(Descent, "descent", "example", "1.0.0");
// clang-format on
//
// The layer creates one Descent per parameter group. update() is const and must not allocate, block or communicate:
// several threads call it at once, on different runs. A parameter may be cut into runs anywhere (unless `granularity`
// is set), so the result for an element may depend only on the values of that element. If the model's weights are not
// fp32, `weight` is the fp32 master weight, and the layer rounds it into the model's weight afterwards. A class with
// `static constexpr bool rounds = true` writes `out` itself, in the same pass: zr/rounding.hpp helps with that, and
// zr/isa.hpp compiles the loop per instruction set.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <deque>
#include <string_view>
#include <vector>

#include "zr/abi/optimizer.h"
#include "zr/component.hpp"
#include "zr/float_cast.hpp"

struct zr_sums;  // zr/abi/draft/partial_sums.h

#pragma GCC visibility push(hidden)
namespace zr {
inline namespace sdk {

/// A range of one parameter, valid during the call. The arrays do not overlap.
struct Update {
  float* weight;                 // in/out: the fp32 master weight
  const float* grad;             // in; multiply by mul, once, in fp32
  int64_t first, count;          // the range, as indices into the flattened parameter
  float mul;                     // loss unscaling, mean and clipping in one factor
  int64_t step;                  // step count of this parameter: 1 at its first update
  double lr;                     // from the schedule, with the scale of the group applied
  uint16_t* out;                 // output, undefined on entry: the model's weight; null if that is `weight`
  zr_dtype out_dtype;            // ZR_BF16, ZR_F16, or ZR_F32 if out is null
  bool streams;                  // the parameter's `out` exceeds a core's cache: use non-temporal stores for it
  const zr_update_slice& slice;  // name, shape; may hold more elements than this range
  const zr_step& job;            // step count of the job, gradient norm
  const zr_sums* sums;           // of optimizers with passes (zr/partial_sums.hpp); otherwise null
  /// The elements of state `i` for this update, of a state that does not have the shape of the parameter. Classes with
  /// describe() get complete slices.
  template <class T>
  T* state(uint32_t i) const {
    return data<T>(slice.slots[i]);
  }
  /// The elements of fp32 state `i` for this update.
  float* slot(uint32_t i) const { return data<float>(slice.slots[i]) + (first - slice.first); }
};

/// An optimizer state with the shape of the parameter, fp32 by default. The host allocates it, zeroed.
constexpr zr_slot slot(const char* name, zr_dtype dtype = ZR_F32, uint32_t flags = 0) {
  return zr_slot{name, dtype, ZR_SLOT_LIKE_PARAM, flags, 0};
}

/// What describe() of an author's class declares about the update of one parameter.
struct Description {
  uint32_t granularity = ZR_ELEMENTWISE;  // ZR_ROWWISE, ... (draft)
  std::vector<zr_slot> slots;             // the optimizer states of the parameter
  double cost = 0;                        // see zr_optimizer_desc; 0: the number of elements
};

ZR_DETECT(has_slots, slots);
ZR_DETECT(has_describe, describe);
ZR_DETECT(has_granularity, granularity);
ZR_DETECT(has_rounds, rounds);
ZR_DETECT(has_n_slots, n_slots);
ZR_DETECT(has_needs, needs);
ZR_DETECT(has_ignores_norm, ignores_norm);
ZR_DETECT(has_gradients, gradients);
ZR_DETECT(has_bind, bind);
ZR_DETECT(has_save_globals, save_globals);
ZR_DETECT(has_load_global, load_global);
ZR_DETECT(has_update_on_device, update_on_device);
ZR_REQUIRE_CALL(can_update, std::declval<const T&>().update(std::declval<const Update&>()));
ZR_DETECT_ARRAY(has_slot_array, slot, zr_slot);
ZR_DETECT_ARRAY(has_states_array, states, zr_slot);
ZR_DETECT_NAME(has_describes, describes);
ZR_DETECT_NAME(has_descibe, descibe);
ZR_DETECT_NAME(has_granularty, granularty);
ZR_DETECT_NAME(has_save_global, save_global);
ZR_DETECT_NAME(has_load_globals, load_globals);

/// True if `slots` is an array, or if the class has no `slots`.
template <class T>
constexpr bool slots_are_array() {
  if constexpr (has_slots<T>) return std::is_array_v<decltype(T::slots)>;
  return true;
}

/// The extension tables of draft headers. Each is defined in a header of its own, so that only a library that includes
/// it gets the tag of the draft: zr/local_gradients.hpp, zr/optimizer_globals.hpp, zr/device_optimizer.hpp.
template <class D>
struct LocalGradientsLayer;
template <class D>
struct GlobalsLayer;
template <class D>
struct DeviceLayer;
/// True if the header that defines the table T was included.
template <class T, class = void>
inline constexpr bool is_defined = false;
template <class T>
inline constexpr bool is_defined<T, std::void_t<decltype(sizeof(T))>> = true;

template <class D>
class OptimizerLayer {
 public:
  static constexpr const char* kind = "zr.optimizer/1";
  // The class meets the requirements, so that the tables can be made.
  static constexpr bool complete =
      can_update<D> && slots_are_array<D>() &&
      (has_slots<D> || !(has_slot_array<D> || has_states_array<D> || has_n_slots<D>)) &&
      (!has_gradients<D> || is_defined<LocalGradientsLayer<D>>)&&has_save_globals<D> == has_load_global<D> &&
      (!has_save_globals<D> || is_defined<GlobalsLayer<D>>)&&(!has_update_on_device<D> ||
                                                              is_defined<DeviceLayer<D>>)&&!has_describes<D> &&
      !has_descibe<D> && !has_granularty<D> && !has_save_global<D> && !has_load_globals<D>;
  /// The component's extension tables, by id.
  static const void* extension(const char* id) noexcept {
    if constexpr (has_gradients<D> && is_defined<LocalGradientsLayer<D>>)
      if (std::strcmp(id, LocalGradientsLayer<D>::id) == 0) return &LocalGradientsLayer<D>::api;
    if constexpr (has_save_globals<D> && is_defined<GlobalsLayer<D>>)
      if (std::strcmp(id, GlobalsLayer<D>::id) == 0) return &GlobalsLayer<D>::api;
    if constexpr (has_update_on_device<D> && is_defined<DeviceLayer<D>>)
      if (std::strcmp(id, DeviceLayer<D>::id) == 0) return &DeviceLayer<D>::api;
    (void)id;
    return nullptr;
  }
  /// The object of group 0, which has the state that belongs to no parameter.
  static D& first_group(void* self) { return static_cast<OptimizerLayer*>(self)->groups_[0]; }
  /// The host that created the object.
  static const Host& host(void* self) { return static_cast<OptimizerLayer*>(self)->host_; }
  /// The object of the group of a slice that step() has validated.
  const D& group_of_slice(const zr_update_slice& u) const { return groups_[u.group]; }
  /// The object of a group; throws if the index is out of range.
  const D& group_at(uint32_t index) const {
    if (index < groups_.size()) return groups_[index];
    throw PluginError(ZR_INVALID, "group " + std::to_string(index) + " is out of range (" +
                                      std::to_string(groups_.size()) + " groups)");
  }

  // One sentence for each requirement that the author's class does not meet.
  static constexpr void check_class() {
    static_assert(slots_are_array<D>(), "slots is an array: static constexpr zr_slot slots[] = {...};");
    static_assert(can_update<D>, "an optimizer has the public method: void update(const zr::Update&) const");
    static_assert(has_slots<D> || !(has_slot_array<D> || has_states_array<D>),
                  "the array of an optimizer's states is named `slots`");
    static_assert(!has_describes<D> && !has_descibe<D>, "the method is named `describe`");
    static_assert(!has_granularty<D>, "the member is named `granularity`");
    static_assert(!has_save_global<D> && !has_load_globals<D>,
                  "the methods are named `save_globals` and `load_global`");
    static_assert(!has_n_slots<D> || has_slots<D>, "an optimizer with n_slots() has the array `slots`");
    static_assert(!has_gradients<D> || is_defined<LocalGradientsLayer<D>>, "gradients() needs zr/local_gradients.hpp");
    static_assert(!has_bind<D> || has_gradients<D>, "an optimizer with bind() has gradients()");
    static_assert(has_save_globals<D> == has_load_global<D>,
                  "an optimizer has both save_globals and load_global, or neither");
    static_assert(!has_save_globals<D> || is_defined<GlobalsLayer<D>>, "save_globals() needs zr/optimizer_globals.hpp");
    static_assert(!has_update_on_device<D> || is_defined<DeviceLayer<D>>,
                  "update_on_device() needs zr/device_optimizer.hpp");
  }

  OptimizerLayer(const Config& config, const Host& host) : host_(host) {
    const long bytes = sysconf(_SC_LEVEL2_CACHE_SIZE);
    if (bytes > 0) cache_bytes_ = bytes;
    add(config);
  }

  static zr_code describe(void* self, const zr_param* param, zr_optimizer_desc* out, zr_error* error) noexcept {
    return guard(error, [&] {
      zr_optimizer_desc desc{};
      if constexpr (has_needs<D>) desc.needs = D::needs;
      desc.granularity = granularity();
      desc.device_types = kCpuOnly;
      if constexpr (has_ignores_norm<D>) desc.flags = D::ignores_norm ? uint32_t{ZR_OPT_IGNORES_NORM} : 0u;
      if constexpr (has_update_on_device<D>) {
        desc.device_types |= D::device_types;
        desc.flags |= ZR_OPT_STREAMS;
      }
      if constexpr (has_describe<D>) {
        static_assert(!has_slots<D> && !has_granularity<D>, "describe() replaces the members slots and granularity");
        OptimizerLayer& layer = *static_cast<OptimizerLayer*>(self);
        Description description;
        layer.group_of(*param).describe(*param, description);
        desc.granularity = description.granularity;
        desc.cost = description.cost;
        const std::vector<zr_slot>& slots = layer.kept(std::move(description.slots));
        desc.slots = slots.data();
        desc.n_slots = static_cast<uint32_t>(slots.size());
      } else if constexpr (has_slots<D>) {
        desc.slots = D::slots;
        desc.n_slots = std::extent_v<decltype(D::slots)>;
        if constexpr (has_n_slots<D>) desc.n_slots = static_cast<OptimizerLayer*>(self)->groups_[0].n_slots();
      }
      write_output(out, desc);
    });
  }
  static zr_code add_group(void* self, uint32_t group, const zr_config* config, zr_error* error) noexcept {
    return guard(error, [&] {
      OptimizerLayer& layer = *static_cast<OptimizerLayer*>(self);
      if (group != layer.groups_.size()) {
        throw PluginError(ZR_STATE, "add_group: group " + std::to_string(group) + " was added, but group " +
                                        std::to_string(layer.groups_.size()) + " is next");
      }
      layer.add(Config(layer.host_, config));
    });
  }
  static zr_code step(void* self, const zr_step* step, const zr_update_slice* const* slices, uint32_t n,
                      zr_stream* stream, zr_done* done, zr_error* error) noexcept {
    return guard(error, [&] {
      if (stream && !(has_update_on_device<D> && is_defined<DeviceLayer<D>>)) {
        throw PluginError(ZR_UNSUPPORTED, "this optimizer updates host memory only, without a stream");
      }
      if (stream && done) throw PluginError(ZR_UNSUPPORTED, "this optimizer has no completions on a stream");
      const OptimizerLayer& layer = *static_cast<const OptimizerLayer*>(self);
      const zr_async_service* async = done ? &layer.host_.template need<zr_async_service>() : nullptr;
      for (uint32_t i = 0; i < n; ++i) layer.check(*slices[i]);
      const zr_step job = taken(*step);
      if constexpr (has_update_on_device<D> && is_defined<DeviceLayer<D>>)
        if (stream) return DeviceLayer<D>::step(layer, layer.host_, job, slices, n, stream);
      for (uint32_t i = 0; i < n; ++i) layer.update(*slices[i], job);
      if (async) async->done_resolve(done, ZR_OK, 0, nullptr);
    });
  }
  static constexpr zr_optimizer_api api{sizeof(zr_optimizer_api), 0, add_group, describe, step};

 protected:
  /// The hyperparameters of the parameter's group.
  const D& group_of(const zr_param& param) const {
    if (param.group >= groups_.size())
      throw PluginError(ZR_INVALID, std::string("parameter ") + param.name + ": group " + std::to_string(param.group) +
                                        " is out of range (" + std::to_string(groups_.size()) + " groups)");
    return groups_[param.group];
  }

 private:
  void add(const Config& config) {
    with_arguments<D>(config, host_, [&](const auto&... arguments) { groups_.emplace_back(arguments...); });
    groups_.back().first_group_ = &groups_.front();
  }
  /// The list of slots equal to `slots`, which lives as long as this object: zr_optimizer_desc points to it.
  const std::vector<zr_slot>& kept(std::vector<zr_slot> slots) {
    const auto equal = [](const zr_slot& a, const zr_slot& b) {
      return std::string_view(a.name) == b.name && a.dtype == b.dtype && a.shape == b.shape && a.flags == b.flags &&
             a.block == b.block;
    };
    for (const std::vector<zr_slot>& list : kept_)
      if (std::equal(list.begin(), list.end(), slots.begin(), slots.end(), equal)) return list;
    return kept_.emplace_back(std::move(slots));
  }

 protected:
  /// Validates one slice. step() validates all slices before it changes the first.
  void check(const zr_update_slice& u) const {
    const auto reject = [&](const std::string& why) {
      throw PluginError(ZR_INVALID, std::string("parameter ") + u.name + ": " + why);
    };
    const bool fp32 = u.weight.dtype == ZR_F32, low_precision = u.weight.dtype == ZR_BF16 || u.weight.dtype == ZR_F16;
    if (u.group >= groups_.size()) {
      reject("group " + std::to_string(u.group) + " is out of range (" + std::to_string(groups_.size()) + " groups)");
    }
    if (!fp32 && !low_precision)
      reject("weights must be fp32, bf16 or fp16, not dtype " + std::to_string(u.weight.dtype));
    if (u.grad.dtype != ZR_F32) reject("the reduced gradient must be fp32, not dtype " + std::to_string(u.grad.dtype));
    if (low_precision && u.master.dtype != ZR_F32) reject("bf16 and fp16 weights need fp32 master weights");
    if (u.weight.count != u.count || u.grad.count != u.count || (low_precision && u.master.count != u.count)) {
      reject("weight, master weight and gradient must have " + std::to_string(u.count) + " elements each");
    }
  }
  const D& group(const zr_update_slice& u) const { return groups_[u.group]; }  // of a valid slice
  static constexpr uint32_t granularity() {
    if constexpr (has_granularity<D>) return D::granularity;
    return ZR_ELEMENTWISE;
  }
  static constexpr bool rounds() {
    if constexpr (has_rounds<D>) return D::rounds;
    return false;
  }
  /// Calls fn(Update) for the parts of a slice.
  template <class F>
  void for_each_part(const zr_update_slice& u, const zr_step& step, const zr_sums* sums, const F& fn) const {
    const bool fp32 = u.weight.dtype == ZR_F32;
    uint16_t* out = fp32 ? nullptr : data<uint16_t>(u.weight);
    int64_t elements = 1;
    for (int32_t i = 0; i < u.ndim; ++i) elements *= u.shape[i];
    const bool copy = ZR_FITS(&u, zr_update_slice, flags) && (u.flags & ZR_SLICE_WEIGHT_COPY);
    // Cut the slice into blocks, if granularity permits, so that each block is still in the cache when it is rounded.
    constexpr int64_t kBlock = 16384;
    const bool cuts = granularity() == ZR_ELEMENTWISE && !has_describe<D>;
    const int64_t block = !fp32 && !rounds() && cuts ? kBlock : u.count;
    for (int64_t at = 0; at < u.count; at += block) {
      fn(Update{data<float>(fp32 ? u.weight : u.master) + at, data<const float>(u.grad) + at, u.first + at,
                std::min(block, u.count - at), step.grad_mul, u.step, u.lr, fp32 ? nullptr : out + at, u.weight.dtype,
                !copy && elements * 2 > cache_bytes_, u, step, sums});
    }
  }
  void update(const zr_update_slice& u, const zr_step& step, const zr_sums* sums = nullptr) const {
    for_each_part(u, step, sums, [&](const Update& part) {
      group(u).update(part);
      if (part.out && !rounds()) round(part);
    });
  }

 private:
  static void round(const Update& update) {
    if (update.out_dtype == ZR_BF16) {
      for (int64_t i = 0; i < update.count; ++i) update.out[i] = to_bf16(update.weight[i]);
    } else {
      for (int64_t i = 0; i < update.count; ++i) update.out[i] = to_f16(update.weight[i]);
    }
  }
  Host host_;
  int64_t cache_bytes_ = 1 << 20;
  std::deque<D> groups_;  // does not move its elements: a class may have a mutex
  std::deque<std::vector<zr_slot>> kept_;
};

/// Base class of an author's optimizer, which has the hyperparameters of one group, and update(). Optional static
/// members: keys, slots, granularity (ZR_ROWWISE, ...; default elementwise), rounds. Optional methods:
/// `uint32_t n_slots() const`, the number of slots that the configuration of group 0 needs; instead of slots and
/// granularity `void describe(const zr_param&, zr::Description&) const`, if parameters differ in them.
template <class D>
struct ZR_EXPORT Optimizer {
  // Further static members: needs (ZR_OPT_NEEDS_*), `const void* extension(const char* id) noexcept`, `void startup()`,
  // `void shutdown() noexcept`. zr/local_gradients.hpp, zr/optimizer_globals.hpp and zr/device_optimizer.hpp have
  // further methods.
  using Layer = OptimizerLayer<D>;

  /// The object of group 0, which all groups share: for values that belong to no parameter. Not in constructors. The
  /// object lives as long as the optimizer; update() of several threads may use it at once.
  const D& first_group() const { return *first_group_; }

 private:
  friend class OptimizerLayer<D>;
  const D* first_group_ = nullptr;
};

}  // namespace sdk
}  // namespace zr
#pragma GCC visibility pop

// Exports class CLASS as an optimizer with the id ID, as the only component of this library. Once per library, at
// namespace scope.
#define ZR_OPTIMIZER(CLASS, ID, VENDOR, VERSION)                                         \
  ZR_TAG(kind_optimizer_1);                                                              \
  ZR_ID_TAG(optimizer, ID);                                                              \
  ZR_MODULE_WITH(ID, VENDOR, VERSION, zr::startup_of<CLASS>(), zr::shutdown_of<CLASS>(), \
                 zr::only_component<CLASS>(ID, VERSION))
