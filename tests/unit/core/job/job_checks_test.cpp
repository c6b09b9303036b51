// What a job requires of its strategy and its optimizer, and the set-up that its ranks compare.
#include "job/job_checks.hpp"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "base/draft_abi.hpp"
#include "base/hex.hpp"
#include "base/text.hpp"
#include "checkpoint/manifest.hpp"
#include "unit/core/one_rank.hpp"
#include "zr/strategy.hpp"

namespace {

// Full weights, and reduced gradients in pieces of one norm block; cannot gather. Only plan() is ever called.
class Pieces : public zr::Strategy<Pieces> {
 public:
  void plan(const zr_plan_in& in, zr::PlanBuilder& plan) const {
    int64_t elements = 0;
    for (uint32_t p = 0; p < in.n_params; ++p) elements += zr::round_up(in.params[p]->count, in.align);
    const uint32_t weights = plan.buffer(ZR_ROLE_WEIGHT, "weights", elements, in.weight_dtype);
    const uint32_t sums = plan.buffer(ZR_ROLE_REDUCED_GRAD, "sums", elements, in.reduced_grad_dtype);
    int64_t at = 0;
    for (uint32_t p = 0; p < in.n_params; at += zr::round_up(in.params[p++]->count, in.align)) {
      const int64_t count = in.params[p]->count;
      if (p != leaves_out) plan.piece(ZR_ROLE_WEIGHT, p, weights, 0, count, at);
      for (int64_t first = 0; first < count; first += in.norm_block)
        plan.piece(ZR_ROLE_REDUCED_GRAD, p, sums, first, std::min(in.norm_block, count - first), at + first);
    }
  }
  void bind(const zr_plan_in&, const zr::Binding&) {}
  zr_view grad_destination(uint32_t, int64_t&, const zr_use&) { return {}; }
  void grad_ready(uint32_t, int64_t, int64_t, const zr_use&) {}
  void event(uint32_t, const zr_use&) {}
  void grads_finish(const zr_use&) {}
  void updated(const zr_use&) {}

  static inline uint32_t leaves_out = ~0u;  // a parameter without weights
};

constexpr zr_component kPieces = zr::component<Pieces>("zero1", "1");

// What an optimizer in place of adamw describes.
zr_optimizer_desc description{};

zr_code describe(void*, const zr_param*, zr_optimizer_desc* out, zr_error*) {
  *out = description;
  return ZR_OK;
}

}  // namespace

