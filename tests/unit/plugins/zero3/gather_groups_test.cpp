// All-gather groups: sizes computed without querying every rank equal those that every rank computes.
#include "gather_groups.hpp"

#include <gtest/gtest.h>

#include <random>

#include "base/draft_abi.hpp"
#include "plan/plan.hpp"

namespace {

using namespace zr::host;
using zero3::GatherGroups;

// coarse: an optimizer needs every third tensor complete, with twice the cost, and every third in blocks of 3072.
plan::PlanInput input_of(std::mt19937& random, int world, bool frozen, bool coarse) {
  plan::PlanInput in;
  in.world = world;
  const std::vector<int64_t> sizes{1, 31, 1024, 5000, 1 << 16, 300001, 1 << 20};
  for (int i = 0; i < 12; ++i) {
    const int64_t count = sizes[random() % sizes.size()] + static_cast<int64_t>(random() % 3) * 7;
    const std::string module = "m" + std::to_string(i / 3);
    in.parameters.push_back({module + ".p" + std::to_string(i), {}, {count}, count, frozen && i % 5 == 0, 0});
    if (coarse) in.description_of.push_back(static_cast<uint32_t>(i % 3));
  }
  if (!coarse) return in;
  in.descriptions.resize(3);
  in.descriptions[1].granularity = ZR_TENSORWISE;
  in.descriptions[1].cost = 1e6;
  in.descriptions[2].slots = {{"scale", ZR_F32, ZR_SLOT_PER_BLOCK, 0, 3072}};
  return in;
}

TEST(GatherGroupsTest, KnowBucketSizesAndTheirShardWithoutOtherRanks) {
  std::mt19937 random(3);
  for (const int world : {1, 2, 3, 7, 64, 1000})
    for (const int64_t bucket : {16384, 100000, 1 << 22})
      for (const int64_t persistent : {int64_t{0}, int64_t{6000}}) {
        const bool coarse = bucket == 16384 || persistent > 0;
        const plan::PlanInput in = input_of(random, world, bucket == 100000, coarse);
        for (const int rank : {0, world / 2, world - 1}) {
          const plan::PlanInputView view(in, rank);
          const GatherGroups groups(view.in(), bucket, persistent);
          int64_t trainable = 0, covered = 0;
          for (const plan::Parameter& p : in.parameters) trainable += p.frozen ? 0 : p.count;
          for (std::size_t b = 0; b < groups.buckets(); ++b) {
            const zr::GradientBucket whole = groups.bucket(b);
            ASSERT_EQ(groups.bucket_size(b), whole.size()) << world << " ranks, bucket " << b;
            std::vector<zr::GradientBucket::ParamRange> own_ranges;
            EXPECT_EQ(groups.own_part(b, own_ranges), whole.counts[static_cast<std::size_t>(rank)]);
            int64_t before = 0;
            for (int r = 0; r < rank; ++r) before += whole.counts[static_cast<std::size_t>(r)];
            EXPECT_EQ(groups.before_own(b), before);
            std::size_t found = 0;
            for (const auto& range : own_ranges)
              for (const auto& one : whole.ranges)
                found += one.param == range.param && one.first == range.first && one.count == range.count &&
                         one.offset == before + range.offset;
            EXPECT_EQ(found, own_ranges.size());
            for (const auto& range : whole.ranges) {
              const int64_t block = in.cut_block(range.param), end = range.first + range.count;
              EXPECT_EQ(range.first % block, 0);
              EXPECT_TRUE(end % block == 0 || end == in.parameters[range.param].count) << range.param;
              covered += range.count;
            }
          }
          EXPECT_EQ(covered, trainable) << "every element is in one bucket";
        }
      }
}

}  // namespace
