#include <gtest/gtest.h>

#include "config/key_reader.hpp"
#include "support/sample_keys.hpp"

namespace zr::host {

namespace {
struct Batch {
  int64_t global, micro, accumulation;
  std::string origins;
  bool operator==(const Batch&) const = default;
};
std::ostream& operator<<(std::ostream& out, const Batch& b) {
  return out << b.global << " = " << b.micro << " x " << b.accumulation << " " << b.origins;
}
Batch batch(const std::string& toml, int world) {
  const config::JobConfig config = sample::check("[train]\n" + toml, {}, world);
  std::string origins;
  for (const char* key : {"train.global_batch", "train.micro_batch", "train.gradient_accumulation"})
    origins += config::KeyReader(config).origin(key).text().substr(0, 3) + " ";
  return {config::KeyReader(config).integer("train.global_batch"),
          config::KeyReader(config).integer("train.micro_batch"),
          config::KeyReader(config).integer("train.gradient_accumulation"), origins};
}
}  // namespace

TEST(BatchTest, DefaultsToOneSamplePerRank) { EXPECT_EQ(batch("", 3), (Batch{3, 1, 1, "der def def "})); }

TEST(BatchTest, DerivesTheThirdNumberFromAnyTwo) {
  EXPECT_EQ(batch("global_batch = 48\nmicro_batch = 4", 3), (Batch{48, 4, 4, "job job der "}));
  EXPECT_EQ(batch("global_batch = 48\ngradient_accumulation = 4", 3), (Batch{48, 4, 4, "job der job "}));
  EXPECT_EQ(batch("micro_batch = 4\ngradient_accumulation = 4", 3), (Batch{48, 4, 4, "der job job "}));
}

TEST(BatchTest, AssumesNoAccumulationWhenOneNumberIsGiven) {
  EXPECT_EQ(batch("global_batch = 48", 3), (Batch{48, 16, 1, "job der def "}));
  EXPECT_EQ(batch("micro_batch = 4", 3), (Batch{12, 4, 1, "der job def "}));
  EXPECT_EQ(batch("gradient_accumulation = 4", 3), (Batch{12, 1, 4, "der def job "}));
}

TEST(BatchTest, AcceptsThreeConsistentNumbers) {
  EXPECT_EQ(batch("global_batch = 24\nmicro_batch = 2\ngradient_accumulation = 4", 3),
            (Batch{24, 2, 4, "job job job "}));
}

TEST(BatchTest, TreatsZeroAsNotGiven) {
  EXPECT_EQ(batch("global_batch = 12\nmicro_batch = 2\ngradient_accumulation = 0", 2),
            (Batch{12, 2, 3, "job job der "}));
}

}  // namespace zr::host
