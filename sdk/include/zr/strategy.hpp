// Strategies in C++: which rank owns which part of the model's state, and when it is communicated. The host allocates
// the buffers that plan() describes; the strategy issues its collectives itself.
//
// clang-format off
//   class Mine : public zr::Strategy<Mine> {
//    public:
//     static constexpr zr_key keys[] = {...};                             // optional
//     explicit Mine(const zr::Config&);                                   // or (Config, Host), (Host), ()
//     void plan(const zr_plan_in&, zr::PlanBuilder&) const;
//     void bind(const zr_plan_in&, const zr::Binding&);
//     zr_view grad_destination(uint32_t param, int64_t& first, const zr_use&);  // count 0: no buffer is free yet;
//                                                                         // `first` unchanged: ranges ascend
//     void grad_ready(uint32_t param, int64_t first, int64_t count, const zr_use&);
//     void event(uint32_t kind, const zr_use&);                           // ZR_STEP_BEGIN ... ZR_EVAL_END
//     void grads_finish(const zr_use&);
//     void updated(const zr_use&);
//     void acquire(const uint32_t* params, uint32_t n, const zr_use&, zr_view* full);   // acquire, release: optional
//     void release(const uint32_t* params, uint32_t n, const zr_use&);    // if every rank always holds all weights
//     static constexpr uint32_t flags = ZR_STRATEGY_STREAMS;              // optional: it accepts streams, which Comm
//                                                                         // passes on,
//     static constexpr uint64_t device_types = zr::kAnyDevice;            // optional: and memory of other devices
//     static constexpr bool resolves = true;                              // optional: it resolves zr_use::done itself
//   };
//   ZR_STRATEGY(Mine, "mine", "example", "1.0.0");
// clang-format on
//
// Threads: plan and bind are [control]; grad_destination, grad_ready, event, acquire and release are [use] (any thread,
// never two at once, so no lock is needed); grads_finish and updated are [step].
//
// Lifetimes: zr_plan_in of bind(), its parameters, the buffers' memory and Binding::comm live until the
// instance is destroyed; its destructor uses none of them.
// The zr_plan_in of plan() is valid only until plan() returns, because the host also asks for plans of other worlds.
//
// Completions: without `resolves`, every call is complete when the method returns, and the layer resolves zr_use::done.
//
// An exception ends the job: throw zr::PluginError with a message that names the parameter.
//
// Optional static methods of every role (zr/component.hpp): `const void* extension(const char* id) noexcept` returns a
// table of optional functions; `void startup()` is called before the first instance is created and may throw, `void
// shutdown() noexcept` after the last one was destroyed, and both may be called again.
#pragma once

#include "zr/abi/strategy.h"
#include "zr/collective.hpp"
#include "zr/component.hpp"
#include "zr/names.hpp"
#include "zr/round_up.hpp"

