// The reduction of the communicators for CUDA, run on the CPU (tests/simulators/cuda_on_cpu), beside
// zr::ordered_reduce().
#include <gmock/gmock.h>

#include <list>
#include <map>
#include <random>
#include <string>

#include "cuda_reduce.hpp"
#include "guarded_array.hpp"

namespace {

using zr::test::GuardedArray;
using zr::test::Layout;
using zr::test::Place;

int64_t bytes_of(zr_dtype dtype) {
  switch (dtype) {
    case ZR_F64:
    case ZR_I64: return 8;
    case ZR_F32:
    case ZR_I32: return 4;
    case ZR_BF16:
    case ZR_F16: return 2;
    default: return 1;
  }
}

struct Types {
  zr_dtype src, dst;
};
constexpr Types kTypes[] = {{ZR_F32, ZR_F32}, {ZR_F64, ZR_F64}, {ZR_BF16, ZR_BF16}, {ZR_BF16, ZR_F32},
                            {ZR_F16, ZR_F16}, {ZR_F16, ZR_F32}, {ZR_I8, ZR_I8},     {ZR_U8, ZR_U8},
                            {ZR_I32, ZR_I32}, {ZR_I64, ZR_I64}};

// Bytes of numbers of moderate size: NaNs, whose bits differ between devices, are left out.
std::vector<unsigned char> numbers(std::mt19937& random, zr_dtype dtype, int64_t count) {
  std::vector<unsigned char> bytes(static_cast<size_t>(count * bytes_of(dtype)));
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < count; ++i) {
    unsigned char* const to = bytes.data() + i * bytes_of(dtype);
    const float value = normal(random);
    const auto put = [&](auto number) { std::memcpy(to, &number, sizeof number); };
    if (dtype == ZR_F32) put(value);
    if (dtype == ZR_F64) put(double{value} + 1e-9);
    if (dtype == ZR_BF16) put(zr::to_bf16(value));
    if (dtype == ZR_F16) put(zr::to_f16(value));
    if (dtype == ZR_I8 || dtype == ZR_U8) put(static_cast<uint8_t>(random()));
    if (dtype == ZR_I32) put(static_cast<int32_t>(random()));
    if (dtype == ZR_I64) put(static_cast<int64_t>(random()) << 30);
  }
  return bytes;
}

struct Case {
  zr::ReduceKind kind;
  int sources, outs;
  int64_t first, count;
  Layout layout;  // sources, then outs
};

void compare(const Case& c) {
  std::mt19937 random(3);
  const int64_t all = c.first + c.count + 5;
  std::list<GuardedArray<unsigned char>> sources, outs;
  std::vector<std::vector<unsigned char>> expected;
  std::vector<const void*> from;
  std::vector<void*> to, to_expected;
  for (int i = 0; i < c.sources; ++i)
    from.push_back(sources.emplace_back(numbers(random, c.kind.src, all), c.layout.of(i), bytes_of(c.kind.src)).data());
  for (int i = 0; i < c.outs; ++i) {
    expected.push_back(numbers(random, c.kind.dst, all));
    to.push_back(outs.emplace_back(expected.back(), c.layout.of(c.sources + i), bytes_of(c.kind.dst)).data());
  }
  for (auto& out : expected) to_expected.push_back(out.data());
  zr::ordered_reduce(c.kind, from.data(), c.sources, to_expected.data(), c.outs, c.first, c.count, false);
  peer::cuda_reduce(c.kind, from.data(), c.sources, to.data(), c.outs, c.first, c.count, nullptr);
  auto want = expected.begin();
  for (const auto& out : outs) {
    EXPECT_TRUE(out.values() == *want++);
    EXPECT_TRUE(out.holds_its_guards());
  }
}

class ReduceKernelForCuda : public ::testing::TestWithParam<Types> {};

TEST_P(ReduceKernelForCuda, HasTheBitsOfTheCpu) {
  const auto [src, dst] = GetParam();
  const std::vector<Layout> layouts{{Place::aligned}, {Place::end_of_page}, {Place::aligned, 1}, {Place::aligned, 3}};
  const auto compare_sums = [&](uint32_t reduce, bool accumulate, int64_t first, int64_t count) {
    SCOPED_TRACE("reduce " + std::to_string(reduce) + ", accumulate " + std::to_string(accumulate) + ", from " +
                 std::to_string(first) + ", " + std::to_string(count) + " elements");
    // Only sums have a loop of their own for aligned arrays.
    for (const Layout& layout : reduce == ZR_SUM ? layouts : std::vector<Layout>{{Place::end_of_page}})
      compare({{reduce, accumulate, src, dst}, 3, accumulate ? 1 : 3, first, count, layout});
  };
  for (const bool accumulate : {false, true}) {
    for (const auto& [first, count] : {std::pair{0, 1}, {64, 4096}, {0, 1003}, {3, 70}})
      compare_sums(ZR_SUM, accumulate, first, count);
    for (const uint32_t reduce : {ZR_MIN, ZR_MAX}) compare_sums(reduce, accumulate, 3, 1003);
  }
}

std::string name_of(const ::testing::TestParamInfo<Types>& info) {
  static const std::map<zr_dtype, std::string> names{{ZR_F32, "fp32"},  {ZR_F64, "fp64"}, {ZR_BF16, "bf16"},
                                                     {ZR_F16, "fp16"},  {ZR_I8, "int8"},  {ZR_U8, "uint8"},
                                                     {ZR_I32, "int32"}, {ZR_I64, "int64"}};
  return names.at(info.param.src) + "_to_" + names.at(info.param.dst);
}
INSTANTIATE_TEST_SUITE_P(Dtypes, ReduceKernelForCuda, ::testing::ValuesIn(kTypes), name_of);

TEST(ReduceKernelForCuda, TakesOneSourceAndSixtyFour) {
  for (const int sources : {1, 64})
    compare({{ZR_SUM, false, ZR_BF16, ZR_F32}, sources, sources, 64, 2000, {Place::aligned}});
}

// More vectors than the threads of the largest grid: threads go on to the next ones.
TEST(ReduceKernelForCuda, CoversMoreElementsThanAGridHasThreads) {
  compare({{ZR_SUM, false, ZR_F64, ZR_F64}, 2, 1, 0, 4096 * 256 * 2 + 4099, {Place::aligned}});
}

}  // namespace
