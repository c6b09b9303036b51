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
//     zr_view grad_destination(uint32_t param, int64_t& first, uint32_t micro);  // count 0: no buffer is free yet;
//                                                                         // `first` unchanged: runs ascend
//     void grad_ready(uint32_t param, int64_t first, int64_t count, uint32_t micro);
//     void event(uint32_t kind, uint32_t micro);                          // ZR_STEP_BEGIN ... ZR_EVAL_END
//     void grads_finish();
//     void updated();
//     void acquire(const uint32_t* params, uint32_t n, uint32_t phase, zr_view* full);  // acquire, release: optional
//     void release(const uint32_t* params, uint32_t n, uint32_t phase);   // if every rank always holds all weights
//     void abort() noexcept;                                              // optional
//   };
//   ZR_STRATEGY(Mine, "mine", "example", "1.0.0");
// clang-format on
//
// Threads: plan and bind are [control]; grad_destination, grad_ready, event, acquire and release are [use] (any thread,
// never two at once, so no lock is needed); grads_finish and updated are [step]; abort is [any] and may run at the same
// time as any other call.
//
// Lifetimes: zr_plan_in of bind(), its parameters, the buffers' memory and Binding::comm live as long as the instance.
// The zr_plan_in of plan() is valid only until plan() returns, because the host also asks for plans of other worlds.
//
// An exception ends the job: throw zr::PluginError with a message that names the parameter.
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
/// memory lives as long as the instance.
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
/// The ZR_BUFFER_* flags for a buffer of full weights: ZR_BUFFER_SHARED if the ranks share weights, else 0.
inline uint32_t shared_weights_flag(const zr_plan_in& in) {
  return ZR_HAS(&in, zr_plan_in, flags) && (in.flags & ZR_PLAN_SHARE_WEIGHTS) ? ZR_BUFFER_SHARED : 0;
}

ZR_DETECT(has_abort, abort);
ZR_DETECT(has_acquire, acquire);

template <class D>
class StrategyLayer {
 public:
  static constexpr const char* kind = "zr.strategy/1";
  StrategyLayer(const Config& config, const Host& host)
      : host_(host),
        plugin_(with_arguments<D>(config, host, [](const auto&... arguments) { return D(arguments...); })) {}

  static zr_code plan(void* self, const zr_plan_in* in, const zr_plan_sink* sink, zr_error* error) noexcept {
    return guard(error, [&] {
      PlanBuilder out(*sink);
      const_cast<const D&>(plugin_of(self)).plan(*in, out);
    });
  }
  static zr_code bind(void* self, const zr_plan_in* in, const zr_bind* bound, zr_error* error) noexcept {
    return guard(error, [&] {
      const Binding binding{bound->buffers, bound->n_buffers,
                            Comm(static_cast<StrategyLayer*>(self)->host_, bound->comm)};
      plugin_of(self).bind(*in, binding);
    });
  }
  static zr_code grad_destination(void* self, uint32_t param, int64_t* first, uint32_t micro, zr_view* dst,
                                  zr_error* error) noexcept {
    return guard(error, [&]() -> zr_code {
      int64_t next = *first;
      const zr_view destination = plugin_of(self).grad_destination(param, next, micro);
      if (destination.count == 0) return ZR_AGAIN;
      *first = next;
      *dst = destination;
      return ZR_OK;
    });
  }
  static zr_code grad_ready(void* self, uint32_t param, int64_t first, int64_t count, uint32_t micro,
                            zr_error* error) noexcept {
    return guard(error, [&] { plugin_of(self).grad_ready(param, first, count, micro); });
  }
  static zr_code event(void* self, uint32_t kind, uint32_t micro, zr_error* error) noexcept {
    return guard(error, [&] { plugin_of(self).event(kind, micro); });
  }
  static zr_code grads_finish(void* self, zr_error* error) noexcept {
    return guard(error, [&] { plugin_of(self).grads_finish(); });
  }
  static zr_code updated(void* self, zr_error* error) noexcept {
    return guard(error, [&] { plugin_of(self).updated(); });
  }
  /// The author's acquire() is complete on return, so `done` is resolved at once.
  static zr_code acquire(void* self, const uint32_t* params, uint32_t n, uint32_t phase, zr_view* full, zr_done* done,
                         zr_error* error) noexcept {
    return guard(error, [&] {
      if constexpr (has_acquire<D>) plugin_of(self).acquire(params, n, phase, full);
      if (done) Done::retained(static_cast<StrategyLayer*>(self)->host_, done).resolve();
    });
  }
  /// Waits for `after`, then releases.
  static zr_code release(void* self, const uint32_t* params, uint32_t n, uint32_t phase, zr_done* after,
                         zr_error* error) noexcept {
    return guard(error, [&] {
      if (after) Done::retained(static_cast<StrategyLayer*>(self)->host_, after).wait();
      if constexpr (has_acquire<D>) plugin_of(self).release(params, n, phase);
    });
  }
  static void abort(void* self) noexcept {
    if constexpr (has_abort<D>) plugin_of(self).abort();
  }
  static constexpr zr_strategy_api api{sizeof(zr_strategy_api),
                                       0,
                                       plan,
                                       bind,
                                       grad_destination,
                                       grad_ready,
                                       event,
                                       grads_finish,
                                       updated,
                                       has_acquire<D> ? acquire : nullptr,
                                       has_acquire<D> ? release : nullptr,
                                       abort};

 private:
  static D& plugin_of(void* self) { return static_cast<StrategyLayer*>(self)->plugin_; }
  Host host_;
  D plugin_;
};

/// Base class of an author's strategy.
template <class D>
struct Strategy {
  using Layer = StrategyLayer<D>;
};

}  // namespace sdk
}  // namespace zr
#pragma GCC visibility pop

// Exports class CLASS as a strategy with the id ID, as the only component of this library. Once per library, at
// namespace scope.
#define ZR_STRATEGY(CLASS, ID, VENDOR, VERSION) \
  ZR_TAG(kind_strategy);                        \
  ZR_MODULE(ID, VENDOR, VERSION, zr::component<CLASS>(ID, VERSION))
