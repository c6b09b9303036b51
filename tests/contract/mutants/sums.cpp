// An optimizer whose states are per row, per column and per block, and whose updates need sums over a parameter
// (zr/abi/draft), and its defects. With a defect of updates of complete matrices, it has neither passes nor blocks.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <deque>
#include <numeric>
#include <stdexcept>
#include <vector>

#include "module.hpp"
#include "zr/abi/draft/optimizer_globals.h"
#include "zr/abi/draft/optimizer_shapes.h"
#include "zr/abi/draft/partial_sums.h"
#include "zr/abi/optimizer.h"
#include "zr/float_cast.hpp"

namespace {

enum Defect {
  none,
  none_of_matrices,  // without a defect
  // of sums and states by block
  sum_depends_on_cut,
  sums_before_slice,
  changes_weight_in_pass,
  rounds_in_pass,
  reads_weight_in_pass,
  too_many_passes,
  pass_without_sums,
  passes_change,
  update_is_null,
  state_indexed_from_parameter,
  rows_per_slice,
  block_is_zero,
  column_block_cuts_rows,
  remembers_last_pass,
  keeps_totals,
  keeps_shape,
  changes_states_before_error,
  ignores_globals,
  accepts_unknown_global,
  output_too_short,
  throws_in_passes,
  throws_in_add_up,
  throws_in_update,
  throws_in_save_globals,
  // of complete matrices
  assumes_square,
  keeps_workspace
};
constexpr Defect kDefect = ZR_MUTANT;
constexpr bool kMatrices = kDefect == none_of_matrices || kDefect == assumes_square || kDefect == keeps_workspace;
constexpr int64_t kNormBlock = 1024, kScaleBlock = 256;

struct Optimizer {
  const zr_host* host;
  std::deque<std::vector<zr_slot>> slots;  // those that describe() reported, one list per shape
  std::atomic<int64_t> last_step{0};       // of the job: the global state
  std::atomic<int64_t> last_pass_step{0};
  bool updated = false;
};
const int64_t* kept_shape = nullptr;
std::atomic<const double*> kept_totals{nullptr};
std::atomic<float> workspace{0};

zr_code create(const zr_host* host, const zr_config*, void** self, zr_error*) {
  *self = new Optimizer{host, {}, {}, {}};
  return ZR_OK;
}
void destroy(void* self) { delete static_cast<Optimizer*>(self); }
zr_code add_group(void*, uint32_t, const zr_config*, zr_error*) { return ZR_OK; }

bool is_matrix(int32_t ndim, int64_t count) { return ndim == 2 && count > 0; }
bool is_matrix(const zr_update_slice& u) { return is_matrix(u.ndim, u.count); }

// Elements of a matrix that have a copy of the column state.
int64_t column_block(int64_t rows, int64_t columns) { return std::min(std::lcm(kNormBlock, columns), rows * columns); }

zr_code describe(void* self, const zr_param* param, zr_optimizer_desc* out, zr_error* error) {
  auto& o = *static_cast<Optimizer*>(self);
  std::vector<zr_slot> slots;
  const bool matrix = is_matrix(param->ndim, param->count);
  if (kMatrices && !matrix) return mutant::fill(error, ZR_UNSUPPORTED, "only matrices are supported");
  if (kMatrices) {
    slots = {{"mean", ZR_F32, ZR_SLOT_LIKE_PARAM, 0, 0}};
  } else if (matrix) {
    const int64_t columns = param->shape[1], block = column_block(param->shape[0], columns);
    if (block > UINT32_MAX) return mutant::fill(error, ZR_UNSUPPORTED, "the rows are too long");
    slots = {{"code", ZR_U8, ZR_SLOT_LIKE_PARAM, 0, 0},
             {"row", ZR_F32, ZR_SLOT_PER_BLOCK, 0, static_cast<uint32_t>(columns)},
             {"column", ZR_F32, ZR_SLOT_PER_COLUMN, 0, static_cast<uint32_t>(block)}};
    if (kDefect == column_block_cuts_rows && columns > 1) slots[2].block -= 1;
  } else {
    slots = {{"code", ZR_U8, ZR_SLOT_LIKE_PARAM, 0, 0}, {"scale", ZR_F32, ZR_SLOT_PER_BLOCK, 0, kScaleBlock}};
    if (kDefect == block_is_zero) slots[1].block = 0;
  }
  o.slots.push_back(slots);
  uint32_t granularity = matrix ? uint32_t{ZR_ROWWISE} : uint32_t{ZR_ELEMENTWISE};
  if (kMatrices) granularity = ZR_TENSORWISE;
  zr_optimizer_desc desc{
      sizeof(zr_optimizer_desc), granularity, 0, static_cast<uint32_t>(slots.size()), o.slots.back().data(),
      1u << ZR_DEVICE_CPU,       0,           0, static_cast<double>(param->count)};
  mutant::write_output(out, desc);
  if (kDefect == output_too_short) out->size = 47;
  if (kDefect == keeps_shape) kept_shape = param->shape;
  return ZR_OK;
}

// ---- the update

struct Slice {
  explicit Slice(const zr_update_slice& slice)
      : u(slice),
        weight(static_cast<float*>(has_16bit_weight() ? u.master.data : u.weight.data)),
        grad(static_cast<const float*>(u.grad.data)) {}
  bool has_16bit_weight() const { return u.weight.dtype != ZR_F32; }
  float* state(uint32_t i) const { return static_cast<float*>(u.slots[i].data); }
  uint8_t* codes() const { return static_cast<uint8_t*>(u.slots[0].data); }
  const zr_update_slice& u;
  float* weight;
  const float* grad;
};

// Where the states of a block begin in the view: its index from the slice's start.
int64_t state_index(const zr_update_slice& u, int64_t element, int64_t block) {
  return kDefect == state_indexed_from_parameter ? (u.first + element) / block : element / block;
}

// The mean square of the gradients of a row or a block, in its state.
void add_mean(float* state, const float* grad, int64_t n, float mul) {
  float sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += (grad[i] * mul) * (grad[i] * mul);
  *state = 0.9f * *state + 0.1f * (sum / static_cast<float>(n));
}

uint8_t code_of(float value) { return std::isfinite(value) ? static_cast<uint8_t>(std::min(255.f, value * 100)) : 255; }

void pass_of_vector(const Slice& s, float mul, const zr_sums& sums) {
  for (int64_t i = 0; i < s.u.count; i += kScaleBlock)
    add_mean(s.state(1) + state_index(s.u, i, kScaleBlock), s.grad + i, std::min(kScaleBlock, s.u.count - i), mul);
  double squares = 0;  // of the slice, for a defect
  for (int64_t i = 0; i < s.u.count; ++i) {
    const float g = s.grad[i] * mul, w = s.weight[i];
    s.codes()[i] = code_of(std::fabs(g) / (s.state(1)[i / kScaleBlock] + 1e-8f));
    double* const partial = sums.partial + i / sums.block * 2;
    const double before = squares;
    squares += static_cast<double>(g) * g;
    partial[0] += kDefect == sum_depends_on_cut ? squares - before : static_cast<double>(g) * g;
    partial[1] += static_cast<double>(w) * w;
  }
}

void pass_of_matrix(const Slice& s, float mul, const zr_sums& sums) {
  const int64_t columns = s.u.shape[1];
  for (int64_t i = 0; i < s.u.count; i += columns)
    add_mean(s.state(1) + state_index(s.u, i, columns), s.grad + i, columns, mul);
  for (int64_t i = 0; i < s.u.count; ++i) {
    const float g = s.grad[i] * mul;
    sums.partial[i / sums.block * (columns + 1) + i % columns] += static_cast<double>(g) * g;
    sums.partial[i / sums.block * (columns + 1) + columns] += std::fabs(s.weight[i]);
  }
}

// The direction of an element of a matrix: the gradient, divided by the roots of its row's and its column's state.
float direction(const Slice& s, int64_t i, float mul) {
  const int64_t columns = s.u.shape[1], block = column_block(s.u.shape[0], columns);
  const float column = s.state(2)[i / block * columns + i % columns];
  return s.grad[i] * mul / (std::sqrt(s.state(1)[i / columns]) * std::sqrt(column) + 1e-6f);
}

void second_pass_of_matrix(const Slice& s, float mul, const zr_sums& sums) {
  const int64_t columns = s.u.shape[1], block = column_block(s.u.shape[0], columns);
  // Every copy of the column state gets the same values.
  for (int64_t i = 0; i < s.u.count; i += block)
    for (int64_t c = 0; c < columns; ++c) {
      float& state = s.state(2)[i / block * columns + c];
      const double rows = static_cast<double>(kDefect == rows_per_slice ? s.u.count / columns : s.u.shape[0]);
      state = 0.9f * state + 0.1f * static_cast<float>(sums.totals[c] / rows);
    }
  for (int64_t i = 0; i < s.u.count; ++i) {
    const float u = direction(s, i, mul);
    s.codes()[i] = code_of(std::fabs(u));
    sums.partial[i / sums.block] += static_cast<double>(u) * u;
  }
}

void write_weight(const Slice& s) {
  auto* out = static_cast<uint16_t*>(s.u.weight.data);
  for (int64_t i = 0; s.has_16bit_weight() && i < s.u.count; ++i)
    out[i] = s.u.weight.dtype == ZR_BF16 ? zr::to_bf16(s.weight[i]) : zr::to_f16(s.weight[i]);
}

zr_code check_dtype(const zr_update_slice& u, zr_error* error) {
  if (u.weight.dtype == ZR_F32 || u.weight.dtype == ZR_BF16 || u.weight.dtype == ZR_F16) return ZR_OK;
  if (kDefect == changes_states_before_error) static_cast<uint8_t*>(u.slots[0].data)[0] = 7;
  return mutant::fill(error, ZR_UNSUPPORTED, "weights of this dtype are not supported");
}

zr_code passes(void* self, const zr_param* param, uint32_t* n_passes, uint32_t* n_sums, zr_error*) {
  const bool matrix = is_matrix(param->ndim, param->count);
  *n_passes = matrix ? 2 : 1;
  n_sums[0] = matrix ? static_cast<uint32_t>(param->shape[1]) + 1 : 2;
  if (matrix) n_sums[1] = 1;
  if (kDefect == passes_change && static_cast<Optimizer*>(self)->updated) n_sums[0] += 1;
  if (kDefect == pass_without_sums && !matrix) *n_passes = 2, n_sums[1] = 0;
  if (kDefect == too_many_passes && !matrix) {
    *n_passes = ZR_MAX_PASSES + 1;
    for (uint32_t pass = 1; pass < ZR_MAX_PASSES; ++pass) n_sums[pass] = 1;
  }
  if (kMatrices) *n_passes = 0;
  return ZR_OK;
}

zr_code add_up(void* self, const zr_step* job, const zr_update_slice* slice, const zr_sums* sums, zr_error* error) {
  if (const zr_code code = check_dtype(*slice, error)) return code;
  const Slice s(*slice);
  if (kDefect == keeps_shape && kept_shape) mutant::read(*reinterpret_cast<const uint32_t*>(kept_shape));
  const bool starts = slice->first == 0;
  if (kDefect == sums_before_slice && starts) sums->partial[-1] = 0;
  if (kDefect == changes_weight_in_pass && starts) s.weight[0] = std::nextafter(s.weight[0], 9.f);
  if (kDefect == rounds_in_pass) write_weight(s);
  float mul = job->grad_mul;
  if (kDefect == reads_weight_in_pass && s.has_16bit_weight())
    mul += zr::from_bf16(*static_cast<uint16_t*>(slice->weight.data));
  static_cast<Optimizer*>(self)->last_pass_step = slice->step;
  if (!is_matrix(*slice)) {
    if (sums->pass == 0) pass_of_vector(s, mul, *sums);
  } else if (sums->pass == 0) {
    pass_of_matrix(s, mul, *sums);
  } else {
    second_pass_of_matrix(s, mul, *sums);
  }
  return ZR_OK;
}

zr_code update(void* self, const zr_step* job, const zr_update_slice* slice, const zr_sums* sums, zr_error* error) {
  if (const zr_code code = check_dtype(*slice, error)) return code;
  auto& o = *static_cast<Optimizer*>(self);
  const Slice s(*slice);
  if (kDefect == keeps_totals) {
    if (const double* before = kept_totals.exchange(sums->totals))
      mutant::read(*reinterpret_cast<const uint32_t*>(before));
  }
  const bool matrix = is_matrix(*slice);
  const double total = matrix ? sums->totals[slice->shape[1] + 1] : sums->totals[0] + sums->totals[1];
  const int64_t step = kDefect == remembers_last_pass ? o.last_pass_step.load() : slice->step;
  const auto rate = static_cast<float>(slice->lr / static_cast<double>(step) / (1 + std::sqrt(total)));
  for (int64_t i = 0; i < slice->count; ++i) {
    const float u = matrix ? direction(s, i, job->grad_mul) : s.grad[i] * job->grad_mul;
    s.weight[i] -= rate * u * (1 + static_cast<float>(s.codes()[i]) / 256);
  }
  write_weight(s);
  o.last_step = std::max(o.last_step.load(), job->step);
  o.updated = o.updated || kDefect == passes_change;
  return ZR_OK;
}

// ---- complete matrices

void step_matrix(const zr_step& job, const zr_update_slice& u) {
  const Slice s(u);
  const int64_t rows = u.shape[0], columns = kDefect == assumes_square ? rows : u.shape[1];
  float sum = kDefect == keeps_workspace ? workspace * 0 : 0;
  for (int64_t c = 0; c < columns; ++c)
    for (int64_t r = 0; r < rows; ++r) sum += std::fabs(s.grad[std::min(r * columns + c, u.count - 1)]);
  workspace = sum;
  const auto rate = static_cast<float>(u.lr / (1 + static_cast<double>(sum * job.grad_mul)));
  float* const mean = s.state(0);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < columns; ++c) {
      const int64_t i = r * columns + c;
      mean[i] = 0.9f * mean[i] + 0.1f * s.grad[std::min(i, u.count - 1)] * job.grad_mul;
      s.weight[i] -= rate * mean[i];
    }
  write_weight(s);
}

