// An optimizer with local gradients (zr/abi/draft/local_gradients.h), and its defects: after 100 updates, ranks
// exchange their gradients themselves, and the scales of the elements stay as they are.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <vector>

#include "module.hpp"
#include "zr/abi/draft/local_gradients.h"
#include "zr/abi/draft/optimizer_shapes.h"
#include "zr/abi/optimizer.h"
#include "zr/float_cast.hpp"

namespace {

enum Defect {
  none,
  table_is_missing,
  exchange_is_null,
  private_state_first,
  plan_grows,
  keeps_own_gradients,
  wrong_range,
  depends_on_time,
  plans_too_little_memory,
  plans_too_few_bytes,
  keeps_states,
  writes_past_gradient,
  hides_failure,
  changes_code,
  updates_own_elements_only,
  changes_scales,
  keeps_ranges,
  rejects_longer_structs,
  throws_in_gradients,
  throws_in_bind,
  throws_in_plan,
  throws_in_exchange
};
constexpr Defect kDefect = ZR_MUTANT;
constexpr int64_t kWarmUp = 100;  // updates

struct Optimizer {
  const zr_host* host;
  zr_comm_ref comm{};
  bool local = false;            // the current step has local gradients
  mutable uint64_t planned = 0;  // calls of plan()
  float* kept = nullptr;         // a private state of the first exchange
};
std::atomic<int> exchanges{0};
std::atomic<const zr_served_range*> kept_ranges{nullptr};

constexpr zr_slot kMean{"mean", ZR_F32, ZR_SLOT_LIKE_PARAM, 0, 0};
constexpr zr_slot kScale{"scale", ZR_F32, ZR_SLOT_LIKE_PARAM, ZR_SLOT_UNSHARDED, 0};
constexpr zr_slot kCarry{"carry", ZR_F32, ZR_SLOT_LIKE_PARAM, ZR_SLOT_RANK_PRIVATE | ZR_SLOT_UNSHARDED, 0};
constexpr zr_slot kServed{"served", ZR_F32, ZR_SLOT_LIKE_PARAM, ZR_SLOT_RANK_PRIVATE, 0};
constexpr zr_slot kSlots[] = {kMean, kScale, kCarry, kServed}, kWrongSlots[] = {kMean, kCarry, kScale, kServed};

zr_code create(const zr_host* host, const zr_config*, void** self, zr_error*) {
  *self = new Optimizer{host};
  return ZR_OK;
}
void destroy(void* self) { delete static_cast<Optimizer*>(self); }
zr_code add_group(void*, uint32_t, const zr_config*, zr_error*) { return ZR_OK; }

zr_code describe(void*, const zr_param*, zr_optimizer_desc* out, zr_error*) {
  constexpr uint32_t kNeeds = uint32_t{ZR_OPT_NEEDS_COMM} | ZR_OPT_NEEDS_LOCAL_GRADS;
  zr_optimizer_desc desc{sizeof(zr_optimizer_desc), ZR_ELEMENTWISE, kNeeds, 4, kSlots, 1u << ZR_DEVICE_CPU, 0, 0, 0};
  if (kDefect == private_state_first) desc.slots = kWrongSlots;
  mutant::write_output(out, desc);
  return ZR_OK;
}

// ---- the update

void update(const Optimizer& o, const zr_step& job, const zr_update_slice& u) {
  const bool has_16bit_weight = u.weight.dtype != ZR_F32, owns = u.slots[0].count > 0;
  auto* weight = static_cast<float*>(has_16bit_weight ? u.master.data : u.weight.data);
  auto* out = static_cast<uint16_t*>(u.weight.data);
  const auto* grad = static_cast<const float*>(u.grad.data);
  auto* mean = static_cast<float*>(u.slots[0].data);
  auto* scale = static_cast<float*>(u.slots[1].data);
  const auto rate = static_cast<float>(u.lr);
  if (kDefect == updates_own_elements_only && o.local && !owns) return;
  for (int64_t i = 0; i < u.count; ++i) {
    const float g = grad[i] * job.grad_mul;
    if (!o.local || (kDefect == changes_scales && !owns)) scale[i] = 0.9f * scale[i] + 0.1f * std::fabs(g);
    if (!o.local) mean[i] = 0.5f * mean[i] + g;
    if (o.local && owns) mean[i] = g;
    weight[i] -= rate * ((o.local ? g : mean[i]) / (scale[i] + 1));
    if (has_16bit_weight) out[i] = u.weight.dtype == ZR_BF16 ? zr::to_bf16(weight[i]) : zr::to_f16(weight[i]);
  }
}

zr_code step(void* self, const zr_step* job, const zr_update_slice* const* slices, uint32_t n, zr_stream*,
             zr_done* done, zr_error* error) {
  const auto& o = *static_cast<Optimizer*>(self);
  for (uint32_t i = 0; i < n; ++i)
    if (const zr_dtype dtype = slices[i]->weight.dtype; dtype != ZR_F32 && dtype != ZR_BF16 && dtype != ZR_F16)
      return mutant::fill(error, ZR_UNSUPPORTED, "weights of this dtype are not supported");
  for (uint32_t i = 0; i < n; ++i) update(o, *job, *slices[i]);
  const auto* async = mutant::service<zr_async_service>(o.host, "zr.host.async/1");
  if (done) async->done_resolve(done, ZR_OK, 0, nullptr);
  return ZR_OK;
}

// ---- local gradients

zr_code gradients(void* self, int64_t step, const zr_param_updates*, uint32_t* grads, zr_error*) {
  static_cast<Optimizer*>(self)->local = step > kWarmUp;
  *grads = step > kWarmUp ? ZR_GRADS_LOCAL : ZR_GRADS_REDUCED;
  return ZR_OK;
}

zr_code bind(void* self, zr_comm_ref comm, zr_error*) {
  static_cast<Optimizer*>(self)->comm = comm;
  return ZR_OK;
}

zr_code plan(void* self, zr_exchange_plan* out, zr_error*) {
  auto& o = *static_cast<Optimizer*>(self);
  int64_t all = 0, own = 0;
  for (uint32_t i = 0; i < out->n_counts; ++i) all += out->counts[i];
  for (uint32_t i = 0; i < out->n_served; ++i) own += out->served[i];
  out->scratch = static_cast<uint64_t>(all + own * out->world) * sizeof(float);
  out->received = static_cast<uint64_t>(2 * all * (out->world - 1)) * sizeof(float);
  if (kDefect == plan_grows) out->scratch += ++o.planned;
  if (kDefect == plans_too_little_memory) out->scratch -= sizeof(float);
  if (kDefect == plans_too_few_bytes) out->received /= 2;
  return ZR_OK;
}

zr_coll collective(uint32_t op, float* src, int64_t n_src, float* dst, int64_t n_dst) {
  zr_coll coll{};
  coll.size = sizeof coll;
  coll.op = op;
  coll.src = mutant::view_of(src, n_src, ZR_F32);
  coll.dst = mutant::view_of(dst, n_dst, ZR_F32);
  coll.label = "gradients";
  return coll;
}

float* floats(const zr_view& view) { return static_cast<float*>(view.data); }

// Elements that a rank serves: of a parameter, and in the private state of a rank.
struct ServedRange {
  const zr_local_gradient* gradient;
  int64_t first, count, served;
};
struct Message {
  std::vector<std::vector<ServedRange>> ranges;  // by rank
  std::vector<int64_t> counts;
};
Message message_of(const zr_local_gradient* const* list, uint32_t n, int32_t world) {
  Message message{std::vector<std::vector<ServedRange>>(static_cast<std::size_t>(world)),
                  std::vector<int64_t>(static_cast<std::size_t>(world), 0)};
  for (uint32_t i = 0; i < n; ++i) {
    std::vector<int64_t> served(static_cast<std::size_t>(world), 0);
    for (uint32_t r = 0; r < list[i]->n_ranges; ++r) {
      const zr_served_range& range = list[i]->ranges[r];
      const auto rank = static_cast<std::size_t>(range.rank);
      message.ranges[rank].push_back({list[i], range.first, range.count, served[rank]});
      served[rank] += range.count;
      message.counts[rank] += range.count;
    }
  }
  return message;
}

zr_code exchange(void* self, const zr_step* job, const zr_local_gradient* const* list, uint32_t n,
                 const zr_view* scratch, zr_error* error) {
  auto& o = *static_cast<Optimizer*>(self);
  const int32_t world = o.comm.world;
  if (kDefect == rejects_longer_structs && n > 0 && list[0]->size > sizeof(zr_local_gradient))
    return mutant::fill(error, ZR_UNSUPPORTED, "a parameter is too long");
  if (kDefect == keeps_ranges && n > 0)
    if (const zr_served_range* before = kept_ranges.exchange(list[0]->ranges))
      mutant::read(*reinterpret_cast<const uint32_t*>(before));
  const auto rank = static_cast<std::size_t>(o.comm.rank);
  const Message message = message_of(list, n, world);
  int64_t all = 0, own_first = 0;
  for (const int64_t count : message.counts) all += count;
  for (std::size_t r = 0; r < rank; ++r) own_first += message.counts[r];
  const int64_t own = message.counts[rank];
  float *const sent = floats(*scratch), *const received = sent + all, *at = sent;
  for (const auto& ranges : message.ranges)
    for (const ServedRange& range : ranges) {
      const float* const carry = floats(range.gradient->slots[0]) + range.first;
      const float* const grad = floats(range.gradient->grad) + range.first;
      for (int64_t i = 0; i < range.count; ++i) *at++ = 0.5f * carry[i] + job->grad_mul * grad[i];
    }
  if (kDefect == depends_on_time && exchanges++ == 0 && all > 0) sent[0] = std::nextafter(sent[0], 9.f);
  const auto submit = [&](const zr_coll& coll) {
    const zr_code code = o.comm.api->submit(o.comm.comm, &coll, nullptr, nullptr, error);
    if (kDefect == hides_failure) return zr_code{ZR_OK};
    return kDefect == changes_code && code != ZR_OK ? mutant::fill(error, ZR_INTERNAL, "a collective fails") : code;
  };
  zr_coll coll = collective(ZR_ALL_TO_ALL, sent, all, received, own * world);
  const std::vector<int64_t> from_each(static_cast<std::size_t>(world), own);
  coll.counts = message.counts.data();
  coll.recv_counts = from_each.data();
  if (const zr_code code = submit(coll)) return code;
  float* const served = sent + own_first;
  int64_t next = 0;
  for (const ServedRange& range : message.ranges[rank])
    for (int64_t i = 0; i < range.count; ++i, ++next) {
      float sum = 0;
      for (int64_t r = 0; r < world; ++r) sum += received[r * own + next];
      float& state = floats(range.gradient->slots[1])[range.served + i];
      served[next] = sum / static_cast<float>(world) + 0.25f * state;
      state = served[next];
    }
  coll = collective(ZR_ALL_GATHER, served, own, sent, all);
  coll.counts = message.counts.data();
  if (const zr_code code = submit(coll)) return code;
  at = sent;
  for (std::size_t r = 0; r < message.ranges.size(); ++r)
    for (const ServedRange& range : message.ranges[r]) {
      float* const carry = floats(range.gradient->slots[0]) + range.first;
      float* const grad = floats(range.gradient->grad) + range.first;
      for (int64_t i = 0; i < range.count; ++i) {
        const float value = *at++;
        carry[i] = 0.5f * carry[i] + 0.125f * value;
        if (kDefect == keeps_own_gradients && r == rank && world > 2) continue;
        grad[i] = value;
      }
      if (kDefect == wrong_range && range.first > 0 && o.comm.rank == 1) grad[0] = std::nextafter(grad[0], 9.f);
    }
  if (kDefect == keeps_states && o.kept) *o.kept += 1;
  if (kDefect == keeps_states && n > 0 && !o.kept) o.kept = floats(list[0]->slots[0]);
  if (kDefect == writes_past_gradient && n > 0) floats(list[0]->grad)[-1] = 0;
  return ZR_OK;
}

constexpr zr_local_gradients_api kLocalGradients{sizeof(zr_local_gradients_api),
                                                 0,
                                                 MUTANT_SLOT(gradients),
                                                 MUTANT_SLOT(bind),
                                                 MUTANT_SLOT(plan),
                                                 kDefect == exchange_is_null ? nullptr : MUTANT_SLOT(exchange),
                                                 nullptr,
                                                 nullptr};
const void* extension(const char* id) {
  if (kDefect == table_is_missing || std::strcmp(id, "zr.optimizer.local_gradients/1") != 0) return nullptr;
  return &kLocalGradients;
}

constexpr zr_optimizer_api kApi{sizeof(zr_optimizer_api), 0, add_group, describe, step};
constexpr zr_component kComponent = mutant::component("zr.optimizer/1", &kApi, create, destroy, extension);

}  // namespace

MUTANT_MODULE(optimizer, nullptr, nullptr)

extern "C" ZR_EXPORT const zr_module* zr_module_v1(uint32_t) { return &kModule; }
