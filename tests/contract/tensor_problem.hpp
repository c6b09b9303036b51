// A tensor with its states, stepped as the host does: passes over slices of complete blocks, then the update.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "contract/optimizer_under_test.hpp"
#include "zr/abi/draft/optimizer_shapes.h"
#include "zr/abi/draft/partial_sums.h"
#include "zr/float_cast.hpp"

namespace zr::testing {

struct Tensor {
  static constexpr int64_t kBlockOfNorms = 1024;
  std::vector<int64_t> shape;
  zr_dtype dtype = ZR_F32;
  int64_t count = 0, step = 1;
  std::vector<float> weight, grad;
  std::vector<uint16_t> out;
  std::vector<zr_slot> slots;
  std::vector<std::vector<char>> states;
  int64_t block = kBlockOfNorms;
  double lr = 0.01;
  float mul = 0.5F;

  Tensor(const OptimizerUnderTest& optimizer, std::vector<int64_t> of, zr_dtype type = ZR_F32)
      : shape(std::move(of)), dtype(type) {
    count = std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
    weight.resize(static_cast<std::size_t>(count));
    out.resize(weight.size());
    for (float& w : weight) w = number();
    new_gradient();
    const zr_optimizer_desc desc = optimizer.describe(param());
    if (desc.granularity == ZR_TENSORWISE) block = std::max(count, kBlockOfNorms);
    slots.assign(desc.slots, desc.slots + desc.n_slots);
    for (const zr_slot& slot : slots) {
      if (slot.block > 0) block = std::min(std::lcm(block, int64_t{slot.block}), std::max(count, kBlockOfNorms));
      states.emplace_back(static_cast<std::size_t>(elements(slot, count) * bytes(slot.dtype)), 0);
    }
  }
  static int64_t bytes(zr_dtype type) { return type == ZR_U8 ? 1 : type == ZR_F32 ? 4 : 2; }
  int64_t row() const { return shape.size() < 2 ? 1 : count / shape[0]; }
  int64_t elements(const zr_slot& slot, int64_t of) const {
    if (slot.shape == ZR_SLOT_LIKE_PARAM) return of;
    return (of + slot.block - 1) / slot.block * (slot.shape == ZR_SLOT_PER_COLUMN ? row() : 1);
  }
  zr_param param() const {
    return {sizeof(zr_param), 0, "weight", shape.data(), static_cast<int32_t>(shape.size()), 0, count, block, 0};
  }
  void new_gradient() {
    grad.resize(weight.size());
    for (float& g : grad) g = number() * std::pow(10.F, 2 * number());
  }
  const float* state(std::size_t i) const { return reinterpret_cast<const float*>(states[i].data()); }

  struct Slice {
    zr_update_slice slice{};
    std::vector<zr_view> views;
  };
  Slice slice(int64_t first, int64_t n) {
    Slice made;
    for (std::size_t i = 0; i < slots.size(); ++i) {
      const int64_t begin = elements(slots[i], first), size = bytes(slots[i].dtype);
      made.views.push_back(
          view_of(states[i].data() + begin * size, elements(slots[i], first + n) - begin, slots[i].dtype));
    }
    zr_update_slice& u = made.slice;
    u.size = sizeof u;
    u.name = "weight";
    u.shape = shape.data();
    u.ndim = static_cast<int32_t>(shape.size());
    u.first = u.grad_first = first;
    u.count = u.grad_count = n;
    u.step = step;
    u.lr = lr;
    const zr_view master = view_of(weight.data() + first, n);
    u.weight = dtype == ZR_F32 ? master : view_of(out.data() + first, n, dtype);
    u.master = dtype == ZR_F32 ? zr_view{} : master;
    u.grad = view_of(grad.data() + first, n);
    u.slots = made.views.data();
    return made;
  }
  // One step, in slices of `blocks` blocks, from the last to the first; on several threads, each takes every n-th.
  void run(const OptimizerUnderTest& optimizer, int64_t blocks = int64_t{1} << 40, int threads = 1) {
    const zr_step job{sizeof(zr_step), mul, step, 0};
    const auto* api = static_cast<const zr_partial_sums_api*>(
        optimizer.component().extension ? optimizer.component().extension("zr.optimizer.partial_sums/1") : nullptr);
    uint32_t passes = 0, sums[ZR_MAX_PASSES] = {};
    zr_error error{};
    const zr_param described = param();
    if (api && api->passes(optimizer.self(), &described, &passes, sums, &error) != ZR_OK)
      throw std::runtime_error(error.msg);
    std::vector<double> totals;
    for (uint32_t pass = 0; pass <= passes; ++pass) {
      const int64_t width = pass == passes ? 0 : sums[pass];
      std::vector<double> partial(static_cast<std::size_t>((count + block - 1) / block * width), 0);
      const auto call = [&](int64_t first, int64_t n) {
        Slice one = slice(first, n);
        const zr_sums given{sizeof(zr_sums), pass, block, totals.data(), partial.data() + first / block * width};
        const zr_update_slice* pointer = &one.slice;
        zr_error failure{};
        const zr_code code = passes == 0
                                 ? optimizer.api().step(optimizer.self(), &job, &pointer, 1, nullptr, nullptr, &failure)
                             : width > 0 ? api->add_up(optimizer.self(), &job, &one.slice, &given, &failure)
                                         : api->update(optimizer.self(), &job, &one.slice, &given, &failure);
        if (code != ZR_OK) throw std::runtime_error(failure.msg);
      };
      for_each_slice(blocks, threads, call);
      const std::size_t begin = totals.size();
      totals.resize(begin + static_cast<std::size_t>(width), 0);
      for (std::size_t i = 0; i < partial.size(); ++i)
        totals[begin + i % static_cast<std::size_t>(width)] += partial[i];
    }
    ++step;
  }
  // Calls fn(first, count) for slices of complete blocks.
  void for_each_slice(int64_t blocks, int threads, const std::function<void(int64_t, int64_t)>& fn) const {
    const int64_t size = blocks > count / block ? count : blocks * block, slices = (count + size - 1) / size;
    const auto share = [&](int64_t thread) {
      for (int64_t i = slices - 1 - thread; i >= 0; i -= threads) fn(i * size, std::min(size, count - i * size));
    };
    std::vector<std::thread> others;
    for (int64_t t = 1; t < threads; ++t) others.emplace_back(share, t);
    share(0);
    for (std::thread& other : others) other.join();
  }
  bool same_bits(const Tensor& other) const {
    return std::memcmp(weight.data(), other.weight.data(), weight.size() * 4) == 0 && out == other.out &&
           states == other.states;
  }

 private:
  float number() {
    random_ = random_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<float>(static_cast<int32_t>(random_ >> 32)) * 0x1p-31F;
  }
  uint64_t random_ = 1;
};

}  // namespace zr::testing
