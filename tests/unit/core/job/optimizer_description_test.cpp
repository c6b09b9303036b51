// What the engine accepts as the description of an optimizer. The optimizer is adamw with another describe().
#include "job/optimizer_description.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "base/draft_abi.hpp"
#include "base/text.hpp"
#include "job/plan_inputs.hpp"
#include "unit/core/one_rank.hpp"

namespace {

zr_slot slots[2];
zr_optimizer_desc described;                                 // of every parameter
std::map<std::string, zr_optimizer_desc> described_instead;  // by the name of the parameter
std::vector<zr_param> asked;
bool throws = false;

zr_code describe_instead(void*, const zr_param* param, zr_optimizer_desc* out, zr_error* error) {
  if (throws) throw 5;
  asked.push_back(*param);
  const auto found = described_instead.find(param->name);
  const zr_optimizer_desc desc = found == described_instead.end() ? described : found->second;
  if (desc.granularity == 0) {
    error->code = ZR_UNSUPPORTED;
    std::snprintf(error->msg, sizeof error->msg, "'%s' has too many dimensions", param->name);
    return ZR_UNSUPPORTED;
  }
  zr_take(out, out->size, &desc);
  return ZR_OK;
}

}  // namespace

namespace zr::testing {
namespace {

using namespace host;

const std::string kCall = "optimizer 'adamw' (" ZR_BUILD_DIR "/plugins/zr_optimizer_adamw.so): describe",
                  kInstall = "; install a newer zeroth, or a plug-in for this one";

// On the parameters "a" ([15, 100]) and "b" (40, frozen, of group 1).
class OptimizerDescriptionTest : public ::testing::Test {
 protected:
  OptimizerDescriptionTest() {
    slots[0] = {"exp_avg", ZR_F32, ZR_SLOT_LIKE_PARAM, 0, 0};
    slots[1] = {"exp_avg_sq", ZR_BF16, ZR_SLOT_LIKE_PARAM, ZR_SLOT_TRANSIENT, 0};
    described = {sizeof described, ZR_ELEMENTWISE, 0, 2, slots, uint64_t{1} << ZR_DEVICE_CPU, 0, 0, 0};
    described_instead.clear();
    asked.clear();
    throws = false;
    setup_.optimizer.table = &optimizer_;
    setup_.optimizer.drafts = true;
    optimizer_.api = &api_;
    api_.describe = describe_instead;
  }
  job::OptimizerDescriptions descriptions() {
    Ledger ledger;
    ThreadPool pool(1);
    plugin::PluginHost host(ledger, pool);
    return job::describe_parameters(job::Optimizers(host, setup_), parameters_);
  }
  plan::OptimizerDescription description() { return descriptions().descriptions[0]; }
  // The failure without its beginning, the call and the parameter "a".
  std::string problem() {
    const std::string failure = failure_of([&] { description(); }), start = kCall + " of 'a': ";
    return failure.rfind(start, 0) == 0 ? failure.substr(start.size()) : failure;
  }
  std::vector<plan::Parameter> parameters_{{"a", {}, {15, 100}, 1500, false, 0}, {"b", {}, {40}, 40, true, 1, 0, 1}};

