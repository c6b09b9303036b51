// Reads the measured activations of an earlier run from its summary, and ignores invalid ones.
#include "job/measured_activations.hpp"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>

#include "run/run_log.hpp"
#include "support/scratch.hpp"

namespace zr::host {
namespace {

class MeasuredActivationsTest : public ::testing::Test {
 protected:
  config::JobConfig config(const std::vector<std::string>& more = {}) const {
    std::vector<std::string> all{"job.name=a", "job.runs=" + scratch_.path("runs")};
    all.insert(all.end(), more.begin(), more.end());
    return config::Document::parse("", "job.toml", all).check({}, 1);
  }
  // Writes the summary of a run with this memory section.
  plan::PlanContext after(const std::string& memory) const {
    run::RunLog log(config(), "", 2, 0);
    log.accept();
    log.finish(Ledger(), {});
    scratch_.write("runs/a/summary.json", "{\"memory\": " + memory + "}");
    return job::measured_activations(config(), "");
  }
  const test::Scratch scratch_;
};

TEST_F(MeasuredActivationsTest, ReadsDeviceAndOffloadedActivations) {
  const plan::PlanContext all = after(R"({"device": {"activations": {"planned": null, "peak": 70}},
                                "host": {"activations": {"peak": 5}}, "disk": {"activations": {"peak": 8}}})");
  EXPECT_EQ(all.activations, 70);
  EXPECT_EQ(all.offloaded_activations, 13);
  EXPECT_EQ(all.measured_by, scratch_.path("runs/a"));
  EXPECT_FALSE(job::measured_activations(config({"train.micro_batch=2"}), "").activations) << "other micro-batch";
  EXPECT_FALSE(job::measured_activations(config({"job.device=cuda"}), "").activations) << "another device";
  EXPECT_EQ(after(R"({"device": {"activations": {"peak": 70}}, "host": {}})").offloaded_activations, 0);
}

TEST_F(MeasuredActivationsTest, ReadsARunOf8e08ee99) {
  std::filesystem::create_directories(scratch_.path("runs/a"));
  std::filesystem::copy(ZR_SOURCE_DIR "/tests/multirank/checkpoint/written_by_8e08ee99/run", scratch_.path("runs/a/1"));
  const std::vector<config::ConfigKey> keys{{"parity", "model", ZR_KEY_STRING, "\"convolutional\"", "which model"},
                                            {"parity", "weighted", ZR_KEY_BOOL, "false", "unused"},
                                            {"parity", "overflows", ZR_KEY_BOOL, "false", "unused"}};
  const config::JobConfig same =
      config::Document::parse("", "job.toml",
                              {"job.name=a", "job.runs=" + scratch_.path("runs"), "train.dtype=bf16",
                               "train.micro_batch=3", "train.gradient_accumulation=12"})
          .check(keys, 2);
  EXPECT_EQ(job::measured_activations(same, "").activations, 35696);
}

TEST_F(MeasuredActivationsTest, IgnoresActivationsThatAreNotNumbers) {
  for (const std::string peak : {"null", "\"70\"", "[70]", "{}", "7.5", "true"}) {
    for (const std::string tier : {"device", "host", "disk"}) {
      std::string memory = "{";
      for (const std::string one : {"device", "host", "disk"})
        memory += (one == "device" ? "\"" : ", \"") + one +
                  "\": {\"activations\": {\"peak\": " + (one == tier ? peak : std::string("70")) + "}}";
      const plan::PlanContext none = after(memory + "}");
      EXPECT_FALSE(none.activations) << tier << " " << peak;
      EXPECT_EQ(none.offloaded_activations, 0) << tier << " " << peak;
      EXPECT_EQ(none.measured_by, "") << tier << " " << peak;
    }
  }
  for (const std::string memory : {"null", "3", "[]", "{\"device\": 3}", "{\"device\": {\"activations\": []}}"})
    EXPECT_FALSE(after(memory).activations) << memory;
}

TEST_F(MeasuredActivationsTest, IgnoresFilesThatAreNotRegular) {
  EXPECT_TRUE(after(R"({"device": {"activations": {"peak": 70}}})").activations);
  for (const std::string file : {"summary.json", "config.toml"}) {
    std::filesystem::remove_all(scratch_.path("runs/a/9"));
    scratch_.write("runs/a/9/config.toml", "");
    scratch_.write("runs/a/9/summary.json", "{}");
    std::filesystem::remove(scratch_.path("runs/a/9/" + file));
    ASSERT_EQ(::mkfifo(scratch_.path("runs/a/9/" + file).c_str(), 0600), 0);  // its open() would wait for a writer
    EXPECT_TRUE(job::measured_activations(config(), "").activations) << "of the run before";
  }
}

}  // namespace
}  // namespace zr::host
