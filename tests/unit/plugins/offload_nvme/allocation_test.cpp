// The layout of allocations in files.
#include "allocation.hpp"

#include <gtest/gtest.h>

#include <random>

namespace nvme {
namespace {

TEST(StripesTest, GiveEachFileExactlyItsBlocks) {
  for (const uint32_t files : {1u, 2u, 3u, 7u})
    for (uint64_t bytes = 0; bytes <= 100; ++bytes) {
      std::vector<uint64_t> counted(files);
      for (uint64_t i = 0; i < bytes; ++i) ++counted[i / 8 % files];
      for (uint32_t file = 0; file < files; ++file)
        EXPECT_EQ((Stripes{8, files}.bytes_in(file, bytes)), counted[file]) << bytes << " bytes, file " << file;
    }
}

TEST(RangesTest, NeverOverlapAndMergeWhenFreed) {
  Ranges ranges;
  std::mt19937 random(3);
  std::vector<std::pair<uint64_t, uint64_t>> held;
  for (int i = 0; i < 5000; ++i) {
    if (held.size() < 20 && random() % 2) {
      const uint64_t bytes = 1 + random() % 50, at = ranges.take(bytes);
      EXPECT_LE(at + bytes, ranges.end());
      for (const auto& [other, size] : held) ASSERT_TRUE(at + bytes <= other || other + size <= at);
      held.emplace_back(at, bytes);
    } else if (!held.empty()) {
      const std::size_t one = random() % held.size();
      ranges.release(held[one].first, held[one].second);
      held.erase(held.begin() + static_cast<std::ptrdiff_t>(one));
    }
  }
  EXPECT_LT(ranges.end(), 20u * 50 * 3);
  uint64_t in_use = 0;
  for (const auto& [at, bytes] : held) in_use += bytes;
  EXPECT_EQ(ranges.in_use(), in_use);
  for (const auto& [at, bytes] : held) ranges.release(at, bytes);
  EXPECT_EQ(ranges.end(), 0u) << "the free space is one range again";
  EXPECT_EQ(ranges.in_use(), 0u);
}

TEST(RangesTest, EndWithBytesInUse) {
  Ranges ranges;
  for (const uint64_t at : {0u, 10u, 20u}) EXPECT_EQ(ranges.take(10), at);
  ranges.release(10, 10);
  EXPECT_EQ(ranges.end(), 30u);
  EXPECT_EQ(ranges.in_use(), 20u);
  EXPECT_EQ(ranges.take(4), 10u);
  EXPECT_EQ(ranges.take(7), 30u) << "the rest of the free range is too small";
  ranges.release(30, 7);
  ranges.release(20, 10);
  EXPECT_EQ(ranges.end(), 14u) << "without the free range before it";
  EXPECT_EQ(ranges.in_use(), 14u);
  EXPECT_EQ(ranges.take(20), 14u);
}

}  // namespace
}  // namespace nvme