zr_code step(void* self, const zr_step* job, const zr_update_slice* const* slices, uint32_t n, zr_stream*,
             zr_done* done, zr_error* error) {
  if (!kMatrices) return mutant::fill(error, ZR_UNSUPPORTED, "step() is called without passes only");
  for (uint32_t i = 0; i < n; ++i)
    if (const zr_code code = check_dtype(*slices[i], error)) return code;
  for (uint32_t i = 0; i < n; ++i) step_matrix(*job, *slices[i]);
  const auto* async = mutant::service<zr_async_service>(static_cast<Optimizer*>(self)->host, "zr.host.async/1");
  if (done) async->done_resolve(done, ZR_OK, 0, nullptr);
  return ZR_OK;
}

// ---- tables

zr_code save_globals(void* self, zr_global_sink sink, void* ctx, zr_error*) {
  const int64_t last = static_cast<Optimizer*>(self)->last_step;
  sink(ctx, "last_step", &last, sizeof last);
  return ZR_OK;
}
zr_code load_global(void* self, const char* key, const void* value, uint64_t bytes, zr_error* error) {
  if (std::strcmp(key, "last_step") != 0 || bytes != sizeof(int64_t))
    return kDefect == accepts_unknown_global ? zr_code{ZR_OK} : mutant::fill(error, ZR_INVALID, "an unknown key");
  int64_t last = 0;
  std::memcpy(&last, value, sizeof last);
  if (kDefect != ignores_globals) static_cast<Optimizer*>(self)->last_step = last;
  return ZR_OK;
}

constexpr zr_partial_sums_api kSums{sizeof(zr_partial_sums_api), 0, MUTANT_SLOT(passes), MUTANT_SLOT(add_up),
                                    kDefect == update_is_null ? nullptr : MUTANT_SLOT(update)};
constexpr zr_optimizer_globals_api kGlobals{sizeof(zr_optimizer_globals_api), 0, MUTANT_SLOT(save_globals),
                                            load_global};
const void* extension(const char* id) {
  if (!kMatrices && std::strcmp(id, "zr.optimizer.partial_sums/1") == 0) return &kSums;
  return !kMatrices && std::strcmp(id, "zr.optimizer.globals/1") == 0 ? &kGlobals : nullptr;
}

constexpr zr_optimizer_api kApi{sizeof(zr_optimizer_api), 0, add_group, describe, step};
constexpr zr_component kComponent = mutant::component("zr.optimizer/1", &kApi, create, destroy, extension);

}  // namespace

MUTANT_MODULE(optimizer, nullptr, nullptr)

extern "C" ZR_EXPORT const zr_module* zr_module_v1(uint32_t) { return &kModule; }