 private:
  const test::Scratch scratch_;
  job::Setup setup_ = one_rank_setup(scratch_.folder().string(), {}, std::make_shared<OneRankControl>());
  zr_component optimizer_ = *setup_.optimizer.table;
  zr_optimizer_api api_ = *static_cast<const zr_optimizer_api*>(optimizer_.api);
};

TEST_F(OptimizerDescriptionTest, HasTheStatesOfTheOptimizer) {
  described.granularity = ZR_ROWWISE;
  described.needs = ZR_OPT_NEEDS_COMM;
  const plan::OptimizerDescription found = description();
  EXPECT_EQ(found.granularity, static_cast<uint32_t>(ZR_ROWWISE));
  EXPECT_EQ(found.needs, static_cast<uint32_t>(ZR_OPT_NEEDS_COMM));
  ASSERT_EQ(found.slots.size(), 2u);
  EXPECT_STREQ(found.slots[1].name, "exp_avg_sq");
  EXPECT_EQ(found.slots[1].dtype, ZR_BF16);
  EXPECT_EQ(found.slots[1].flags, static_cast<uint32_t>(ZR_SLOT_TRANSIENT));
}

TEST_F(OptimizerDescriptionTest, AsksForEveryParameter) {
  description();
  ASSERT_EQ(asked.size(), 2u);
  EXPECT_EQ(asked[0].size, sizeof(zr_param));
  EXPECT_STREQ(asked[0].name, "a");
  EXPECT_EQ(asked[0].ndim, 2);
  EXPECT_EQ(asked[0].count, 1500);
  EXPECT_EQ(asked[0].flags, 0u);
  EXPECT_EQ(asked[1].flags, static_cast<uint32_t>(ZR_PARAM_FROZEN));
  EXPECT_EQ(asked[1].group, 1u);
}

TEST_F(OptimizerDescriptionTest, MayHaveNoStates) {
  described.n_slots = 0;
  described.slots = nullptr;
  EXPECT_TRUE(description().slots.empty());
}

TEST_F(OptimizerDescriptionTest, ReportsThatTheOptimizerFails) {
  described_instead["b"] = {};
  EXPECT_EQ(problem(), kCall + ": 'b' has too many dimensions");
}

TEST_F(OptimizerDescriptionTest, RejectsNamesOfStatesThatCannotNameFiles) {
  const std::string rule = "' must be UTF-8 and have at most 100 bytes: this is a bug in the plug-in",
                    longest(100, 'x'), longer(101, 'x');
  slots[0].name = "caf\xe9";
  EXPECT_EQ(problem(), kCall + ": the name of state 'caf\\xe9" + rule);
  slots[0].name = longer.c_str();
  EXPECT_EQ(problem(), kCall + ": the name of state '" + longer + rule);
  slots[0].name = longest.c_str();
  EXPECT_EQ(problem(), "");
}

TEST_F(OptimizerDescriptionTest, ReportsThatTheOptimizerThrows) {
  throws = true;
  EXPECT_EQ(problem(), kCall + ": threw an exception across the C ABI; this is a bug in the plug-in");
}

TEST_F(OptimizerDescriptionTest, RejectsAnUnknownGranularity) {
  described.granularity = 4;
  EXPECT_EQ(problem(), "granularity 4 is not a granularity that this zeroth knows; install a newer zeroth");
}

TEST_F(OptimizerDescriptionTest, RejectsAnUnknownNeed) {
  described.needs = ZR_OPT_NEEDS_COMM | 4;
  EXPECT_EQ(problem(), "needs has bits that this zeroth does not know (0x4)" + kInstall);
}

TEST_F(OptimizerDescriptionTest, RejectsAnUnknownFlagOfAState) {
  slots[1].flags = ZR_SLOT_TRANSIENT | 16;
  EXPECT_EQ(problem(), "state 'exp_avg_sq': flags has bits that this zeroth does not know (0x10)" + kInstall);
}

TEST_F(OptimizerDescriptionTest, RejectsAnUnknownShapeOrDtypeOfAState) {
  slots[0].shape = 9;
  EXPECT_EQ(problem(), "state 'exp_avg': shape 9 is not a shape that this zeroth knows; install a newer zeroth");
  slots[0].shape = ZR_SLOT_LIKE_PARAM;
  slots[0].dtype = 77;
  EXPECT_EQ(problem(), "state 'exp_avg': dtype 77 is not a dtype that this zeroth knows; install a newer zeroth");
}

TEST_F(OptimizerDescriptionTest, RejectsABlockOfAStateWithoutBlocks) {
  slots[0].block = 64;
  EXPECT_EQ(problem(), "state 'exp_avg': block has bits that this zeroth does not know (0x40)" + kInstall);
  slots[0].shape = ZR_SLOT_PER_BLOCK;
  EXPECT_EQ(problem(), "");
}

TEST_F(OptimizerDescriptionTest, RejectsABlockThatFitsNoRow) {
  slots[0].shape = ZR_SLOT_PER_BLOCK;
  slots[0].block = 0;
  EXPECT_EQ(problem(), "state 'exp_avg': block is 0, must be at least 1: this is a bug in the plug-in");
  slots[0].shape = ZR_SLOT_PER_COLUMN;
  EXPECT_EQ(problem(), "state 'exp_avg': block is 0, must be at least 1: this is a bug in the plug-in");
  slots[0].block = 250;
  EXPECT_EQ(
      problem(),
      "state 'exp_avg': block is 250, must be a multiple of the 100 elements of a row: this is a bug in the plug-in");
}

TEST_F(OptimizerDescriptionTest, RejectsACostThatIsNotANumber) {
  described.cost = -1;
  EXPECT_EQ(problem(), "cost is -1, must be finite and at least 0: this is a bug in the plug-in");
  described.cost = std::nan("");
  EXPECT_EQ(problem(), "cost is nan, must be finite and at least 0: this is a bug in the plug-in");
  described.cost = 7.5;
  EXPECT_EQ(description().cost, 7.5);
}

TEST_F(OptimizerDescriptionTest, RejectsAnOptimizerThatDoesNotAcceptHostMemory) {
  described.device_types = uint64_t{1} << ZR_DEVICE_CUDA;
  EXPECT_EQ(problem(),
            "device_types is 0x4, without CPU memory (0x2), which every optimizer must accept: this is a bug in the "
            "plug-in");
  described.device_types = 0;
  EXPECT_EQ(problem(),
            "device_types is 0x0, without CPU memory (0x2), which every optimizer must accept: this is a bug in the "
            "plug-in");
  described.device_types = uint64_t{1} << ZR_DEVICE_CPU | uint64_t{1} << ZR_DEVICE_CUDA | uint64_t{1} << 40;
  EXPECT_EQ(problem(), "") << "the engine ignores device types that it does not know";
}

TEST_F(OptimizerDescriptionTest, RejectsTwoStatesOfOneName) {
  slots[1].name = "exp_avg";
  EXPECT_EQ(problem(),
            kCall + ": two states have the name 'exp_avg'; correct the plug-in, or choose another optimizer");
}

TEST_F(OptimizerDescriptionTest, KeepsOneDescriptionOfParametersWithEqualOnes) {
  zr_slot other_slots[2] = {slots[0], slots[1]};
  zr_optimizer_desc& other = described_instead["b"];
  other = described;
  other.slots = other_slots;
  EXPECT_EQ(descriptions().descriptions.size(), 1u) << "equal states at another address";
  EXPECT_EQ(descriptions().description_of, (std::vector<uint32_t>{0, 0}));
}

TEST_F(OptimizerDescriptionTest, KeepsEveryDescriptionThatDiffers) {
  zr_optimizer_desc& other = described_instead["b"];
  zr_slot other_slots[2] = {slots[0], slots[1]};
  const auto differs = [&] {
    const job::OptimizerDescriptions found = descriptions();
    return found.descriptions.size() == 2 && found.description_of == std::vector<uint32_t>{0, 1};
  };
  other = described;
  other.n_slots = 1;
  EXPECT_TRUE(differs());
  other = described;
  other.granularity = ZR_TENSORWISE;
  EXPECT_TRUE(differs());
  other = described;
  other.needs = ZR_OPT_NEEDS_LOCAL_GRADS;
  EXPECT_TRUE(differs());
  other = described;
  other.cost = 2;
  EXPECT_TRUE(differs());
  other = described;
  other.slots = other_slots;
  other_slots[1].dtype = ZR_F32;
  EXPECT_TRUE(differs());
}

}  // namespace
}  // namespace zr::testing
