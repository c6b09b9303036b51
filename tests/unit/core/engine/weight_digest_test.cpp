// Which weights a rank digests in a step, and the values that it exchanges. tests/multirank/engine/weight_digest_test
// compares them between ranks.
#include "engine/weight_digest.hpp"

#include <gtest/gtest.h>

#include <numeric>

#include "checkpoint/manifest.hpp"
#include "unit/core/one_rank.hpp"

namespace zr::testing {
namespace {

using namespace host;
using Digest = engine::WeightDigest::Digest;

constexpr int64_t kA = 1000, kB = 3000, kFrozen = 40;

// Elements [first, first + count) of the weights, which are in one buffer.
struct Elements {
  int64_t first, count;
};

// Rank 0 of two ranks that both have all weights ("a", "b", and the frozen "c") and update all of them. A parameter
// starts at the next multiple of 32 elements.
class Replicated {
 public:
  explicit Replicated(bool shared = false, bool shards = false)
      : plan_(plan::make_plan(input(), 0, strategy(shards))),
        weights_(at(2) + kFrozen),
        digest_(plan_, {weights_.data(), nullptr}, {shared ? weights_.data() : nullptr, nullptr}, 2, nullptr) {
    std::iota(weights_.begin(), weights_.end(), 1.0f);
  }
  // The first element of a parameter in the buffer.
  static int64_t at(uint32_t param) { return param == 0 ? 0 : param == 1 ? 1024 : 1024 + 3008; }
  engine::WeightDigest& digest() { return digest_; }
  std::vector<float>& weights() { return weights_; }
  // The optimizer updates "a" and "b" this often.
  void update(int times) {
    for (int i = 0; i < times; ++i) digest_.updated({1, 1, 0});
  }
  // What a rank exchanges for these ranges: the hash of their hashes.
  uint64_t expected(const std::vector<Elements>& ranges) const {
    std::vector<uint64_t> hashes;
    for (const Elements& range : ranges) hashes.push_back(checkpoint::hash_of(&weights_[range.first], range.count * 4));
    return checkpoint::hash_of(hashes.data(), std::ssize(hashes) * 8);
  }