#pragma GCC visibility push(hidden)
namespace zr {
inline namespace sdk {

/// Receives the result of plan(): first all buffers, then pieces in ascending order of parameter and element.
class PlanBuilder {
 public:
  /// `sink`: as plan() received it; it must outlive the builder.
  explicit PlanBuilder(const zr_plan_sink& sink) : sink_(sink) {}
  /// Requests zeroed memory on this rank that peers can read. Returns its number: 0, 1, ... tag (copied) is its name in
  /// the memory ledger.
  uint32_t buffer(uint32_t role, const char* tag, int64_t elements, zr_dtype dtype, uint32_t flags = 0) {
    zr_buffer buffer{};
    buffer.size = sizeof buffer;
    buffer.role = role;
    buffer.tag = tag;
    buffer.elements = elements;
    buffer.dtype = dtype;
    buffer.flags = flags;
    sink_.buffer(sink_.ctx, &buffer);
    return n_buffers_++;
  }
  /// Elements [first, first + count) of a parameter are stored at element `offset` of a buffer.
  void piece(uint32_t role, uint32_t param, uint32_t buffer, int64_t first, int64_t count, int64_t offset) {
    zr_piece piece{};
    piece.size = sizeof piece;
    piece.role = role;
    piece.param = param;
    piece.buffer = buffer;
    piece.first = first;
    piece.count = count;
    piece.offset = offset;
    sink_.piece(sink_.ctx, &piece);
  }

 private:
  const zr_plan_sink& sink_;
  uint32_t n_buffers_ = 0;
};

/// The argument of bind(). The list `buffers` is valid until bind() returns, so copy the views that are needed; the
/// memory lives until the instance is destroyed, and its destructor does not use it.
struct Binding {
  const zr_view* buffers;  // in plan order
  uint32_t n_buffers;      // length of `buffers`
  Comm comm;               // copyable
};

/// Bytes per element; 1 for ZR_NONE.
constexpr int64_t bytes_of(zr_dtype dtype) { return size_of(dtype) > 0 ? size_of(dtype) : 1; }
/// Elements [first, first + count) of a view.
inline zr_view part(const zr_view& view, int64_t first, int64_t count) {
  return part(view, first, count, bytes_of(view.dtype));
}
/// The ZR_BUFFER_* flags for a buffer of full weights: ZR_BUFFER_SHARED if the ranks of a host share weights, else 0.
inline uint32_t shared_weights_flag(const zr_plan_in& in) {
  const uint32_t sharing = uint32_t{ZR_PLAN_SHARE_WEIGHTS} | ZR_PLAN_SHARE_ON_HOSTS;
  return ZR_HAS(&in, zr_plan_in, flags) && (in.flags & sharing) ? ZR_BUFFER_SHARED : 0;
}
/// Why shared_weights_flag() is 0, as a part of a message; "": it is not, or the reason is unknown.
inline std::string sharing_obstacle(const zr_plan_in& in) {
  return ZR_HAS(&in, zr_plan_in, sharing_obstacle) ? in.sharing_obstacle : "";
}
/// Whether the ranks are on more than one host.
inline bool several_hosts(const zr_plan_in& in) {
  return ZR_HAS(&in, zr_plan_in, flags) && (in.flags & ZR_PLAN_SEVERAL_HOSTS);
}

/// The tag of a buffer of full weights, for which shared_weights_flag() is the flag.
inline const char* weights_tag(const zr_plan_in& in) {
  if (!shared_weights_flag(in)) return "weights, unsharded";
  return several_hosts(in) ? "weights, one copy per host" : "weights, shared by all ranks";
}

ZR_DETECT(has_acquire, acquire);
ZR_DETECT(has_release, release);
ZR_DETECT(has_flags, flags);
ZR_DETECT(has_device_types, device_types);
ZR_DETECT(has_resolves, resolves);
ZR_REQUIRE_CALL(can_plan,
                std::declval<const T&>().plan(std::declval<const zr_plan_in&>(), std::declval<PlanBuilder&>()));
ZR_REQUIRE_CALL(can_bind, std::declval<T&>().bind(std::declval<const zr_plan_in&>(), std::declval<const Binding&>()));
ZR_REQUIRE_CALL(can_grad_destination, std::declval<T&>().grad_destination(uint32_t{}, std::declval<int64_t&>(),
                                                                          std::declval<const zr_use&>()));
ZR_REQUIRE_CALL(can_grad_ready,
                std::declval<T&>().grad_ready(uint32_t{}, int64_t{}, int64_t{}, std::declval<const zr_use&>()));
ZR_REQUIRE_CALL(can_event, std::declval<T&>().event(uint32_t{}, std::declval<const zr_use&>()));
ZR_REQUIRE_CALL(can_grads_finish, std::declval<T&>().grads_finish(std::declval<const zr_use&>()));
ZR_REQUIRE_CALL(can_updated, std::declval<T&>().updated(std::declval<const zr_use&>()));

template <class D>
class StrategyLayer {
 public:
  static constexpr const char* kind = "zr.strategy/1";
  // The class has the methods that every strategy has.
  static constexpr bool complete = can_plan<D> && can_bind<D> && can_grad_destination<D> && can_grad_ready<D> &&
                                   can_event<D> && can_grads_finish<D> && can_updated<D> &&
                                   has_acquire<D> == has_release<D>;
  StrategyLayer(const Config& config, const Host& host)
      : host_(host),
        plugin_(with_arguments<D>(config, host, [](const auto&... arguments) { return D(arguments...); })) {}

  static zr_code describe(void*, zr_strategy_desc* out, zr_error* error) noexcept {
    return guard(error, [&] {
      zr_strategy_desc desc{};
      if constexpr (has_flags<D>) desc.flags = D::flags;
      desc.device_types = kCpuOnly;
      if constexpr (has_device_types<D>) desc.device_types = D::device_types;
      write_output(out, desc);
    });
  }
  static zr_code plan(void* self, const zr_plan_in* in, const zr_plan_sink* sink, zr_error* error) noexcept {
    return guard(error, [&] {
      PlanBuilder out(*sink);
      const_cast<const D&>(plugin_of(self)).plan(taken(*in), out);
    });
  }
  static zr_code bind(void* self, const zr_plan_in* in, const zr_bind* bound, zr_error* error) noexcept {
    return guard(error, [&] {
      StrategyLayer& layer = layer_of(self);
      layer.in_ = taken(*in);
      layer.plugin_.bind(layer.in_, {bound->buffers, bound->n_buffers, Comm(layer.host_, bound->comm, &layer.stream_)});
    });
  }
  static zr_code grad_destination(void* self, uint32_t param, int64_t* first, const zr_use* use, zr_view* dst,
                                  zr_error* error) noexcept {
    return guard(error, [&]() -> zr_code {
      int64_t next = *first;
      const zr_use own = taken(*use);
      layer_of(self).stream_ = own.stream;
      const zr_view destination = plugin_of(self).grad_destination(param, next, own);
      if (destination.count == 0) return ZR_AGAIN;
      *first = next;
      *dst = destination;
      return ZR_OK;
    });
  }
  static zr_code grad_ready(void* self, uint32_t param, int64_t first, int64_t count, const zr_use* use,
                            zr_error* error) noexcept {
    return call(self, use, error, [&](D& plugin, const zr_use& own) { plugin.grad_ready(param, first, count, own); });
  }
  static zr_code event(void* self, uint32_t event_kind, const zr_use* use, zr_error* error) noexcept {
    return call(self, use, error, [&](D& plugin, const zr_use& own) { plugin.event(event_kind, own); });
  }
  static zr_code grads_finish(void* self, const zr_use* use, zr_error* error) noexcept {
    return call(self, use, error, [&](D& plugin, const zr_use& own) { plugin.grads_finish(own); });
  }
  static zr_code updated(void* self, const zr_use* use, zr_error* error) noexcept {
    return call(self, use, error, [&](D& plugin, const zr_use& own) { plugin.updated(own); });
  }
  static zr_code acquire(void* self, const uint32_t* params, uint32_t n, const zr_use* use, zr_view* full,
                         zr_error* error) noexcept {
    return call(self, use, error, [&](D& plugin, const zr_use& own) {
      if constexpr (has_acquire<D>) plugin.acquire(params, n, own, full);
    });
  }
  static zr_code release(void* self, const uint32_t* params, uint32_t n, const zr_use* use, zr_error* error) noexcept {
    return call(self, use, error, [&](D& plugin, const zr_use& own) {
      if constexpr (has_acquire<D>) plugin.release(params, n, own);
    });
  }
  static constexpr zr_strategy_api api{sizeof(zr_strategy_api),
                                       0,
                                       describe,
                                       plan,
                                       bind,
                                       grad_destination,
                                       grad_ready,
                                       event,
                                       grads_finish,
                                       updated,
                                       has_acquire<D> ? acquire : nullptr,
                                       has_acquire<D> ? release : nullptr};

  // One sentence for each requirement that the author's class does not meet.
  static constexpr void check_class() {
    static_assert(can_plan<D>,
                  "a strategy has the public method: void plan(const zr_plan_in&, zr::PlanBuilder&) const");
    static_assert(can_bind<D>, "a strategy has the public method: void bind(const zr_plan_in&, const zr::Binding&)");
    static_assert(
        can_grad_destination<D>,
        "a strategy has the public method: zr_view grad_destination(uint32_t param, int64_t& first, const zr_use&)");
    static_assert(can_grad_ready<D>,
                  "a strategy has the public method: void grad_ready(uint32_t param, int64_t first, int64_t count, "
                  "const zr_use&)");
    static_assert(can_event<D>, "a strategy has the public method: void event(uint32_t kind, const zr_use&)");
    static_assert(can_grads_finish<D>, "a strategy has the public method: void grads_finish(const zr_use&)");
    static_assert(can_updated<D>, "a strategy has the public method: void updated(const zr_use&)");
    static_assert(has_acquire<D> == has_release<D>, "a strategy has both acquire and release, or neither");
  }

 private:
  static StrategyLayer& layer_of(void* self) { return *static_cast<StrategyLayer*>(self); }
  static D& plugin_of(void* self) { return layer_of(self).plugin_; }
  /// Calls fn(plugin, use), and resolves the completion of the call unless the plug-in does.
  template <class F>
  static zr_code call(void* self, const zr_use* given, zr_error* error, F&& fn) noexcept {
    return guard(error, [&] {
      const zr_use use = taken(*given);
      layer_of(self).stream_ = use.stream;
      fn(plugin_of(self), use);
      if constexpr (!resolves())
        if (use.done) Done::retained(layer_of(self).host_, use.done).resolve();
    });
  }
  static constexpr bool resolves() {
    if constexpr (has_resolves<D>) return D::resolves;
    return false;
  }
  Host host_;
  zr_plan_in in_{};              // of bind()
  zr_stream* stream_ = nullptr;  // of the current call
  D plugin_;
};

/// Base class of an author's strategy.
template <class D>
struct ZR_EXPORT Strategy {
  using Layer = StrategyLayer<D>;
};

}  // namespace sdk
}  // namespace zr
#pragma GCC visibility pop

// Exports class CLASS as a strategy with the id ID, as the only component of this library. Once per library, at
// namespace scope.
#define ZR_STRATEGY(CLASS, ID, VENDOR, VERSION)                                          \
  ZR_TAG(kind_strategy_1);                                                               \
  ZR_ID_TAG(strategy, ID);                                                               \
  ZR_MODULE_WITH(ID, VENDOR, VERSION, zr::startup_of<CLASS>(), zr::shutdown_of<CLASS>(), \
                 zr::only_component<CLASS>(ID, VERSION))
