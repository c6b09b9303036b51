#include "conform/optimizer_run.hpp"

#include <algorithm>
#include <cmath>

#include "conform/use.hpp"
#include "zr/names.hpp"

namespace zr::host::conform {

namespace {
std::size_t bytes_of(int64_t count, zr_dtype dtype) { return static_cast<std::size_t>(count * size_of(dtype)); }
}  // namespace

ParameterArrays::ParameterArrays(const Layout& of, const std::vector<zr_slot>& types, std::mt19937_64 random)
    : layout(of),
      slot_types(types),
      master(bytes_of(of.count, ZR_F32), 64, of.shift),
      weight16(of.weight_dtype == ZR_F32 ? 0 : bytes_of(of.count, of.weight_dtype), 64, of.shift / 2),
      grad(bytes_of(of.count, ZR_F32), 64, of.shift),
      random_(random) {
  for (const zr_slot& type : types) {
    const Array& slot = slots.emplace_back(bytes_of(of.count, type.dtype), 64, of.shift);
    std::memset(slot.data(), 0, slot.size());
  }
  std::memset(weight16.data(), of.undefined, weight16.size());
  // Weights of both signs, some zero, some tiny, as after initialization.
  for (int64_t i = 0; i < of.count; ++i)
    master.as<float>()[i] = i % 11 == 0 ? 0.f : number() * (i % 7 == 0 ? 1e-6f : 0.5f);
  new_gradient();
}

// In (-1, 1).
float ParameterArrays::number() { return static_cast<float>(static_cast<int32_t>(random_() >> 32)) * 0x1p-31f; }

void ParameterArrays::new_gradient() {  // over eight decades
  for (int64_t i = 0; i < layout.count; ++i) {
    const float size = std::pow(10.f, -4 + 4 * number());
    grad.as<float>()[i] = number() * size;
  }
}

std::string ParameterArrays::bits() const {
  std::string all = master.content() + weight16.content();
  for (const Array& slot : slots) all += slot.content();
  return all;
}

void ParameterArrays::check_surroundings(const std::string& gradient_before) const {
  require(master.surroundings_are_intact(), "it wrote outside the view of the ",
          layout.weight_dtype == ZR_F32 ? "weight" : "master weight");
  require(weight16.surroundings_are_intact(), "it wrote outside the view of the weight");
  require(grad.surroundings_are_intact() && grad.content() == gradient_before, "it wrote to the gradient");
  for (std::size_t i = 0; i < slots.size(); ++i)
    require(slots[i].surroundings_are_intact(), "it wrote outside the view of state '", slot_types[i].name, "'");
}

namespace {
// The host does not call step() for parameters of optimizers with this draft extension.
void skip_if_it_has_passes(const Instance& instance) {
  const zr_component& component = instance.component();
  if (component.extension && component.extension("zr.optimizer.partial_sums/1"))
    skip("its updates need sums over full parameters (zr/abi/draft/partial_sums.h)");
}
}  // namespace

zr_optimizer_desc describe_optimizer(const zr_optimizer_api& api, void* self, const Mode& mode, int64_t count,
                                     uint32_t group, uint32_t flags) {
  Loan loan(mode);
  const int64_t* shape = loan.list(std::vector<int64_t>{count});
  const zr_param* param =
      loan.sized(zr_param{sizeof(zr_param), flags, loan.text("weight"), shape, 1, group, count, 0, 0});
  zr_optimizer_desc* desc = loan.sized(zr_optimizer_desc{});
  const Answer answer = call("describe()", [&](zr_error* error) { return api.describe(self, param, desc, error); });
  if (answer.code == ZR_UNSUPPORTED) skip("describe() does not support a parameter with one dimension");
  if (!answer.ok()) fail("describe() ", answer.said());
  require(desc->size <= sizeof *desc + Loan::kUnknownBytes, "describe() set size to ", desc->size);
  zr_optimizer_desc copy;
  ZR_TAKE(&copy, desc);
  return copy;
}

Answer step_optimizer(const zr_optimizer_api& api, void* self, const ParameterArrays& arrays,
                      const UpdateOptions& options, const Cuts& cuts) {
  Loan loan(options.mode);
  const auto& layout = arrays.layout;
  const bool narrow = layout.weight_dtype != ZR_F32;
  const auto at = [](const Array& array, int64_t first, int64_t n, zr_dtype dtype) {
    return view_of(array.data() + bytes_of(first, dtype), n, dtype);
  };
  std::vector<const zr_update_slice*> slices;
  for (const auto& [first, n] : cuts) {
    std::vector<zr_view> states;
    for (std::size_t i = 0; i < arrays.slots.size(); ++i)
      states.push_back(at(arrays.slots[i], first, n, arrays.slot_types[i].dtype));
    zr_update_slice slice{};
    slice.group = options.group;
    slice.name = loan.text("weight");
    slice.shape = loan.list(std::vector<int64_t>{layout.count});
    slice.ndim = 1;
    slice.first = slice.grad_first = first;
    slice.count = slice.grad_count = n;
    slice.step = options.step;
    slice.lr = 3e-3;
    const zr_view master = at(arrays.master, first, n, ZR_F32);
    slice.weight = narrow ? at(arrays.weight16, first, n, layout.weight_dtype) : master;
    if (narrow) slice.master = master;
    if (options.claimed_dtype != ZR_NONE) slice.weight.dtype = options.claimed_dtype;
    slice.grad = at(arrays.grad, first, n, ZR_F32);
    slice.slots = loan.list(states);
    slice.flags = options.unknown_flags;
    slices.push_back(loan.sized(slice));
  }
  zr_step job{};
  job.grad_mul = options.grad_mul;
  job.step = options.step;
  job.grad_norm = 1.5;
  const zr_step* step = loan.sized(job);
  const auto* list = loan.list(slices);
  zr_done* done = options.done ? options.done->abi() : nullptr;
  TestHost::in_worker_call = true;
  const Answer answer = call("step()", [&](zr_error* error) {
    return api.step(self, step, list, static_cast<uint32_t>(slices.size()), nullptr, done, error);
  });
  TestHost::in_worker_call = false;
  return answer;
}

OptimizerRun::OptimizerRun(Case& test, TestHost& host, const KeyValues& values)
    : instance_(test, host, values), api_(instance_.api<zr_optimizer_api>()) {}

zr_optimizer_desc OptimizerRun::describe(const Mode& mode, int64_t count, uint32_t group, uint32_t flags) {
  return describe_optimizer(api_, instance_.self(), mode, count, group, flags);
}

std::vector<zr_slot> OptimizerRun::slots(int64_t count) {
  skip_if_it_has_passes(instance_);
  const zr_optimizer_desc desc = describe({}, count);
  std::vector<zr_slot> slots(desc.slots, desc.slots + desc.n_slots);
  for (const zr_slot& slot : slots)
    if (slot.shape != ZR_SLOT_LIKE_PARAM || slot.flags != 0)
      skip("the state '", slot.name, "' has a shape or flags of a draft header");
  return slots;
}

Answer OptimizerRun::add_group(uint32_t group, const KeyValues& values) {
  ConfigTable& table = instance_.host().new_table(values);
  const Answer answer =
      call("add_group()", [&](zr_error* error) { return api_.add_group(instance_.self(), group, table.abi(), error); });
  table.ended = true;
  return answer;
}

Answer OptimizerRun::try_update(ParameterArrays& arrays, const UpdateOptions& options) {
  const Cuts all{{0, arrays.layout.count}};
  const Cuts& cuts = options.cuts.empty() ? all : options.cuts;
  if (options.one_call) return step_optimizer(api_, instance_.self(), arrays, options, cuts);
  for (const auto& cut : cuts)
    if (const Answer answer = step_optimizer(api_, instance_.self(), arrays, options, {cut}); !answer.ok())
      return answer;
  return {};
}

void OptimizerRun::update(ParameterArrays& arrays, const UpdateOptions& options) {
  const Answer answer = try_update(arrays, options);
  if (!answer.ok()) fail("step() ", answer.said());
}

Cuts random_cuts(int64_t count, int64_t block, std::mt19937_64& random) {
  std::vector<int64_t> edges{0, count};
  for (int i = 0; i < 6; ++i)
    edges.push_back(static_cast<int64_t>(random() % static_cast<uint64_t>(count)) / block * block);
  std::sort(edges.begin(), edges.end());
  edges.erase(std::unique(edges.begin(), edges.end()), edges.end());
  Cuts cuts;
  for (std::size_t i = 0; i + 1 < edges.size(); ++i) cuts.emplace_back(edges[i], edges[i + 1] - edges[i]);
  return cuts;
}

void use_optimizer(Instance& instance, const Mode& mode) {
  skip_if_it_has_passes(instance);
  const auto& api = instance.api<zr_optimizer_api>();
  const zr_optimizer_desc desc = describe_optimizer(api, instance.self(), mode, 3000, 0, 0);
  const std::vector<zr_slot> slots(desc.slots, desc.slots + desc.n_slots);
  for (const zr_slot& slot : slots)
    if (slot.shape != ZR_SLOT_LIKE_PARAM) skip("the state '", slot.name, "' has a shape of a draft header");
  for (const zr_dtype dtype : {ZR_F32, ZR_BF16}) {
    ParameterArrays arrays({.count = 3000, .weight_dtype = dtype}, slots, std::mt19937_64(1));
    UpdateOptions options;
    options.mode = mode;
    for (options.step = 1; options.step <= 2; ++options.step) {
      const Answer answer = step_optimizer(api, instance.self(), arrays, options, {{0, 1024}, {1024, 1976}});
      if (answer.code == ZR_UNSUPPORTED && dtype != ZR_F32) continue;
      if (!answer.ok()) fail("step() ", answer.said());
    }
  }
}

}  // namespace zr::host::conform
