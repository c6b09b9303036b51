// A strategy that gives each parameter to one rank, and its defects. The owner has the parameter's weights, states and
// reduced gradient; acquire() broadcasts the weights.
#include "zr/abi/strategy.h"

#include <pthread.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "module.hpp"

namespace {

enum Defect {
  none,
  no_cpu_memory,
  unknown_buffer_flag,
  cuts_norm_block,
  ignores_cut_block,
  misaligned_piece,
  reserves_too_little,
  unordered_pieces,
  piece_of_frozen,
  forgets_a_parameter,
  impure_plan,
  plan_depends_on_calls,
  weights_elsewhere,
  null_acquire,
  forgets_accumulate,
  adds_micro_steps_first,
  sums_too_early,
  keeps_gathered,
  depends_on_order,
  again_forever,
  clears_held_gradient,
  keeps_gathered_if_shared,
  keeps_gathered_on_hosts,
  needs_updated,
  bound_to_a_thread,
  never_resolves,
  resolves_twice,
  rejects_unknown_event,
  hides_failure,
  changes_code,
  corrects_sums_at_the_end,
  drops_stream,
  reads_memory_of_device,
  keeps_plan,
  keeps_use,
  rejects_longer_structs,
  output_too_long,
  throws_if_comm_fails,
  output_too_short,
  throws_in_describe,
  throws_in_plan,
  throws_in_bind,
  throws_in_grad_destination,
  throws_in_grad_ready,
  throws_in_event,
  throws_in_grads_finish,
  throws_in_updated,
  throws_in_acquire,
  throws_in_release,
  throws_in_create,
  throws_in_destroy
};
constexpr Defect kDefect = ZR_MUTANT;

struct Parameter {
  std::string name;
  int64_t count = 0, grad_at = 0, full_at = 0, own_at = 0;  // elements
  int owner = 0;
  bool frozen = false;
};

struct Strategy {
  const zr_host* host;
  std::vector<Parameter> params;
  zr_plan_in in{};
  zr_comm_ref comm{};
  zr_view full{}, grads{}, weights{}, sums{}, extra{};
  std::vector<uint32_t> ready;
  std::set<uint32_t> gathered;
  bool in_step = false;
  pthread_t thread{};
  int planned = 0;
  int64_t most_grads = 0;
  const zr_plan_in* kept_plan = nullptr;
  zr_stream* stream = nullptr;  // of the current call
};

int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
int64_t width(zr_dtype dtype) { return dtype == ZR_F32 ? 4 : 2; }
zr_view part(const zr_view& view, int64_t first, int64_t count) {
  zr_view one = view;
  one.data = static_cast<char*>(view.data) + first * width(view.dtype);
  one.count = count;
  return one;
}

zr_plan_in taken(const zr_plan_in& given) {
  zr_plan_in in;
  ZR_TAKE(&in, &given);
  return in;
}

struct Sizes {
  int64_t full = 0, grads = 0, weights = 0, sums = 0;
};
std::vector<Parameter> layout(const zr_plan_in& in, Sizes& sizes) {
  std::vector<Parameter> params;
  for (uint32_t p = 0; p < in.n_params; ++p) {
    const zr_param& given = *in.params[p];
    Parameter one{given.name,
                  given.count,
                  sizes.grads,
                  sizes.full,
                  0,
                  static_cast<int>(p % static_cast<uint32_t>(in.world)),
                  (given.flags & ZR_PARAM_FROZEN) != 0};
    const int64_t padded = round_up(given.count, in.align);
    sizes.full += padded;
    if (!one.frozen) sizes.grads += padded;
    if (one.owner == in.rank) {
      one.own_at = sizes.weights;
      sizes.weights += padded;
    }
    params.push_back(one);
  }
  return params;
}

zr_code create(const zr_host* host, const zr_config*, void** self, zr_error*) {
  *self = new Strategy{host, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, false, {}, 0, 0, nullptr, nullptr};
  return ZR_OK;
}
void destroy(void* self) { delete static_cast<Strategy*>(self); }

zr_code describe(void*, zr_strategy_desc* out, zr_error*) {
  zr_strategy_desc desc{sizeof(zr_strategy_desc), 0, 1u << ZR_DEVICE_CPU};
  if (kDefect == no_cpu_memory) desc.device_types = 1u << ZR_DEVICE_CUDA;
  if (kDefect == none || kDefect == drops_stream || kDefect == reads_memory_of_device) {
    desc.flags = ZR_STRATEGY_STREAMS;
    desc.device_types = ~uint64_t{0};
  }
  mutant::write_output(out, desc);
  if (kDefect == output_too_short) out->size = 15;
  if (kDefect == output_too_long) std::memset(reinterpret_cast<char*>(out) + out->size, 0, 4);
  return ZR_OK;
}

void add_buffer(const zr_plan_sink& sink, uint32_t role, const char* tag, int64_t elements, zr_dtype dtype) {
  zr_buffer buffer{sizeof(zr_buffer), role, tag, elements, dtype, 0};
  if (kDefect == unknown_buffer_flag) buffer.flags = 1u << 7;
  if (kDefect == reserves_too_little && role == ZR_ROLE_REDUCED_GRAD) buffer.elements /= 2;
  sink.buffer(sink.ctx, &buffer);
}

void add_pieces(const zr_plan_in& in, const zr_plan_sink& sink, const std::vector<Parameter>& params, uint32_t role) {
  std::vector<zr_piece> pieces;
  for (uint32_t p = 0; p < params.size(); ++p) {
    const Parameter& one = params[p];
    int owner = one.owner;
    if (kDefect == weights_elsewhere && role == ZR_ROLE_REDUCED_GRAD && in.world == 5) owner = (owner + 1) % 5;
    if (owner != in.rank || one.count == 0) continue;
    if (role == ZR_ROLE_REDUCED_GRAD && one.frozen && kDefect != piece_of_frozen) continue;
    if (kDefect == forgets_a_parameter && in.world == 5 && p == 4 && role == ZR_ROLE_REDUCED_GRAD) continue;
    zr_piece piece{sizeof(zr_piece), role, p, role == ZR_ROLE_REDUCED_GRAD ? 3u : 2u, 0, one.count, one.own_at};
    if (owner != one.owner) piece.offset = 0;
    if (kDefect == misaligned_piece && one.count == 1) piece.offset += 1;
    if (kDefect == cuts_norm_block && one.count == 5000) {
      pieces.push_back({sizeof(zr_piece), role, p, piece.buffer, 0, 1000, piece.offset});
      piece = {sizeof(zr_piece), role, p, piece.buffer, 1000, 4000, piece.offset + round_up(1000, in.align)};
    }
    if (kDefect == ignores_cut_block && one.count == 5000) {  // cut at a multiple of norm_block
      pieces.push_back({sizeof(zr_piece), role, p, piece.buffer, 0, in.norm_block, piece.offset});
      piece.first = in.norm_block, piece.count -= in.norm_block, piece.offset += in.norm_block;
    }
    pieces.push_back(piece);
  }
  if (kDefect == unordered_pieces) std::reverse(pieces.begin(), pieces.end());
  if (kDefect == weights_elsewhere && role == ZR_ROLE_REDUCED_GRAD && in.world == 5) {
    int64_t at = 0;
    for (zr_piece& piece : pieces) piece.offset = at, at += round_up(piece.count, in.align);
  }
  for (const zr_piece& piece : pieces) sink.piece(sink.ctx, &piece);
}

zr_code plan(void* self, const zr_plan_in* given, const zr_plan_sink* sink, zr_error* error) {
  auto& s = *static_cast<Strategy*>(self);
  if (kDefect == rejects_longer_structs && given->size > sizeof *given)
    return mutant::fill(error, ZR_UNSUPPORTED, "zr_plan_in is too long");
  const zr_plan_in in = taken(*given);
  Sizes sizes;
  const std::vector<Parameter> params = layout(in, sizes);
  if (kDefect == keeps_plan) s.kept_plan = given;
  const std::string tag = kDefect == impure_plan ? "gradients " + std::to_string(s.planned++) : "gradients";
  const int64_t extra = in.world == 5 && kDefect == weights_elsewhere ? sizes.full : 0;
  add_buffer(*sink, ZR_ROLE_ALL_GATHER, "gathered weights", sizes.full, in.weight_dtype);
  s.most_grads = std::max(s.most_grads, sizes.grads);
  const int64_t grads = kDefect == plan_depends_on_calls ? s.most_grads : sizes.grads;
  add_buffer(*sink, ZR_ROLE_GRAD, tag.c_str(), grads, in.grad_dtype);
  add_buffer(*sink, ZR_ROLE_WEIGHT_SHARD, "weights", sizes.weights + (kDefect == cuts_norm_block ? 64 : 0),
             in.weight_dtype);
  add_buffer(*sink, ZR_ROLE_REDUCED_GRAD, "sums", sizes.weights + extra + (kDefect == cuts_norm_block ? 64 : 0),
             in.reduced_grad_dtype);
  add_buffer(*sink, ZR_ROLE_BUCKET, "extra", kDefect == adds_micro_steps_first ? sizes.weights : 0,
             in.reduced_grad_dtype);
  add_pieces(in, *sink, params, ZR_ROLE_WEIGHT_SHARD);
  add_pieces(in, *sink, params, ZR_ROLE_REDUCED_GRAD);
  return ZR_OK;
}

zr_code bind(void* self, const zr_plan_in* in, const zr_bind* bound, zr_error*) {
  auto& s = *static_cast<Strategy*>(self);
  if (kDefect == keeps_plan) mutant::read(s.kept_plan->size);
  s.in = taken(*in);
  Sizes sizes;
  s.params = layout(s.in, sizes);
  s.full = bound->buffers[0];
  s.grads = bound->buffers[1];
  s.weights = bound->buffers[2];
  s.sums = bound->buffers[3];
  s.extra = bound->buffers[4];
  s.comm = bound->comm;
  s.thread = pthread_self();
  return ZR_OK;
}

zr_code submit(Strategy& s, const zr_coll& coll, zr_done* done, zr_error* error) {
  zr_stream* const stream = kDefect == drops_stream ? nullptr : s.stream;
  const zr_code code = s.comm.api->submit(s.comm.comm, &coll, stream, done, error);
  if (code != ZR_OK && kDefect == throws_if_comm_fails) throw std::runtime_error("a collective failed");
  if (code != ZR_OK && kDefect == hides_failure) return ZR_OK;
  return code != ZR_OK && kDefect == changes_code ? zr_code{ZR_INTERNAL} : code;
}

// Checks what every call of [use] functions has in common.
zr_code begin(Strategy& s, const zr_use* use, zr_error* error) {
  static const zr_use* kept = nullptr;
  if (kDefect == keeps_use && kept) mutant::read(kept->size);
  if (kDefect == keeps_use) kept = use;
  zr_use own;
  ZR_TAKE(&own, use);
  s.stream = own.stream;
  if (kDefect == bound_to_a_thread && !pthread_equal(s.thread, pthread_self()))
    return mutant::fill(error, ZR_STATE, "called from another thread");
  return ZR_OK;
}
void resolve(const Strategy& s, const zr_use* use) {
  if (!use->done || kDefect == never_resolves) return;
  const auto* async = mutant::service<zr_async_service>(s.host, "zr.host.async/1");
  async->done_resolve(use->done, ZR_OK, 0, nullptr);
  if (kDefect == resolves_twice) async->done_resolve(use->done, ZR_OK, 0, nullptr);
}

bool holds(const Strategy& s) { return s.in.flags & ZR_PLAN_HOLD_GRADS; }

zr_code grad_destination(void* self, uint32_t param, int64_t* first, const zr_use* use, zr_view* dst, zr_error* error) {
  auto& s = *static_cast<Strategy*>(self);
  if (const zr_code code = begin(s, use, error)) return code;
  if (kDefect == again_forever && param == 0 && use->micro == 3) return ZR_AGAIN;
  const Parameter& one = s.params[param];
  *dst = part(s.grads, one.grad_at + *first, one.count - *first);
  if (kDefect == clears_held_gradient && holds(s))
    std::memset(dst->data, 0, static_cast<std::size_t>(dst->count * width(dst->dtype)));
  return ZR_OK;
}
zr_code grad_ready(void* self, uint32_t param, int64_t, int64_t, const zr_use* use, zr_error* error) {
  auto& s = *static_cast<Strategy*>(self);
  s.ready.push_back(param);
  return begin(s, use, error);
}

// Powers of two: exact.
void scale(const zr_view& values, float factor) {
  if (values.dtype == ZR_F32)
    for (int64_t i = 0; i < values.count; ++i) static_cast<float*>(values.data)[i] *= factor;
}
bool halves(const Strategy& s) {
  return kDefect == corrects_sums_at_the_end && s.grads.dtype == ZR_F32 && s.sums.dtype == ZR_F32;
}

zr_code reduce(Strategy& s, uint32_t param, const zr_use& use, zr_error* error) {
  const Parameter& one = s.params[param];
  if (one.frozen || one.count == 0) return ZR_OK;
  zr_coll coll{};
  coll.size = sizeof coll;
  coll.op = ZR_REDUCE;
  coll.reduce = ZR_SUM;
  coll.root = one.owner;
  const bool later = use.micro > 0;
  const bool extra = later && kDefect == adds_micro_steps_first;
  if (later && !extra && kDefect != forgets_accumulate) coll.flags = ZR_COLL_ACCUMULATE;
  coll.src = part(s.grads, one.grad_at, one.count);
  if (halves(s)) scale(coll.src, 0.5f);
  const bool own = one.owner == s.in.rank;
  if (own) coll.dst = part(extra ? s.extra : s.sums, one.own_at, one.count);
  coll.label = one.name.c_str();
  if (kDefect == sums_too_early) {
    const auto* async = mutant::service<zr_async_service>(s.host, "zr.host.async/1");
    zr_done* done = async->done_new(s.host);
    const zr_code code = submit(s, coll, done, error);
    async->done_release(done);
    return code;
  }
  if (const zr_code code = submit(s, coll, nullptr, error)) return code;
  if (own && extra && s.extra.dtype == ZR_F32)
    for (int64_t i = 0; i < one.count; ++i)
      static_cast<float*>(s.sums.data)[one.own_at + i] += static_cast<float*>(s.extra.data)[one.own_at + i];
  return ZR_OK;
}

zr_code event(void* self, uint32_t kind, const zr_use* use, zr_error* error) {
  auto& s = *static_cast<Strategy*>(self);
  if (const zr_code code = begin(s, use, error)) return code;
  if (kDefect == rejects_unknown_event && kind > ZR_EVAL_END)
    return mutant::fill(error, ZR_INVALID, "an unknown event");
  if (kDefect == needs_updated && kind == ZR_STEP_BEGIN) {
    if (s.in_step) return mutant::fill(error, ZR_STATE, "updated() was not called in the step before");
    s.in_step = true;
  }
  if (kind != ZR_BACKWARD_END) return ZR_OK;
  std::vector<uint32_t> order = s.ready;
  std::sort(order.begin(), order.end());
  order.erase(std::unique(order.begin(), order.end()), order.end());
  if (kDefect == depends_on_order) order = s.ready;
  s.ready.clear();
  zr_use own;
  ZR_TAKE(&own, use);
  for (const uint32_t param : order)
    if (const zr_code code = reduce(s, param, own, error)) return code;
  return ZR_OK;
}

zr_code grads_finish(void* self, const zr_use* use, zr_error*) {
  auto& s = *static_cast<Strategy*>(self);
  if (halves(s)) scale(s.sums, 2);
  if (kDefect == reads_memory_of_device && s.sums.count > 0) mutant::read(*static_cast<const uint32_t*>(s.sums.data));
  resolve(s, use);
  return ZR_OK;
}
zr_code updated(void* self, const zr_use* use, zr_error*) {
  auto& s = *static_cast<Strategy*>(self);
  s.in_step = false;
  const bool keeps = kDefect == keeps_gathered ||
                     (kDefect == keeps_gathered_if_shared && (s.in.flags & ZR_PLAN_SHARE_WEIGHTS)) ||
                     (kDefect == keeps_gathered_on_hosts && (s.in.flags & ZR_PLAN_SHARE_ON_HOSTS));
  if (!keeps) s.gathered.clear();
  resolve(s, use);
  return ZR_OK;
}

zr_code acquire(void* self, const uint32_t* params, uint32_t n, const zr_use* use, zr_view* full, zr_error* error) {
  auto& s = *static_cast<Strategy*>(self);
  if (const zr_code code = begin(s, use, error)) return code;
  for (uint32_t i = 0; i < n; ++i) {
    const Parameter& one = s.params[params[i]];
    const zr_view target = part(s.full, one.full_at, one.count);
    if (!s.gathered.count(params[i])) {
      zr_coll coll{};
      coll.size = sizeof coll;
      coll.op = ZR_BROADCAST;
      coll.root = one.owner;
      if (one.owner == s.in.rank) coll.src = part(s.weights, one.own_at, one.count);
      coll.dst = target;
      coll.label = one.name.c_str();
      if (const zr_code code = submit(s, coll, nullptr, error)) return code;
      s.gathered.insert(params[i]);
    }
    full[i] = target;
  }
  resolve(s, use);
  return ZR_OK;
}
zr_code release(void* self, const uint32_t*, uint32_t, const zr_use* use, zr_error* error) {
  return begin(*static_cast<Strategy*>(self), use, error);
}

constexpr bool kNullAcquire = kDefect == null_acquire;
constexpr zr_strategy_api kApi{sizeof(zr_strategy_api),
                               0,
                               MUTANT_SLOT(describe),
                               MUTANT_SLOT(plan),
                               MUTANT_SLOT(bind),
                               MUTANT_SLOT(grad_destination),
                               MUTANT_SLOT(grad_ready),
                               MUTANT_SLOT(event),
                               MUTANT_SLOT(grads_finish),
                               MUTANT_SLOT(updated),
                               kNullAcquire ? nullptr : MUTANT_SLOT(acquire),
                               kNullAcquire ? nullptr : MUTANT_SLOT(release)};
constexpr zr_component kComponent =
    mutant::component("zr.strategy/1", &kApi, MUTANT_SLOT(create), MUTANT_SLOT(destroy));

}  // namespace

MUTANT_MODULE(strategy, nullptr, nullptr)

extern "C" ZR_EXPORT const zr_module* zr_module_v1(uint32_t) { return &kModule; }