 private:
  static plan::PlanInput input() {
    plan::PlanInput in;
    in.world = 2;
    in.parameters = {
        {"a", {}, {kA}, kA, false, 0}, {"b", {}, {kB}, kB, false, 0}, {"c", {}, {kFrozen}, kFrozen, true, 0}};
    return in;
  }
  // shards: rank 0 has only "a" and rank 1 only "b", as shards.
  static plan::StrategyPlan strategy(bool shards) {
    return [shards](const zr_plan_in& in, const zr_plan_sink& sink) {
      const int64_t elements = at(2) + 64;
      for (const uint32_t role : {shards ? ZR_ROLE_WEIGHT_SHARD : ZR_ROLE_WEIGHT, ZR_ROLE_REDUCED_GRAD}) {
        const zr_buffer buffer{sizeof(zr_buffer), role,   role == ZR_ROLE_REDUCED_GRAD ? "sums" : "weights",
                               elements,          ZR_F32, 0};
        sink.buffer(sink.ctx, &buffer);
      }
      for (uint32_t buffer = 0; buffer < 2; ++buffer)
        for (uint32_t p = 0; p < in.n_params; ++p) {
          const bool frozen = (in.params[p]->flags & ZR_PARAM_FROZEN) != 0;
          if ((buffer == 1 && frozen) || (shards && static_cast<int32_t>(p) % 2 != in.rank)) continue;
          const uint32_t role = buffer == 1 ? ZR_ROLE_REDUCED_GRAD : shards ? ZR_ROLE_WEIGHT_SHARD : ZR_ROLE_WEIGHT;
          const zr_piece piece{sizeof(zr_piece), role, p, buffer, 0, in.params[p]->count, at(p)};
          sink.piece(sink.ctx, &piece);
        }
    };
  }
  plan::MemoryPlan plan_;
  std::vector<float> weights_;
  engine::WeightDigest digest_;
};

// An update touches 4 bytes of weight and 4 bytes of gradient of 4000 elements: 32000 bytes per rank. One byte in 200
// is digested: 160 bytes, 40 elements.
TEST(WeightDigestTest, DigestsHalfAPercentOfOptimizerBytesPerStep) {
  Replicated f;
  EXPECT_EQ(f.digest().next().weights, 0u) << "before the first update";
  f.update(1);
  EXPECT_EQ(f.digest().optimizer_bytes(), 32000);
  EXPECT_EQ(f.digest().next().weights, 0u) << "40 elements are less than the smallest turn of 64";
  f.update(1);
  EXPECT_EQ(f.digest().next().weights, f.expected({{0, 80}}));
  EXPECT_EQ(f.digest().bytes(), 320);
  f.update(1);
  EXPECT_EQ(f.digest().next().weights, 0u);
  f.update(4);
  EXPECT_EQ(f.digest().next().weights, f.expected({{80, 200}})) << "5 updates since the last turn";
  EXPECT_EQ(f.digest().bytes(), 320 + 800);
  EXPECT_EQ(f.digest().optimizer_bytes(), 7 * 32000);
}

TEST(WeightDigestTest, CyclesOverAllParametersIncludingFrozenOnes) {
  Replicated f;
  f.update(50);
  EXPECT_EQ(f.digest().next().weights, f.expected({{0, kA}, {1024, 1000}})) << "2000 elements";
  EXPECT_EQ(f.digest().cycles(), 0);
  f.update(50);
  EXPECT_EQ(f.digest().next().weights, f.expected({{2024, 2000}})) << "the rest of 'b'";
  f.update(2);
  EXPECT_EQ(f.digest().next().weights, f.expected({{Replicated::at(2), kFrozen}}))
      << "a cycle ends, so the turn has 40 of its 80 elements";
  EXPECT_EQ(f.digest().cycles(), 1);
  f.update(1);
  EXPECT_EQ(f.digest().next().weights, f.expected({{0, 80}})) << "40 elements are left from the turn before";
}

TEST(WeightDigestTest, DigestsNoWeightTwiceInAStep) {
  Replicated f;
  f.update(1000);
  EXPECT_EQ(f.digest().next().weights, f.expected({{0, kA}, {1024, kB}, {Replicated::at(2), kFrozen}}));
  EXPECT_EQ(f.digest().bytes(), 4 * (kA + kB + kFrozen));
  EXPECT_EQ(f.digest().cycles(), 1);
}

TEST(WeightDigestTest, CountsOnlyUpdatedParameters) {
  Replicated f;
  f.digest().updated({1, 0, 1});
  EXPECT_EQ(f.digest().optimizer_bytes(), 8 * kA) << "a frozen parameter has no states";
}

TEST(WeightDigestTest, DigestsAWrittenParameterInFullInTheNextStep) {
  Replicated f;
  f.digest().written(1);
  const Digest digest = f.digest().next();
  EXPECT_EQ(digest.values, f.expected({{1024, kB}}));
  const uint32_t list[] = {1};
  EXPECT_EQ(digest.written, checkpoint::hash_of(list, sizeof list));
  EXPECT_EQ(digest.weights, 0u);
  EXPECT_EQ(f.digest().bytes(), 4 * kB);
  const Digest next = f.digest().next();
  EXPECT_EQ(next.values, 0u) << "only in the step after the write";
  EXPECT_EQ(next.written, 0u);
}

TEST(WeightDigestTest, DigestsSeveralWrittenParametersInOrder) {
  Replicated f;
  for (const uint32_t param : {2u, 0u, 2u}) f.digest().written(param);
  const Digest digest = f.digest().next();
  EXPECT_EQ(digest.values, f.expected({{0, kA}, {Replicated::at(2), kFrozen}}));
  const uint32_t list[] = {0, 2};
  EXPECT_EQ(digest.written, checkpoint::hash_of(list, sizeof list));
}

TEST(WeightDigestTest, ReadsTheWeightsOfTheStep) {
  Replicated f, other;
  f.update(2);
  other.update(2);
  other.weights()[79] += 1;
  EXPECT_EQ(other.digest().next().weights, other.expected({{0, 80}}));
  EXPECT_NE(other.expected({{0, 80}}), f.digest().next().weights);
}

TEST(WeightDigestTest, DigestsNoSharedWeights) {
  Replicated f(true);
  f.update(1000);
  f.digest().written(0);
  const Digest digest = f.digest().next();
  EXPECT_EQ(digest.weights, 0u);
  EXPECT_EQ(digest.values, 0u);
  EXPECT_EQ(digest.written, 0u);
  EXPECT_EQ(f.digest().bytes(), 0);
  EXPECT_EQ(f.digest().optimizer_bytes(), 1000 * 32000);
}

TEST(WeightDigestTest, DigestsNoShardedWeights) {
  Replicated f(false, true);
  f.update(1000);
  f.digest().written(0);
  const Digest digest = f.digest().next();
  EXPECT_EQ(digest.weights, 0u);
  EXPECT_EQ(digest.values, 0u);
  EXPECT_EQ(f.digest().bytes(), 0);
  EXPECT_EQ(f.digest().optimizer_bytes(), 1000 * 16000) << "each parameter has one owner: the mean of two ranks";
}

// The communicator of one rank suffices as long as no digest differs.
TEST(WeightDigestTest, EqualDigestsNeedNoFurtherExchange) {
  const OneRankJob rig;
  Replicated f;
  f.update(2);
  f.digest().written(1);
  const Digest digest = f.digest().next();
  const int64_t before = f.digest().bytes(), control = rig.context().comm.volume().control_bytes;
  f.digest().compare({digest, digest}, rig.context().comm, 3);
  EXPECT_EQ(f.digest().bytes(), before);
  EXPECT_EQ(rig.context().comm.volume().control_bytes, control);
}

}  // namespace
}  // namespace zr::testing
