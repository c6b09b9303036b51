// Model buffers on several ranks: an equal world size restores them exactly; otherwise the train.buffers rule applies.
#include <cstring>
#include <set>

#include "multirank/checkpoint_fixture.hpp"

namespace zr::test {
namespace {

class ModelBuffersTest : public CheckpointTest {
 protected:
  Outcome buffers_case(int ranks, const std::string& name, const std::string& overrides = "") const {
    return shell("CHECKPOINT=" + scratch_.path("c") + " " +
                 launch(ranks, "buffers_case " + name, "strategy=zero1 train.gradient_accumulation=2 " + overrides));
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
    const host::Checkpoint from(host::find_checkpoint(scratch_.path("c")));
    const host::SavedTensor* tensor = from.find(host::kRankBuffer, name);
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

TEST_F(ModelBuffersTest, ResumeAtTheSameWorldSizeIsBitExact) {
  for (const int ranks : {2, 3}) {
    const Outcome done = buffers_case(ranks, "resumes_exactly");
    ASSERT_EQ(done.code, 0) << done.output;
    int validations = 0;
    for (const auto& [line, times] : lines_of(done)) {
      if (line.find(" validation ") == line.npos) continue;
      EXPECT_EQ(times, 2 * ranks) << "not all ranks of both runs printed " << line;
      validations += times;
    }
    EXPECT_EQ(validations, 8 * 2 * ranks) << done.output;
  }
}

TEST_F(ModelBuffersTest, TorchScriptBuffersAssignedInForwardAreSavedAndRestored) {
  for (const int ranks : {1, 2}) {
    const Outcome done = buffers_case(ranks, "follows_script");
    EXPECT_EQ(done.code, 0) << done.output;
  }
}

TEST_F(ModelBuffersTest, ResumeAtAnotherWorldSizeFollowsTrainBuffers) {
  const Outcome done = buffers_case(3, "saves");
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
    const Outcome loaded = buffers_case(ranks, "loads");
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
    const Outcome done = buffers_case(2, "saves", "train.buffers=" + rule);
    ASSERT_EQ(done.code, 0) << done.output;
    const auto level = saved("level");
    ASSERT_EQ(level.size(), 2u);
    std::vector<float> expected = level[0];
    if (rule == "mean")
      for (std::size_t i = 0; i < expected.size(); ++i)
        expected[i] = static_cast<float>((double{level[0][i]} + level[1][i]) / 2);
    ASSERT_EQ(shell(zeroth_bin() + "export c out-" + rule + ".safetensors").code, 0);
    const host::Checkpoint out(scratch_.path("out-" + rule + ".safetensors"));
    const host::SavedTensor* tensor = out.find("weight", "level");
    ASSERT_NE(tensor, nullptr);
    std::vector<float> values(expected.size());
    ASSERT_EQ(tensor->bytes(), static_cast<int64_t>(values.size() * sizeof(float)));
    out.read(*tensor, 0, tensor->bytes(), values.data());
    EXPECT_EQ(values, expected) << rule;
    EXPECT_EQ(shell(zeroth_bin() + "verify c").code, 0);
  }
}

TEST_F(ModelBuffersTest, EvaluationAndBufferGetterFollowTrainBuffers) {
  for (const int ranks : {1, 2, 3}) {
    const Outcome done = buffers_case(ranks, "declares");
    EXPECT_EQ(done.code, 0) << ranks << "\n" << done.output;
  }
}

// tests/multirank/version1 was written by two ranks of the last release with checkpoint version 1, from this model.
TEST_F(ModelBuffersTest, LoadsVersion1Checkpoints) {
  fs::copy(ZR_SOURCE_DIR "/tests/multirank/version1", scratch_.path("c"), fs::copy_options::recursive);
  EXPECT_EQ(shell(zeroth_bin() + "verify c").code, 0);
  EXPECT_EQ(shell(zeroth_bin() + "show c").code, 0);
  EXPECT_EQ(shell(zeroth_bin() + "export c out.safetensors").code, 0);
  for (const int ranks : {1, 2, 3}) {
    const Outcome done = buffers_case(ranks, "loads");
    ASSERT_EQ(done.code, 0) << done.output;
    auto lines = lines_of(done);
    EXPECT_EQ(lines["step 2 hash 089c95b093028737"], 3 * ranks) << done.output;
    EXPECT_EQ(lines["trained to 6"], 3 * ranks);
    int levels = 0;
    for (const auto& [line, times] : lines)
      if (line.find(" level: ") != line.npos) levels += times == ranks;
    EXPECT_EQ(levels, 3) << "version 1 stores only rank 0's buffers, so every rank gets them under every rule";
  }
}

}  // namespace
}  // namespace zr::test
