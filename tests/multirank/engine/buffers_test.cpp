// Model buffers on several ranks: an equal world size restores them exactly; otherwise the train.buffers rule applies.
#include <torch/script.h>

#include <cstdlib>
#include <cstring>
#include <iterator>
#include <set>
#include <sstream>

#include "multirank/engine/buffers_model.hpp"
#include "support/checkpoint_test.hpp"
#include "support/layouts.hpp"

namespace zr::test {
namespace {

using namespace buffers_tests;

class ModelBuffersTest : public CheckpointTest {
 protected:
  Outcome job(int ranks, const RankBody& body, const std::string& overrides = "") const {
    return shell("CHECKPOINT=" + scratch_.path("c") + " " +
                 launch(ranks, body, "strategy=zero1 train.gradient_accumulation=2 " + overrides));
  }
  // Output lines without the launcher's "[1] " prefix, each with its number of occurrences.
  static std::map<std::string, int> lines_of(const Outcome& outcome) {
    std::map<std::string, int> lines;
    for (std::string line : outcome.lines()) {
      if (const auto end = line.find("] "); line.starts_with("[") && end != line.npos) line = line.substr(end + 2);
      ++lines[line];
    }
    return lines;
  }
  // The elements of a per-rank buffer in checkpoint folder c, one vector per rank; empty if it is not stored per rank.
  std::vector<std::vector<float>> saved(const std::string& name) const {
    const host::checkpoint::Checkpoint from(host::checkpoint::find_checkpoint(scratch_.path("c")));
    const host::checkpoint::SavedTensor* tensor = from.find(host::checkpoint::kRankBuffer, name);
    std::vector<std::vector<float>> all;
    if (!tensor) return all;
    std::string bytes(static_cast<std::size_t>(tensor->bytes()), '\0');
    from.read(*tensor, 0, tensor->bytes(), bytes.data());
    const std::size_t each = bytes.size() / static_cast<std::size_t>(tensor->shape[0]);
    for (int64_t r = 0; r < tensor->shape[0]; ++r) {
      all.emplace_back(each / sizeof(float));
      std::memcpy(all.back().data(), bytes.data() + static_cast<std::size_t>(r) * each, each);
    }
    return all;
  }
  static std::string text_of(const std::vector<float>& values) {
    std::ostringstream text;
    for (const float value : values) text << (text.tellp() > 0 ? " " : "") << std::hexfloat << double{value};
    return text.str();
  }
};

// An uninterrupted run and a run resumed half way give the same results on each rank, on every layout of weights.
RANK_BODY(resumes_exactly, Run) {
  const std::string folder = std::getenv("CHECKPOINT");
  int jobs = 0;
  for (const std::string& layout : kLayouts)
    for (const std::string async : {"false", "true"}) {
      const std::string who = layout + (async == "true" ? " async" : ""),
                        dir = "checkpoint.dir=" + folder + std::to_string(jobs++);
      std::istringstream words(layout);
      std::vector<std::string> how{std::istream_iterator<std::string>(words), {}};
      how.push_back("checkpoint.async=" + async);
      const auto with = [&](std::vector<std::string> more) {
        more.insert(more.end(), how.begin(), how.end());
        return more;
      };
      std::string hash;
      std::vector<double> losses;
      Buffers buffers;
      {
        Job uninterrupted(run, with({"train.steps=6", "job.name=uninterrupted"}));
        uninterrupted.train();
        hash = uninterrupted.engine.weights_hash();
        losses = uninterrupted.losses;
        buffers = uninterrupted.buffers();
        std::cout << who << " validation " << std::hexfloat << uninterrupted.validation() << std::endl;
        EXPECT_TRUE(equal(uninterrupted.buffers(), buffers)) << who + ": the evaluation restores the buffers";
      }
      Buffers half;
      {
        Job first(run, with({"train.steps=3", "job.name=first", "checkpoint.every=3", dir}));
        first.train();
        half = first.buffers();
      }
      Job rest(run, with({"train.steps=6", "job.name=rest", "checkpoint.resume=true", dir}));
      EXPECT_EQ(rest.engine.step_index(), 3) << who + ": resumes at step 3";
      EXPECT_TRUE(equal(rest.buffers(), half)) << who + ": the resume restores each rank's own buffers";
      rest.train();
      EXPECT_EQ(rest.losses, std::vector<double>(losses.begin() + 3, losses.end())) << who + ": the same losses";
      EXPECT_EQ(rest.engine.weights_hash(), hash) << who + ": the same weights";
      EXPECT_TRUE(equal(rest.buffers(), buffers)) << who + ": the same buffers";
      std::cout << who << " validation " << std::hexfloat << rest.validation() << std::endl;
    }
}

TEST_F(ModelBuffersTest, ResumeAtTheSameWorldSizeIsBitExact) {
  for (const int ranks : {2, 3}) {
    const Outcome done = job(ranks, resumes_exactly);
    ASSERT_EQ(done.code, 0) << done.output;
    int validations = 0;
    for (const auto& [line, times] : lines_of(done)) {
      if (line.find(" validation ") == line.npos) continue;
      EXPECT_EQ(times, 2 * ranks) << "not all ranks of both runs printed " << line;
      validations += times;
    }
    EXPECT_EQ(validations, 6 * 2 * ranks) << done.output;
  }
}

// A TorchScript module whose forward assigns a new tensor to its buffer: the engine saves, loads and restores the
// tensor that the module has now.
RANK_BODY(follows_script, Run) {
  torch::jit::Module module("Script");
  module.register_parameter("weight", torch::linspace(-1, 1, 6).set_requires_grad(true), false);
  module.register_buffer("level", torch::zeros({6}));
  module.define(
      "def forward(self, x):\n"
      "  self.level = self.level * 0.5 + x.mean(0)\n"
      "  return (x * self.weight).square().mean()\n");
  const std::string dir = run.program.text("job.runs") + "/script-checkpoints";
  const zr::Program program(
      run.arguments[0],
      Job::joined(run.arguments, {"train.steps=8", "job.name=script", "checkpoint.dir=" + dir, "checkpoint.every=1"}));
  zr::Engine engine(program, module);
  const auto level = [&] { return module.attr("level").toTensor().clone(); };
  const auto step = [&] {
    const int64_t before = engine.step_index();
    while (engine.step_index() == before) {
      const double shift = static_cast<double>(10 * before + engine.micro_index());
      engine.backward(module.forward({torch::arange(18, torch::kFloat).view({3, 6}).add(shift).sin()}).toTensor());
      engine.step();
    }
  };
  for (int i = 0; i < 2; ++i) step();
  const torch::Tensor second = level();
  for (int i = 0; i < 2; ++i) step();
  const torch::Tensor fourth = level();
  EXPECT_FALSE(same(second, fourth)) << "forward changes the buffer";
  {
    const zr::Engine::Evaluation evaluation(engine);
    module.forward({torch::ones({3, 6})});
    EXPECT_FALSE(same(level(), fourth)) << "forward changes the buffer in an evaluation too";
  }
  EXPECT_TRUE(same(level(), fourth)) << "the end of an evaluation restores this rank's value";
  engine.load(dir + "/step-00000002");
  EXPECT_TRUE(same(level(), second)) << "the checkpoint of step 2 has the buffer of step 2";
  for (int i = 0; i < 2; ++i) step();
  EXPECT_TRUE(same(level(), fourth)) << "training from that checkpoint repeats the same values";
  const torch::Tensor all = engine.buffer("level");
  if (engine.rank() == 0) {
    EXPECT_TRUE(same(all, level())) << "buffer() returns the current tensor";
  }
}

TEST_F(ModelBuffersTest, TorchScriptBuffersAssignedInForwardAreSavedAndRestored) {
  for (const int ranks : {1, 2}) {
    const Outcome done = job(ranks, follows_script);
    EXPECT_EQ(done.code, 0) << done.output;
  }
}

// Trains three steps and saves a checkpoint in CHECKPOINT.
RANK_BODY(saves, Run) {
  Job job(run, {"train.steps=3", "job.name=saves"});
  job.train();
  job.engine.save(std::getenv("CHECKPOINT"));
}

const std::vector<std::string> kRules{"rank0", "mean", "per_rank"};

std::string text_of(const torch::Tensor& tensor) {
  std::ostringstream text;
  const torch::Tensor values = tensor.to(torch::kDouble).reshape({-1});
  for (int64_t i = 0; i < values.numel(); ++i) text << (i ? " " : "") << std::hexfloat << values[i].item<double>();
  return text.str();
}

// Loads CHECKPOINT under a train.buffers rule and prints this rank's buffers, one line per buffer.
void loads_with(Run& run, const std::string& rule) {
  Job job(run, {"train.steps=6", "job.name=loads-" + rule, "checkpoint.resume=true", "train.buffers=" + rule,
                std::string("checkpoint.dir=") + std::getenv("CHECKPOINT")});
  std::cout << "step " << job.engine.step_index() << " hash " << job.engine.weights_hash() << std::endl;
  for (const auto& [name, tensor] : job.buffers())
    std::cout << rule << " " << name << ": " << text_of(tensor) << std::endl;
  job.train();
  std::cout << "trained to " << job.engine.step_index() << std::endl;
}

RANK_BODY(loads, Run) {
  for (const std::string& rule : kRules) loads_with(run, rule);
}

TEST_F(ModelBuffersTest, ResumeAtAnotherWorldSizeFollowsTrainBuffers) {
  const Outcome done = job(3, saves);
  ASSERT_EQ(done.code, 0) << done.output;
  const auto level = saved("level");
  ASSERT_EQ(level.size(), 3u);
  EXPECT_EQ((std::set<std::vector<float>>(level.begin(), level.end()).size()), 3u)
      << "the ranks must have different values";
  EXPECT_TRUE(saved("table").empty()) << "a buffer that is equal on all ranks must be stored once";
  std::vector<float> mean;
  for (std::size_t i = 0; i < level[0].size(); ++i)
    mean.push_back(static_cast<float>((double{level[0][i]} + level[1][i] + level[2][i]) / 3));
  for (const int ranks : {1, 2, 3, 4}) {
    const Outcome loaded = job(ranks, loads);
    ASSERT_EQ(loaded.code, 0) << loaded.output;
    auto lines = lines_of(loaded);
    EXPECT_EQ(lines["trained to 6"], 3 * ranks);
    std::map<std::string, int> expected;
    for (int r = 0; r < ranks; ++r) {
      const std::string own = " level: " + text_of(level[static_cast<std::size_t>(r % 3)]);
      ++expected["per_rank" + own];
      ++expected[ranks == 3 ? "rank0" + own : "rank0 level: " + text_of(level[0])];
      ++expected[ranks == 3 ? "mean" + own : "mean level: " + text_of(mean)];
    }
    std::erase_if(lines, [](const auto& line) { return line.first.find(" level: ") == std::string::npos; });
    EXPECT_EQ(lines, expected) << ranks << " ranks";
  }
}

TEST_F(ModelBuffersTest, ExportedFilesFollowTrainBuffers) {
  for (const std::string rule : {"rank0", "mean", "per_rank"}) {
    fs::remove_all(scratch_.path("c"));
    const Outcome done = job(2, saves, "train.buffers=" + rule);
    ASSERT_EQ(done.code, 0) << done.output;
    const auto level = saved("level");
    ASSERT_EQ(level.size(), 2u);
    std::vector<float> expected = level[0];
    if (rule == "mean")
      for (std::size_t i = 0; i < expected.size(); ++i)
        expected[i] = static_cast<float>((double{level[0][i]} + level[1][i]) / 2);
    ASSERT_EQ(shell(zeroth_bin() + "export c out-" + rule + ".safetensors").code, 0);
    const host::checkpoint::Checkpoint out(scratch_.path("out-" + rule + ".safetensors"));
    const host::checkpoint::SavedTensor* tensor = out.find("weight", "level");
    ASSERT_NE(tensor, nullptr);
    std::vector<float> values(expected.size());
    ASSERT_EQ(tensor->bytes(), static_cast<int64_t>(values.size() * sizeof(float)));
    out.read(*tensor, 0, tensor->bytes(), values.data());
    EXPECT_EQ(values, expected) << rule;
    EXPECT_EQ(shell(zeroth_bin() + "verify c").code, 0);
  }
}

// Sets buffers to known values that differ by rank (level: 1 + rank, num_batches_tracked: 10 * rank) and checks them
// under a train.buffers rule.
void declares_by(Run& run, const std::string& rule) {
  const std::string folder = std::getenv("CHECKPOINT") + rule;
  Job job(run, {"train.steps=4", "job.name=declares-" + rule, "train.buffers=" + rule});
  const int rank = job.engine.rank(), world = job.engine.world();
  job.step();
  torch::Tensor batches = job.model.norm->num_batches_tracked;
  job.model.level.fill_(1 + rank);
  batches.fill_(10 * rank);
  const Buffers own = job.buffers();
  const double level = rule == "rank0" ? 1 : rule == "mean" ? (world + 1) / 2.0 : 1 + rank;
  const int64_t count = rule == "per_rank" ? 10 * rank : 0;
  const auto declared = [&](const std::string& when) {
    EXPECT_TRUE(job.model.level.eq(level).all().item<bool>()) << rule + ": level " + when;
    EXPECT_EQ(batches.item<int64_t>(), count) << rule + ": num_batches_tracked " + when;
  };
  {
    const zr::Engine::Evaluation outer(job.engine);
    declared("in an evaluation");
    {
      const zr::Engine::Evaluation inner(job.engine);
      declared("in an evaluation within another");
    }
    declared("after the inner evaluation");
    EXPECT_TRUE(job.engine.buffer("level").eq(level).all().item<bool>()) << rule + ": buffer() in an evaluation";
    job.model.level.fill_(77);  // the end of the evaluation discards this write
    job.engine.save(folder);
  }
  EXPECT_TRUE(equal(job.buffers(), own)) << rule + ": own buffers after the evaluation";
  try {
    const zr::Engine::Evaluation evaluation(job.engine);
    throw std::runtime_error("thrown within");
  } catch (const std::runtime_error&) {
  }
  EXPECT_TRUE(equal(job.buffers(), own)) << rule + ": own buffers after an exception ended the evaluation";
  EXPECT_TRUE(job.engine.buffer("level").eq(level).all().item<bool>()) << rule + ": buffer()";
  EXPECT_EQ(job.engine.buffer("norm.num_batches_tracked").item<int64_t>(), count) << rule + ": buffer() of integers";
  EXPECT_TRUE(same(job.engine.buffer("table"), own.at("table")))
      << rule + ": buffer() of a buffer that is equal on all ranks";
  job.engine.load(folder);
  EXPECT_TRUE(equal(job.buffers(), own)) << rule + ": a checkpoint saved in an evaluation has each rank's own buffers";
  {
    const zr::Engine::Evaluation evaluation(job.engine);
    job.engine.load(folder);
    declared("after a load in an evaluation");
  }
  EXPECT_TRUE(equal(job.buffers(), own)) << rule + ": own buffers after a load in an evaluation";
  job.engine.set_buffer("level", torch::full({Running::kHidden}, 5, torch::kDouble));
  EXPECT_TRUE(job.model.level.eq(5).all().item<bool>()) << rule + ": set_buffer() sets this rank's buffer";
  EXPECT_TRUE(job.engine.buffer("level").eq(5).all().item<bool>())
      << rule + ": buffer() returns the value that was set";
}

RANK_BODY(declares, Run) {
  for (const std::string& rule : kRules) declares_by(run, rule);
}

TEST_F(ModelBuffersTest, EvaluationAndBufferGetterFollowTrainBuffers) {
  for (const int ranks : {1, 2, 3}) {
    const Outcome done = job(ranks, declares);
    EXPECT_EQ(done.code, 0) << ranks << "\n" << done.output;
  }
}

}  // namespace
}  // namespace zr::test