namespace zr::testing {
namespace {

using namespace host;

// A job of one rank on "a" ([15, 100]) and "b" (40).
class JobChecksTest : public ::testing::Test {
 protected:
  JobChecksTest() {
    Pieces::leaves_out = ~0u;
    description = {sizeof description, ZR_ELEMENTWISE, 0, 0, nullptr, uint64_t{1} << ZR_DEVICE_CPU, 0, 0, 0};
    model_.parameter(0).shape = {15, 100};
  }
  job::Setup setup(const std::vector<std::string>& overrides = {}, const std::string& toml = "") const {
    std::vector<std::string> all{"optimizer=adamw", "train.micro_batch=1", "train.steps=3",
                                 "job.threads=1",   "job.name=unit",       "job.runs=" + scratch_.folder().string()};
    all.insert(all.end(), overrides.begin(), overrides.end());
    const plugin::Registry registry({ZR_BUILD_DIR "/plugins"});
    job::Setup setup;
    static_cast<plugin::ResolvedJob&>(setup) =
        plugin::resolve_job(config::Document::parse(toml, "job.toml", all), registry, {}, 1);
    setup.control = std::make_shared<OneRankControl>();
    return setup;
  }
  // The failure of a job with these plug-ins; "" if it is planned. null: the plug-in of the configuration.
  std::string failure_with(const zr_component* strategy, bool described) {
    job::Setup setup = this->setup({"strategy=zero1"});
    if (strategy) setup.strategy.table = strategy;
    zr_component optimizer = *setup.optimizer.table;
    zr_optimizer_api api = *static_cast<const zr_optimizer_api*>(optimizer.api);
    api.describe = describe;
    optimizer.api = &api;
    if (described) setup.optimizer.table = &optimizer;
    setup.optimizer.drafts = true;
    return failure_of([&] { const job::StartedJob job(setup, model_, nullptr); });
  }
  const test::Scratch scratch_;
  FakeModel model_{{{"a", 1500}, {"b", 40}}};
};

TEST_F(JobChecksTest, RejectsAStrategyThatCannotProvideAWeight) {
  EXPECT_EQ(failure_with(&kPieces, false), "");
  Pieces::leaves_out = 1;
  EXPECT_EQ(failure_with(&kPieces, false),
            "strategy 'zero1' does not keep all of 'b' on rank 0 and cannot gather it before its use; choose another "
            "strategy");
}

TEST_F(JobChecksTest, RejectsAnOptimizerThatCommunicatesWithoutLocalGradients) {
  description.needs = ZR_OPT_NEEDS_COMM;
  EXPECT_EQ(
      failure_with(nullptr, true),
      "optimizer 'adamw' with strategy 'zero1': the optimizer communicates in steps with reduced gradients, which "
      "Zeroth does not support; choose another optimizer");
  description.needs = ZR_OPT_NEEDS_LOCAL_GRADS;
  EXPECT_NE(failure_with(nullptr, true)
                .find("the library has no extension \"zr.optimizer.local_gradients/1\": this is a "
                      "bug in the plug-in"),
            std::string::npos);
  description.needs = 0;
  EXPECT_EQ(failure_with(nullptr, true), "");
}

TEST_F(JobChecksTest, RejectsAnOptimizerStateThatIsNotSharded) {
  zr_slot slot{"second", ZR_F32, ZR_SLOT_LIKE_PARAM, 0, 0};
  description.n_slots = 1;
  description.slots = &slot;
  EXPECT_EQ(failure_with(nullptr, true), "");
  const std::string message =
      "optimizer 'adamw' with strategy 'zero1': its state 'second' is not sharded, which Zeroth supports only for "
      "optimizers that need gradients that are not reduced over ranks; choose another optimizer";
  for (const uint32_t flag : {ZR_SLOT_RANK_PRIVATE, ZR_SLOT_UNSHARDED}) {
    slot.flags = flag;
    EXPECT_EQ(failure_with(nullptr, true), message);
  }
  slot.flags = ZR_SLOT_TRANSIENT;
  EXPECT_EQ(failure_with(nullptr, true),
            "optimizer 'adamw' with strategy 'zero1': its state 'second' is transient, which Zeroth does not support; "
            "choose another optimizer");
  slot.flags = 0;
  slot.shape = ZR_SLOT_PER_BLOCK;
  slot.block = 128;
  EXPECT_EQ(failure_with(nullptr, true), "");
}

TEST_F(JobChecksTest, RejectsGranularityThatThePlanDoesNotKeep) {
  const std::string start = "optimizer 'adamw' with strategy 'zero1': the optimizer needs complete ",
                    end =
                        ", but 'a' is split between ranks; choose a strategy that assigns complete parameters to ranks";
  description.granularity = ZR_TENSORWISE;
  EXPECT_EQ(failure_with(&kPieces, true), start + "tensors" + end) << "'a' is cut at element 1024";
  description.granularity = ZR_ROWWISE;
  EXPECT_EQ(failure_with(&kPieces, true), start + "rows" + end) << "rows of 100 elements";
  model_.parameter(0).shape = {12, 128};  // 1024 elements are 8 rows
  model_.parameter(0).count = 1536;
  EXPECT_EQ(failure_with(&kPieces, true), "");
  description.granularity = ZR_TENSORWISE;
  EXPECT_EQ(failure_with(nullptr, true), "") << "zero1 keeps tensors complete on one rank";
  description.granularity = ZR_ELEMENTWISE;
  zr_slot slot{"scale", ZR_F32, ZR_SLOT_PER_BLOCK, 0, 1536};
  description.n_slots = 1;
  description.slots = &slot;
  EXPECT_EQ(failure_with(&kPieces, true), start + "blocks of 1536 elements" + end) << "the block is the parameter";
}

// A copy of a plug-in whose file the test can change, as "strategy=PATH".
class PluginCopy {
 public:
  PluginCopy() {
    std::ostringstream text;
    text << std::ifstream(path_, std::ios::binary).rdbuf();
    bytes_ = text.str();
  }
  const std::string& path() const { return path_; }
  std::string hash() const { return hex(checkpoint::hash_of(bytes_.data(), std::ssize(bytes_))); }

