// Sharded parameters around their uses, on one rank, whose strategy gathers into memory of its own.
#include "engine/weight_flow.hpp"

#include <gtest/gtest.h>

#include <algorithm>

#include "engine/gradient_flow.hpp"
#include "unit/core/one_rank.hpp"
#include "zr/strategy.hpp"

namespace {

// Every parameter is one shard: unusable until it is acquired, in a copy that this object keeps until its release.
class Gathering : public zr::Strategy<Gathering> {
 public:
  explicit Gathering(const zr::Host& host) {
    host.need<zr_async_service>();  // services that need no communicator exist before it is open
    host.need<zr_machine_service>();
  }
  void plan(const zr_plan_in& in, zr::PlanBuilder& plan) const {
    int64_t elements = 0;
    for (uint32_t p = 0; p < in.n_params; ++p) elements += zr::round_up(in.params[p]->count, in.align);
    const uint32_t shards = plan.buffer(ZR_ROLE_WEIGHT_SHARD, "shards", elements, in.weight_dtype);
    const uint32_t sums = plan.buffer(ZR_ROLE_REDUCED_GRAD, "sums", elements, in.reduced_grad_dtype);
    int64_t at = 0;
    for (uint32_t p = 0; p < in.n_params; at += zr::round_up(in.params[p++]->count, in.align)) {
      plan.piece(ZR_ROLE_WEIGHT_SHARD, p, shards, 0, in.params[p]->count, at);
      plan.piece(ZR_ROLE_REDUCED_GRAD, p, sums, 0, in.params[p]->count, at);
    }
  }
  void bind(const zr_plan_in& in, const zr::Binding& bound) {
    int64_t at = 0;
    for (uint32_t p = 0; p < in.n_params; at += zr::round_up(in.params[p++]->count, in.align))
      shards_.push_back(zr::part(bound.buffers[0], at, in.params[p]->count));
    full_.resize(shards_.size());
  }
  zr_view grad_destination(uint32_t, int64_t&, const zr_use&) { return {}; }
  void grad_ready(uint32_t, int64_t, int64_t, const zr_use&) {}
  void event(uint32_t, const zr_use&) {}
  void grads_finish(const zr_use&) {}
  void updated(const zr_use&) {}
  void acquire(const uint32_t* params, uint32_t n, const zr_use& use, zr_view* full) {
    uses.emplace_back(use.phase, use.micro);
    for (uint32_t i = 0; i < n; ++i) {
      const auto* shard = static_cast<const float*>(shards_[params[i]].data);
      // Memory at a multiple of 64 bytes, or one element behind it.
      full_[params[i]].resize(static_cast<std::size_t>(shards_[params[i]].count) + 32);
      const auto address = reinterpret_cast<uintptr_t>(full_[params[i]].data());
      float* const values = full_[params[i]].data() + (64 - address % 64) % 64 / sizeof(float) + misaligned;
      std::copy_n(shard, shards_[params[i]].count, values);
      full[i] = {values, shards_[params[i]].count, ZR_F32, 0, {1, 0}};
    }
  }
  void release(const uint32_t* params, uint32_t n, const zr_use& use) {
    uses.emplace_back(use.phase, use.micro);
    for (uint32_t i = 0; i < n; ++i) full_[params[i]].clear();
  }

  static inline std::vector<std::pair<uint32_t, uint32_t>> uses;  // phase and micro-step of each acquire and release
  static inline bool misaligned = false;

 private:
  std::vector<zr_view> shards_;
  std::vector<std::vector<float>> full_;
};

constexpr zr_component kGathering = zr::component<Gathering>("zero3", "1");

}  // namespace

