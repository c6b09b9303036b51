// The exact message of every error that a TOML file can cause: config_errors.txt.
#include <gtest/gtest.h>

#include "base/error.hpp"
#include "support/golden_cases.hpp"
#include "support/sample_keys.hpp"

namespace zr::host {

namespace {
std::string error_of(const golden::Case& one) {
  try {
    const int world = one["world"].empty() ? 0 : std::stoi(one["world"]);
    std::vector<std::string> overrides = golden::lines_of(one["overrides"]);
    if (one["bare"].empty())
      overrides.insert(overrides.begin(), {"strategy=flat", "optimizer=adam", "data.text=a.txt"});
    config::PluginIds others = sample::others();
    others["optimizer"].clear();  // "sgd" is in unselected()
    config::Document::parse(one["job.toml"], "job.toml", overrides)
        .check(sample::keys(), world, others, nullptr, sample::unselected());
  } catch (const Error& failure) {
    EXPECT_EQ(failure.exit_code(), exit_code::user);
    return failure.what();
  }
  return "no error";
}
}  // namespace

TEST(ConfigErrorsTest, MatchTheGoldenFile) {
  golden::check(ZR_SOURCE_DIR "/tests/golden/config_errors.txt", 80, [](const golden::Case& one) {
    return std::vector<golden::ProducedPart>{{"says", error_of(one)}};
  });
}

TEST(ConfigErrorsTest, NamesAFileThatCannotBeRead) {
  try {
    config::Document::load("/nowhere/job.toml", {});
    FAIL();
  } catch (const Error& failure) {
    EXPECT_STREQ(failure.what(), "/nowhere/job.toml: cannot be read: No such file or directory; name a TOML file");
  }
}

}  // namespace zr::host