 private:
  const test::Scratch scratch_;
  const std::string path_ = scratch_.copy(ZR_BUILD_DIR "/plugins/zr_strategy_zero1.so");
  std::string bytes_;
};

TEST_F(JobChecksTest, SetUpHasPluginsParametersConfigurationAndBuffers) {
  const PluginCopy strategy;
  model_.parameter(1).frozen = true;
  const job::StartedJob job(
      setup({"strategy=" + strategy.path(), "job.ranks=1"},
            "[[optimizer.groups]]\nmatch = [\"a\", \"*\"]\nlr_scale = 0.5\nweight_decay = 0.25\n"),
      model_, nullptr);
  const std::string text = job::setup_text(job, model_);
  std::istringstream lines(text);
  std::vector<std::string> all;
  for (std::string line; std::getline(lines, line);) all.push_back(line);
  ASSERT_GT(all.size(), 6u);
  EXPECT_EQ(all[0], "plug-in zero1 1.0.0 (file " + strategy.hash() + ")");
  EXPECT_EQ(all[1].rfind("plug-in adamw ", 0), 0u) << all[1];
  EXPECT_EQ(all[2], "parameter a [15, 100]");
  EXPECT_EQ(all[3], "parameter b (frozen) [40]");
  EXPECT_EQ(all[all.size() - 2],
            "optimizer group a *, lr_scale = 0.5, optimizer.adamw.beta1 = 0.9, optimizer.adamw.beta2 = 0.999, "
            "optimizer.adamw.eps = 1e-08, optimizer.adamw.weight_decay = 0.25");
  EXPECT_EQ(all.back(), "buffer statistics, 12 bytes");
  const auto has = [&](const std::string& line) { return std::count(all.begin(), all.end(), line); };
  EXPECT_EQ(has("train.steps = 3"), 1);
  EXPECT_EQ(has("job.name = \"unit\""), 1);
  for (const std::string& line : all) EXPECT_NE(line.rfind("job.ranks", 0), 0u) << line;
  EXPECT_EQ(all.size(), 4 + job.config().entries().size() - 1 + 2) << "every key but job.ranks has a line";
}

TEST_F(JobChecksTest, SetUpOfANamedEngineBeginsWithItsName) {
  job::Setup named = setup();
  named.engine = "generator";
  const job::StartedJob job(named, model_, nullptr);
  EXPECT_EQ(job::setup_text(job, model_).rfind("engine 'generator'\nplug-in ", 0), 0u);
}

// engine.refresh() compares set-ups long after the start, when an update may have replaced or removed the files.
TEST_F(JobChecksTest, SetUpHasTheFilesThatWereLoaded) {
  const PluginCopy strategy;
  const job::Setup loaded = setup({"strategy=" + strategy.path()});
  const std::string line = "plug-in zero1 1.0.0 (file " + strategy.hash() + ")\n";
  std::filesystem::remove(strategy.path());
  const job::StartedJob job(loaded, model_, nullptr);
  EXPECT_EQ(job::setup_text(job, model_).rfind(line, 0), 0u) << "removed before the first comparison";
  std::ofstream(strategy.path()) << "another version";
  EXPECT_EQ(job::setup_text(job, model_).rfind(line, 0), 0u) << "replaced";
}

TEST(FirstDifferenceTest, NamesTheFirstLineThatDiffers) {
  EXPECT_EQ(job::first_difference("a\nb\nc\n", "a\nx\ny\n", 3), "rank 3 has 'b', rank 0 has 'x'");
  EXPECT_EQ(job::first_difference("a\n", "a\nb\nc\n", 1), "rank 1 has 'no further entry', rank 0 has 'b'");
  EXPECT_EQ(job::first_difference("a\nb\n", "a\n", 1), "rank 1 has 'b', rank 0 has 'no further entry'");
  EXPECT_EQ(job::first_difference("", "a\n", 2), "rank 2 has 'no further entry', rank 0 has 'a'");
}

}  // namespace
}  // namespace zr::testing
