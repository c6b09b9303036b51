// train.keep_fp32: parameters that stay fp32 in a 16-bit job have a strategy instance and a plan of their own.
// tests/multirank/parity/keep_fp32_test compares training with plain libtorch.
#include <gmock/gmock.h>

#include "support/engine_test.hpp"
#include "support/user_error.hpp"
#include "zr/parameters.hpp"
#include "zr/swap.hpp"

namespace {

using namespace engine_tests;

using testing::AllOf;
using testing::HasSubstr;

class KeptParametersTest : public EngineTest {};

const std::string kKept = R"('train.keep_fp32=["norm.*","batch_norm.*","scalar"]' train.cast_buffers=[] )";

bool is_kept(const std::string& name) {
  return name.starts_with("norm.") || name.starts_with("batch_norm.") || name == "scalar";
}

RANK_BODY(has_two_types, Run) {
  run.build();
  run.micro_step();
  const auto check = [&](torch::ScalarType others) {
    for (const auto& item : run.model->named_parameters())
      EXPECT_EQ(item.value().scalar_type(), is_kept(item.key()) ? torch::kFloat : others) << item.key();
  };
  check(torch::kBFloat16);
  EXPECT_EQ(run.engine->dtype(), torch::kBFloat16);
  const torch::Tensor value = run.engine->get("norm.weight");
  {
    const auto scope = zr::gather(run.model->parameters());
    EXPECT_TRUE(torch::equal(run.model->named_parameters()["norm.weight"], value)) << "the weight is its own master";
    EXPECT_NE(value[0].item<float>(), value[0].to(torch::kBFloat16).to(torch::kFloat).item<float>());
  }
  {
    const zr::Swap swap(*run.engine, std::map<std::string, torch::Tensor>{{"norm.weight", value + 1e-5}});
    const auto scope = zr::gather(run.model->parameters());
    EXPECT_TRUE(torch::equal(run.model->named_parameters()["norm.weight"], value + 1e-5));
  }
  run.engine->set("norm.bias", zr::TensorKind::value, torch::full({36}, 1.0 / 3));
  EXPECT_TRUE(torch::equal(run.engine->get("norm.bias"), torch::full({36}, 1.0 / 3)));
  run.micro_step();
  const bool as_fp32 = run.program.boolean("parity.weighted");
  as_fp32 ? run.engine->release(torch::kFloat) : run.engine->release();
  check(as_fp32 ? torch::kFloat : torch::kBFloat16);
}

TEST_F(KeptParametersTest, KeepTheirType) {
  for (const std::string how :
       {"strategy=zero0", "strategy=zero1", "strategy=zero3 communicator.share_weights=false parity.weighted=true"}) {
    const Result result = run(2, has_two_types, kKept + how + " train.dtype=bf16 train.steps=4");
    EXPECT_EQ(result.code, 0) << how << "\n" << result.output;
  }
}

// An operator that does not accept the two types names the parameter and the key.
RANK_BODY(mixes_parameters, Run) {
  run.build();
  const torch::Tensor weight = run.model->named_parameters()["twice.weight"];
  EXPECT_THAT(zr::test::user_error_of([&] {
                torch::linear(torch::ones({2, 36}, torch::kBFloat16), weight);
              }),
              AllOf(HasSubstr("aten::"), HasSubstr("dtype"),
                    HasSubstr(": parameter 'twice.weight' (fp32) is kept in fp32 by train.keep_fp32; list all "
                              "parameters of the operator there, and cast its input to fp32 in forward(), or remove it "
                              "from train.keep_fp32")));
}

TEST_F(KeptParametersTest, AnOperatorThatDoesNotAcceptTheMixNamesTheParameter) {
  for (const std::string how :
       {"strategy=zero0", "strategy=zero2", "strategy=zero3 communicator.share_weights=false"}) {
    const Result result = run(2, mixes_parameters, how + " train.dtype=bf16 'train.keep_fp32=[\"twice.weight\"]'");
    EXPECT_EQ(result.code, 0) << how << "\n" << result.output;
  }
}

TEST_F(KeptParametersTest, PatternsThatCannotBeMeantAreErrors) {
  const Result unknown = run(1, trains, "train.dtype=bf16 'train.keep_fp32=[\"norm.biass\"]'");
  EXPECT_EQ(unknown.code, 2);
  EXPECT_THAT(unknown.output,
              HasSubstr("command line: train.keep_fp32: 'norm.biass' matches no parameter; the nearest is "
                        "'norm.bias'; `*` matches any sequence of characters"));
  const Result all = run(1, trains, "train.dtype=bf16 'train.keep_fp32=[\"*\"]'");
  EXPECT_EQ(all.code, 2);
  EXPECT_THAT(all.output, HasSubstr("command line: train.keep_fp32 keeps all parameters of the model in fp32; set "
                                    "train.dtype = \"fp32\""));
}

// Plan and ledger count both instances, to the byte, and so do the bytes communicated.
TEST_F(KeptParametersTest, PlanLedgerAndTrafficCountBothTypes) {
  constexpr int64_t kRanks = 2, kSteps = 3;
  const int64_t kept = 4 * 36 + 1;
  for (const std::string strategy : {"zero0", "zero1", "zero2", "zero3"}) {
    const std::string how =
        "strategy=" + strategy + " communicator.share_weights=false train.dtype=bf16 train.steps=3 ";
    ASSERT_EQ(run(kRanks, trains, kKept + how).code, 0) << strategy;
    for (const auto& [tier, kinds] : summary()["memory"].items())
      for (const auto& [kind, bytes] : kinds.items()) {
        if (kind == "activations") continue;
        EXPECT_EQ(bytes["planned"], bytes["peak"]) << strategy << " " << tier << " " << kind;
      }
    const auto counted = summary()["communication_bytes"].get<Json>();
    ASSERT_EQ(run(kRanks, trains, how).code, 0) << strategy;
    const auto without = summary()["communication_bytes"].get<Json>();
    // Each kept parameter communicates 2 bytes more per element: its gradient, and its weight where these are sent.
    const int64_t more = 2 * kept * kSteps * (kRanks - 1);
    int64_t difference = 0;
    for (const auto& [name, bytes] : counted.items())
      if (name != "control") difference += bytes.get<int64_t>() - without.value(name, int64_t{0});
    const bool gathers = strategy == "zero3";  // and in backward again
    EXPECT_GE(difference, (strategy == "zero0" ? 1 : 2) * more) << strategy;
    EXPECT_TRUE(gathers || difference == (strategy == "zero0" ? 1 : 2) * more) << strategy << " " << difference;
  }
}

RANK_BODY(trains_and_prints, Run) {
  run.build();
  run.train();
  const std::string hash = run.engine->weights_hash();
  if (run.engine->rank() == 0) std::cout << "hash " << hash << std::endl;
}

TEST_F(KeptParametersTest, LocalGradientsAreRejected) {
  const Result result = run(2, trains, kKept + "optimizer=onebit_adam train.dtype=bf16 strategy=zero1");
  EXPECT_EQ(result.code, 2);
  EXPECT_THAT(result.output,
              HasSubstr("train.keep_fp32 (command line): optimizer 'onebit_adam' needs gradients that are not reduced "
                        "over ranks, which Zeroth supports for weights of one dtype; remove train.keep_fp32, or choose "
                        "another optimizer"));
}

// A checkpoint resumes under another strategy on another number of ranks, bit for bit.
TEST_F(KeptParametersTest, CheckpointsResumeUnderOtherStrategiesAndRanks) {
  const std::string common = kKept + "train.dtype=bf16 train.micro_batch=3 train.global_batch=18 ";
  const auto hash_of = [](const Result& result) {
    const auto at = result.output.find("hash ");
    return at == std::string::npos ? "none: " + result.output : result.output.substr(at, 21);
  };
  const std::string expected = hash_of(run(1, trains_and_prints, common + "strategy=zero0 train.steps=4"));
  const std::string folder = " checkpoint.dir=" + (folder_ / "saved").string() + " checkpoint.every=2";
  ASSERT_EQ(run(2, trains_and_prints, common + "strategy=zero2 train.steps=2" + folder).code, 0);
  for (const auto& [ranks, how] :
       {std::pair(3, "zero3 communicator.share_weights=false"), {2, "zero1"}, {1, "zero0"}}) {
    const Result resumed =
        run(ranks, trains_and_prints,
            common + "train.steps=4 checkpoint.resume=true strategy=" + how + folder + " checkpoint.every=0");
    EXPECT_EQ(hash_of(resumed), expected) << how << resumed.output;
  }
  const Result other = run(1, trains_and_prints, "train.dtype=bf16 train.steps=4 checkpoint.resume=true" + folder);
  EXPECT_EQ(other.code, 2) << "without the key, the weights have another dtype";
}

}  // namespace
