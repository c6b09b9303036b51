// Which checkpoint a job resumes from, and its exact output (tests/golden/resume.txt).
#include "support/checkpoint_test.hpp"
#include "support/golden_cases.hpp"

namespace zr::test {
namespace {

// "-- prepare": "train OVERRIDES" trains on one rank, other lines are shell commands; "-- run": overrides of a job on
// two ranks that resumes.
TEST_F(CheckpointTest, ResumeReportsTheCheckpointItLoads) {
  const std::string model = "parity.model=tiny strategy=zero1 ";
  const auto shell_of = [&](const std::string& line) {
    return line.starts_with("train ") ? launch(1, engine_tests::trains, model + line.substr(6)) : line;
  };
  golden::check(ZR_SOURCE_DIR "/tests/golden/resume.txt", 8, [&](const golden::Case& one) {
    shell("rm -rf * .[a-z]*");
    for (const std::string& line : golden::lines_of(one["prepare"])) {
      const Outcome prepared = shell(shell_of(line));
      EXPECT_EQ(prepared.code, 0) << line << "\n" << prepared.output;
    }
    const Outcome done = shell(launch(1, engine_tests::trains, model + "checkpoint.resume=true " + one["run"]));
    std::string says;
    for (const std::string& line : done.lines())
      if (line.find("(pid ") == line.npos && line.find("  pid ") == line.npos) says += line + "\n";
    for (const auto& [path, name] :
         {std::pair<std::string, std::string>{scratch_.folder().string(), "{folder}"}, {ZR_SOURCE_DIR, "{root}"}})
      for (auto at = says.find(path); at != says.npos; at = says.find(path)) says.replace(at, path.size(), name);
    golden::trim_newlines(says);
    return std::vector<golden::ProducedPart>{{"exit", done.code == 0 ? "" : std::to_string(done.code)}, {"says", says}};
  });
}

// keep = 1, and the steps 1, 3 and 5 are skipped: the checkpoint of step 4 is kept in addition to that of step 5.
TEST_F(CheckpointTest, RetentionKeepsTheNewestCheckpointOfAnAppliedStep) {
  run(2, "job.name=a checkpoint.dir=c checkpoint.every=1 checkpoint.keep=1 train.steps=5\n",
      "parity.model=tiny parity.overflows=true strategy=zero1");
  EXPECT_EQ(names_in("c"), (std::vector<std::string>{"lock", "step-00000004", "step-00000005"}));
  EXPECT_EQ(shell(ZR_BUILD_DIR "/bin/zeroth verify c").code, 0);
}

}  // namespace
}  // namespace zr::test
