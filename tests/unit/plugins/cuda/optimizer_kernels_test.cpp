// The kernels of the optimizers for CUDA, run on the CPU (tests/simulators/cuda_on_cpu): bits beside those of the CPU's
// own kernels, and no access outside the arrays.
#include <cuda_runtime.h>
#include <gmock/gmock.h>

#include <cmath>
#include <limits>
#include <list>
#include <optional>
#include <random>

#include "adamw/device_kernel.hpp"
#include "adamw/kernel.hpp"
#include "adamw8bit/device_kernel.hpp"
#include "device_kernels/norm_blocks.hpp"
#include "guarded_array.hpp"
#include "sgd/device_kernel.hpp"
#include "sgd/kernel.hpp"

namespace {

using zr::test::GuardedArray;
using zr::test::Layout;
using zr::test::Place;
// A kernel has up to five arrays whose alignment counts.
constexpr Layout kLayouts[] = {{Place::aligned},    {Place::end_of_page}, {Place::odd_elements}, {Place::aligned, 0},
                               {Place::aligned, 1}, {Place::aligned, 2},  {Place::aligned, 3},   {Place::aligned, 4}};
constexpr zr_dtype kDtypes[] = {ZR_F32, ZR_BF16, ZR_F16};
// Lengths around those of vectors, state blocks and tiles.
const std::vector<int64_t> kCounts = {1, 3, 4, 31, 255, 256, 257, 1024, 4095, 4096, 4097, 9001};

// Numbers of all magnitudes, some of them zero, infinite, NaN or denormal.
class Numbers {
 public:
  std::vector<float> gradients(int64_t n) {
    return make(n, [&] {
      const int kind = std::uniform_int_distribution<int>(0, 199)(random_);
      if (kind == 0) return std::numeric_limits<float>::infinity();
      if (kind == 1) return std::numeric_limits<float>::quiet_NaN();
      if (kind == 2) return 0.0F;
      if (kind == 3) return std::numeric_limits<float>::denorm_min() * 5;
      return std::ldexp(normal(), std::uniform_int_distribution<int>(-30, 10)(random_));
    });
  }
  std::vector<float> weights(int64_t n) {
    return make(n, [&] { return normal(); });
  }
  std::vector<float> positives(int64_t n) {
    return make(n, [&] { return std::ldexp(std::abs(normal()), std::uniform_int_distribution<int>(-40, 0)(random_)); });
  }
  std::vector<uint8_t> codes(int64_t n) {
    return make(n, [&] { return static_cast<uint8_t>(std::uniform_int_distribution<int>(0, 255)(random_)); });
  }

 private:
  template <class Make, class T = std::invoke_result_t<Make>>
  std::vector<T> make(int64_t n, const Make& make_one) {
    std::vector<T> values;
    for (int64_t i = 0; i < n; ++i) values.push_back(make_one());
    return values;
  }
  float normal() { return std::normal_distribution<float>()(random_); }
  std::mt19937 random_{7};
};

// The bits of an array, with one pattern for all NaNs.
std::vector<uint32_t> bits(const std::vector<float>& values) {
  std::vector<uint32_t> all;
  for (const float value : values) all.push_back(std::isnan(value) ? 0x7fc00000U : zr::bits_of(value));
  return all;
}
template <class T>
std::vector<T> bits(const std::vector<T>& values) {
  return values;
}

// One array twice: for the kernel of CUDA, in guarded memory, and for the CPU's.
template <class T>
class Twice {
 public:
  Twice(const std::vector<T>& values, Place place) : guarded_(values, place), plain_(values) {}
  T* for_cuda() { return guarded_.data(); }
  T* for_cpu() { return plain_.data(); }
  void expect_equal(const char* name) const {
    EXPECT_TRUE(bits(guarded_.values()) == bits(plain_)) << name;
    EXPECT_TRUE(guarded_.holds_its_guards()) << name;
  }

