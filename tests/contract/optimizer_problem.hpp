// One parameter with its gradient and states, as the host stores it, and the slices into which it is cut.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "contract/optimizer_under_test.hpp"
#include "zr/float_cast.hpp"

namespace zr::testing {

inline const std::string kPlugins = ZR_BUILD_DIR "/plugins";

struct Problem {
  static constexpr uint16_t kUntouched = 0x1234;
  int64_t count;
  zr_dtype dtype;
  std::vector<int64_t> shape;
  std::vector<float> weight, grad;  // weight: the master
  std::vector<std::vector<float>> slots;
  std::vector<uint16_t> narrow;  // out() and the guard elements around it
  int64_t shift = 0, step = 1;
  uint32_t group = 0, flags = 0;
  float grad_mul = 0.37f;
  double lr = 3e-3;

  Problem(int64_t count, uint32_t n_slots, zr_dtype dtype = ZR_F32)
      : count(count),
        dtype(dtype),
        shape{count},
        weight(count),
        grad(count),
        slots(n_slots, std::vector<float>(count)),
        narrow(count + 128, kUntouched) {
    // Weights of both signs, some zero, some tiny, as after initialization.
    for (int64_t i = 0; i < count; ++i) weight[i] = i % 11 == 0 ? 0.f : number() * (i % 7 == 0 ? 1e-6f : 0.5f);
    new_gradient();
  }
  /// Gradients over eight decades.
  void new_gradient() {
    for (float& g : grad) g = number() * std::pow(10.f, -4 + 4 * number());
  }
  uint16_t* out() {
    const auto lead = (64 - reinterpret_cast<uintptr_t>(narrow.data()) % 64) / 2;
    return narrow.data() + lead + 32 + shift;
  }
  bool same_bits(Problem& other) {
    const auto same = [](const std::vector<float>& a, const std::vector<float>& b) {
      return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
    };
    bool all = same(weight, other.weight) && std::equal(out(), out() + (dtype == ZR_F32 ? 0 : count), other.out());
    for (std::size_t i = 0; i < slots.size(); ++i) all = all && same(slots[i], other.slots[i]);
    return all;
  }

  /// A slice and the state views it points to.
  struct Slice {
    zr_update_slice slice{};
    std::vector<zr_view> slots;
    zr_update_slice* get() { return &slice; }
  };
  std::unique_ptr<Slice> slice(int64_t first, int64_t n) {
    auto made = std::make_unique<Slice>();
    for (auto& slot : slots) made->slots.push_back(view_of(slot.data() + first, n));
    zr_update_slice& u = made->slice;
    u.size = sizeof u;
    u.group = group;
    u.name = "weight";
    u.shape = shape.data();
    u.ndim = static_cast<int32_t>(shape.size());
    u.first = u.grad_first = first;
    u.count = u.grad_count = n;
    u.step = step;
    u.lr = lr;
    u.flags = flags;
    const zr_view master = view_of(weight.data() + first, n);
    u.weight = dtype == ZR_F32 ? master : view_of(out() + first, n, dtype);
    u.master = dtype == ZR_F32 ? zr_view{} : master;
    u.grad = view_of(grad.data() + first, n);
    u.slots = made->slots.data();
    return made;
  }
  zr_step job() const {
    zr_step job{};
    job.size = sizeof job;
    job.grad_mul = grad_mul;
    job.step = step;
    return job;
  }
  void run(const OptimizerUnderTest& optimizer, std::vector<std::pair<int64_t, int64_t>> runs = {}) {
    if (runs.empty()) runs = {{0, count}};
    std::vector<std::unique_ptr<Slice>> made;
    std::vector<const zr_update_slice*> slices;
    for (const auto& [first, n] : runs) {
      made.push_back(slice(first, n));
      slices.push_back(made.back()->get());
    }
    optimizer.step(job(), slices);
  }

 private:
  /// In (-1, 1), the same sequence every time.
  float number() {
    random_ = random_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<float>(static_cast<int32_t>(random_ >> 32)) * 0x1p-31f;
  }
  uint64_t random_ = 1;
};

}  // namespace zr::testing
