// All-gather groups: sizes computed without querying every rank equal those that every rank computes.
#include "gather_groups.hpp"

#include <gtest/gtest.h>

#include <random>

#include "plan/plan.hpp"

namespace {

using namespace zr::host;
using zero3::GatherGroups;

plan::PlanInput input_of(std::mt19937& random, int world, bool frozen) {
  plan::PlanInput in;
  in.world = world;
  const std::vector<int64_t> sizes{1, 31, 1024, 5000, 1 << 16, 300001, 1 << 20};
  for (int i = 0; i < 12; ++i) {
    const int64_t count = sizes[random() % sizes.size()] + static_cast<int64_t>(random() % 3) * 7;
    const std::string module = "m" + std::to_string(i / 3);
    in.parameters.push_back({module + ".p" + std::to_string(i), {}, {count}, count, frozen && i % 5 == 0, 0});
  }
  return in;
}

TEST(GatherGroupsTest, KnowBucketSizesAndTheirShardWithoutOtherRanks) {
  std::mt19937 random(3);
  for (const int world : {1, 2, 3, 7, 64, 1000})
    for (const int64_t bucket : {16384, 100000, 1 << 22})
      for (const int64_t persistent : {int64_t{0}, int64_t{6000}}) {
        const plan::PlanInput in = input_of(random, world, bucket == 100000);
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
            for (const auto& range : whole.ranges) covered += range.count;
          }
          EXPECT_EQ(covered, trainable) << "every element is in one bucket";
        }
      }
}

}  // namespace