 private:
  GuardedArray<T> guarded_;
  std::vector<T> plain_;
};

// What every optimizer has.
struct Slice {
  Slice(Numbers& numbers, int64_t n, zr_dtype type, const Layout& layout)
      : count(n), dtype(type), weight(numbers.weights(n), layout.of(0)), grad(numbers.gradients(n), layout.of(1)) {
    if (dtype != ZR_F32) out.emplace(std::vector<uint16_t>(static_cast<size_t>(n)), layout.of(2));
  }
  device_kernels::SliceArrays arrays() {
    return {weight.for_cuda(), grad.for_cuda(), out ? out->for_cuda() : nullptr, count, dtype};
  }
  uint16_t* out_for_cpu() { return out ? out->for_cpu() : nullptr; }
  void expect_equal() const {
    weight.expect_equal("weight");
    grad.expect_equal("grad");
    if (out) out->expect_equal("rounded weight");
  }
  int64_t count;
  zr_dtype dtype;
  Twice<float> weight, grad;
  std::optional<Twice<uint16_t>> out;
};

// Slices of every length, dtype and layout, for one call.
template <class S>
std::list<S> slices(const std::vector<int64_t>& counts = kCounts) {
  Numbers numbers;
  std::list<S> all;
  for (const int64_t count : counts)
    for (const zr_dtype dtype : kDtypes)
      for (const Layout& layout : kLayouts) all.emplace_back(numbers, count, dtype, layout);
  return all;
}
// Each batch is one launch, however many entries and elements it has.
template <class B, class S, class Entry>
void launch(std::list<S>& all, const Entry& entry, void (*on_device)(const B&, zr_device, void*)) {
  auto next = all.begin();
  const int before = cuda_on_cpu::launches;
  device_kernels::in_batches<B>(
      static_cast<uint32_t>(all.size()),
      [&](uint32_t, auto& to) {
        to = entry(*next++);
        return true;
      },
      [&](const B& batch) {
        on_device(batch, {ZR_DEVICE_CUDA, 0}, nullptr);
      });
  EXPECT_EQ(cuda_on_cpu::launches - before, static_cast<int>((all.size() + B::kEntries - 1) / B::kEntries));
}

constexpr AdamWConstants kAdamW{0.5F, 0.999F, 0.9F, 0.1F, 0.999F, 0.001F, 1e-3F, 1e-8F};

struct AdamWArrays : Slice {
  AdamWArrays(Numbers& numbers, int64_t n, zr_dtype type, const Layout& layout)
      : Slice(numbers, n, type, layout),
        exp_avg(numbers.weights(n), layout.of(3)),
        exp_avg_sq(numbers.positives(n), layout.of(4)) {}
  Twice<float> exp_avg, exp_avg_sq;
};

TEST(AdamWKernelForCuda, HasTheBitsOfTheCpu) {
  auto all = slices<AdamWArrays>();
  ASSERT_EQ(all.size(), 288u);
  ASSERT_EQ(AdamWBatch::kEntries, 256u);
  const int before = cuda_on_cpu::launches;
  launch<AdamWBatch>(
      all,
      [](AdamWArrays& s) {
        return AdamWSlice{s.arrays(), {s.exp_avg.for_cuda(), s.exp_avg_sq.for_cuda()}, kAdamW};
      },
      adamw_on_device);
  EXPECT_EQ(cuda_on_cpu::launches - before, 2);
  for (AdamWArrays& s : all) {
    portable::adamw(kAdamW, {s.weight.for_cpu(), s.grad.for_cpu(), s.exp_avg.for_cpu(), s.exp_avg_sq.for_cpu(), s.count,
                             s.out_for_cpu(), s.dtype, false});
    SCOPED_TRACE(std::to_string(s.count) + " elements, dtype " + std::to_string(s.dtype));
    s.expect_equal();
    s.exp_avg.expect_equal("exp_avg");
    s.exp_avg_sq.expect_equal("exp_avg_sq");
  }
}

struct SgdArrays : Slice {
  SgdArrays(Numbers& numbers, int64_t n, zr_dtype type, const Layout& layout)
      : Slice(numbers, n, type, layout), buffer(numbers.weights(n), layout.of(3)) {}
  Twice<float> buffer;
};

class SgdKernelForCuda : public ::testing::TestWithParam<SgdConstants> {};

TEST_P(SgdKernelForCuda, HasTheBitsOfTheCpu) {
  const SgdConstants constants = GetParam();
  const bool has_buffer = constants.momentum != 0;
  auto all = slices<SgdArrays>();
  launch<SgdBatch>(
      all,
      [&](SgdArrays& s) {
        return SgdSlice{s.arrays(), has_buffer ? s.buffer.for_cuda() : nullptr, constants};
      },
      sgd_on_device);
  for (SgdArrays& s : all) {
    portable::sgd(constants, {s.weight.for_cpu(), s.grad.for_cpu(), has_buffer ? s.buffer.for_cpu() : nullptr, s.count,
                              s.out_for_cpu(), s.dtype, false});
    SCOPED_TRACE(std::to_string(s.count) + " elements, dtype " + std::to_string(s.dtype));
    s.expect_equal();
    s.buffer.expect_equal("momentum_buffer");
  }
}

INSTANTIATE_TEST_SUITE_P(Momentum, SgdKernelForCuda,
                         ::testing::Values(SgdConstants{0.5F, 0, 0, 1, 0.1F, false, false, false},
                                           SgdConstants{0.5F, 0.01F, 0, 1, 0.1F, true, false, false},
                                           SgdConstants{0.5F, 0.01F, 0.9F, 0.5F, 0.1F, true, true, false},
                                           SgdConstants{0.5F, 0, 0.9F, 1, 0.1F, false, false, false},
                                           SgdConstants{0.5F, 0.01F, 0.9F, 1, 0.1F, true, false, true}));

struct AdamW8Arrays : Slice {
  AdamW8Arrays(Numbers& numbers, int64_t n, zr_dtype type, const Layout& layout)
      : Slice(numbers, n, type, layout),
        exp_avg(numbers.codes(n), layout.of(3)),
        exp_avg_sq(numbers.codes(n), layout.of(4)),
        scale(numbers.positives(blocks()), layout.place),
        scale_sq(numbers.positives(blocks()), layout.place) {}
  int64_t blocks() const { return (count + kStateBlock - 1) / kStateBlock; }
  Twice<uint8_t> exp_avg, exp_avg_sq;
  Twice<float> scale, scale_sq;
};

TEST(AdamW8KernelForCuda, HasTheBitsOfTheCpu) {
  auto all = slices<AdamW8Arrays>({1, 31, 255, 256, 257, 2049, 9001});
  launch<AdamW8Batch>(
      all,
      [](AdamW8Arrays& s) {
        return AdamW8Slice{s.arrays(),         s.exp_avg.for_cuda(),  s.exp_avg_sq.for_cuda(),
                           s.scale.for_cuda(), s.scale_sq.for_cuda(), kAdamW};
      },
      adamw8_on_device);
  for (AdamW8Arrays& s : all) {
    portable::adamw8(kAdamW, {s.weight.for_cpu(), s.grad.for_cpu(), s.exp_avg.for_cpu(), s.exp_avg_sq.for_cpu(),
                              s.scale.for_cpu(), s.scale_sq.for_cpu(), s.count, s.out_for_cpu(), s.dtype});
    SCOPED_TRACE(std::to_string(s.count) + " elements, dtype " + std::to_string(s.dtype));
    s.expect_equal();
    s.exp_avg.expect_equal("codes of exp_avg");
    s.exp_avg_sq.expect_equal("codes of exp_avg_sq");
    s.scale.expect_equal("scales of exp_avg");
    s.scale_sq.expect_equal("scales of exp_avg_sq");
  }
}

// The order that zr_optimizer_device_api states: sixteen lanes, each in order, then the lanes in order.
double norm_block(const float* values, int64_t count) {
  double lanes[device_kernels::kNormLanes] = {}, sum = 0;
  for (int64_t i = 0; i < count; ++i) lanes[i % device_kernels::kNormLanes] += double{values[i]} * double{values[i]};
  for (const double lane : lanes) sum += lane;
  return sum;
}

TEST(NormBlocksForCuda, HaveTheBitsOfTheCpu) {
  using device_kernels::NormBatch;
  using device_kernels::NormView;
  Numbers numbers;
  for (const int64_t block : {int64_t{300}, int64_t{1024}}) {
    struct View {
      View(Numbers& from, int64_t n, int64_t of_block, Place place)
          : values(from.weights(n), place), count(n), sums(std::vector<double>((n + of_block - 1) / of_block), place) {}
      GuardedArray<float> values;
      int64_t count;
      GuardedArray<double> sums;
    };
    std::list<View> all;
    for (const int64_t count : kCounts)
      for (const Place place : {Place::aligned, Place::end_of_page, Place::odd_elements})
        all.emplace_back(numbers, count, block, place);
    NormBatch batch;
    for (View& view : all) batch.entries[batch.n++] = {view.values.data(), view.count, view.sums.data()};
    const int before = cuda_on_cpu::launches;
    device_kernels::norm_blocks_on_device(batch, block, {ZR_DEVICE_CUDA, 0}, nullptr);
    EXPECT_EQ(cuda_on_cpu::launches - before, 1);
    for (View& view : all) {
      std::vector<double> expected;
      for (int64_t at = 0; at < view.count; at += block)
        expected.push_back(norm_block(view.values.data() + at, std::min(block, view.count - at)));
      EXPECT_EQ(view.sums.values(), expected) << view.count << " elements";
      EXPECT_TRUE(view.sums.holds_its_guards());
      EXPECT_TRUE(view.values.holds_its_guards());
    }
  }
}

}  // namespace