namespace zr::testing {
namespace {

using namespace host;

struct WeightFlowFixture {
  explicit WeightFlowFixture(const std::string& strategy = "zero3")
      : rig({"strategy=" + strategy}, strategy == "zero3" ? &kGathering : nullptr) {}
  std::vector<float> attached(uint32_t param) const {
    const auto* values = static_cast<const float*>(rig.model.attached[param]);
    return values ? std::vector<float>(values, values + rig.model.parameters()[param].count) : std::vector<float>();
  }
  std::vector<float> read(uint32_t param) { return full_tensor(state, rig.model, param, state::LogicalTensor::value); }
  OneRankJob rig;
  state::ShardedState state{rig.context(), rig.job.host, rig.job.plugins.tiers, nullptr};
  engine::WeightFlow flow{rig.context(), state};
};

TEST(WeightFlowTest, ReleasesMemoryOfShardedParameters) {
  WeightFlowFixture f;
  EXPECT_TRUE(f.flow.is_sharded(0));
  EXPECT_TRUE(f.flow.is_sharded(1));
  EXPECT_EQ(f.rig.model.memory, (std::vector<void*>{nullptr, nullptr}));
  EXPECT_TRUE(f.attached(0).empty());
}

// Operators on sharded parameters communicate during backward, in autograd's thread, and ranks must agree on the order.
TEST(WeightFlowTest, ShardedParametersRuleOutDeliveryOfGradientsOnAThread) {
  for (const bool shards : {true, false}) {
    WeightFlowFixture f(shards ? "zero3" : "zero1");
    const engine::GradientFlow gradients(f.rig.context(), f.state.disk_buffers());
    EXPECT_EQ(f.rig.model.delivers_on_thread, !shards);
  }
}

TEST(WeightFlowTest, KeepsMemoryOfUnshardedParameters) {
  WeightFlowFixture f("zero1");
  EXPECT_FALSE(f.flow.is_sharded(0));
  EXPECT_NE(f.rig.model.memory[0], nullptr);
}

TEST(WeightFlowTest, AttachesFullValuesBetweenBeginAndEnd) {
  WeightFlowFixture f;
  const uint32_t params[] = {0, 1};
  f.rig.model.uses.begin(params, 2, ZR_FORWARD);
  EXPECT_EQ(f.attached(0), FakeModel::initial(1500));
  EXPECT_EQ(f.attached(1), FakeModel::initial(40));
  const bool written[] = {false, false};
  f.rig.model.uses.end(params, written, 2);
  EXPECT_TRUE(f.attached(0).empty());
  EXPECT_TRUE(f.attached(1).empty());
  EXPECT_TRUE(f.state.stored().empty());
}

TEST(WeightFlowTest, PassesPhaseAndMicroStepToTheStrategy) {
  WeightFlowFixture f;
  Gathering::uses.clear();
  const uint32_t param = 1;
  f.flow.set_phase(ZR_BACKWARD, 3);
  for (const uint32_t phase : {ZR_FORWARD, ZR_EXPORT_PHASE}) {
    f.flow.begin_use(&param, 1, phase);
    f.flow.end_use(&param, nullptr, 1);
  }
  const std::pair<uint32_t, uint32_t> backward(ZR_BACKWARD, 3), exported(ZR_EXPORT_PHASE, 3);
  EXPECT_EQ(Gathering::uses, (std::vector{backward, backward, exported, exported}));
}

TEST(WeightFlowTest, ReleasesWithThePhaseOfTheirAcquire) {
  WeightFlowFixture f;
  Gathering::uses.clear();
  const uint32_t params[] = {0, 1};
  f.flow.begin_use(&params[0], 1, ZR_FORWARD);
  f.flow.begin_use(&params[1], 1, ZR_EXPORT_PHASE);
  f.flow.end_use(params, nullptr, 2);
  const std::pair<uint32_t, uint32_t> forward(ZR_FORWARD, 0), exported(ZR_EXPORT_PHASE, 0);
  EXPECT_EQ(Gathering::uses, (std::vector{forward, exported, forward, exported}));
}

TEST(WeightFlowTest, RejectsAViewThatIsNotAligned) {
  WeightFlowFixture f;
  Gathering::misaligned = true;
  const uint32_t params[] = {0};
  const std::string failure = failure_of([&] { f.flow.begin_use(params, 1, ZR_FORWARD); });
  Gathering::misaligned = false;
  EXPECT_NE(failure.find("acquire returned an invalid view for '"), std::string::npos) << failure;
  EXPECT_NE(failure.find("memory at a multiple of 64 bytes; this is a bug in the plug-in"), std::string::npos)
      << failure;
}

TEST(WeightFlowTest, KeepsMemoryUntilTheLastUseEnds) {
  WeightFlowFixture f;
  const uint32_t param = 1;
  f.flow.begin_use(&param, 1, ZR_FORWARD);
  f.flow.begin_use(&param, 1, ZR_FORWARD);
  f.flow.end_use(&param, nullptr, 1);
  EXPECT_EQ(f.attached(1), FakeModel::initial(40));
  f.flow.end_use(&param, nullptr, 1);
  EXPECT_TRUE(f.attached(1).empty());
}

TEST(WeightFlowTest, StoresInPlaceWritesOfOperators) {
  WeightFlowFixture f;
  const uint32_t param = 1;
  f.flow.begin_use(&param, 1, ZR_FORWARD);
  static_cast<float*>(f.rig.model.attached[1])[7] = -3;
  const bool written = true;
  f.flow.end_use(&param, &written, 1);
  EXPECT_EQ(f.state.take_stored(), (std::set<uint32_t>{1}));
  std::vector<float> expected = FakeModel::initial(40);
  expected[7] = -3;
  EXPECT_EQ(f.read(1), expected);
  f.flow.begin_use(&param, 1, ZR_FORWARD);
  EXPECT_EQ(f.attached(1), expected);
  f.flow.end_use(&param, nullptr, 1);
}

TEST(WeightFlowTest, GathersAfterAnUpdate) {
  WeightFlowFixture f;
  const std::vector<float> values(40, 9);
  f.state.store(1, values.data());
  f.flow.publish_weights();
  std::vector<float> seen;
  f.flow.with_full(1, [&](const void* memory) {
    seen.assign(static_cast<const float*>(memory), static_cast<const float*>(memory) + 40);
  });
  EXPECT_EQ(seen, values);
  EXPECT_TRUE(f.attached(1).empty());
}

TEST(WeightFlowTest, UnregistersCallbacksOnDestruction) {
  OneRankJob rig({"strategy=zero3"}, &kGathering);
  state::ShardedState state(rig.context(), rig.job.host, rig.job.plugins.tiers, nullptr);
  {
    const engine::WeightFlow flow(rig.context(), state);
    EXPECT_TRUE(rig.model.uses.begin);
  }
  EXPECT_FALSE(rig.model.uses.begin);
}

}  // namespace
}  // namespace zr::testing
