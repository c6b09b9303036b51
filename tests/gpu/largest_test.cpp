// gpu_largest with small models, on the simulated device and on the CPU.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "support/shell.hpp"

namespace {

using ::testing::HasSubstr;
using Json = nlohmann::json;

const std::string kProgram = ZR_BUILD_DIR "/bin/gpu_largest ",
                  kSim = " job.device_library=" ZR_BUILD_DIR "/tests/devices/libzr_sim_device.so";

// The rows with a result, by way, and those with a ratio to plain libtorch.
struct Rows {
  std::map<std::string, Json> largest, ratios;
  Json marked;  // the best ratio
};
double parameters(const Rows& rows, const std::string& way) { return rows.largest.at(way)["result"]["parameters"]; }
double rounded(double ratio) { return std::round(1e3 * ratio) / 1e3; }

Rows rows_of(const std::string& arguments) {
  const auto done = zr::testing::shell("ZR_PLUGIN_PATH=" ZR_BUILD_DIR "/tests/plugins " + kProgram + arguments);
  EXPECT_EQ(done.code, 0) << done.output;
  Rows rows;
  for (const std::string& line : done.lines()) {
    const Json row = Json::parse(line, nullptr, false);
    if (row.contains("largest")) rows.largest[row["way"]] = row;
    if (row.contains("mark"))
      rows.marked = row;
    else if (row.contains("ratio"))
      rows.ratios[row["way"]] = row;
  }
  return rows;
}

TEST(GpuLargestTest, SLOW_FindsTheLargestModelOnTheSimulatedDevice) {
  const Rows rows = rows_of("--tiny sim 2MiB model plain zero2+cpu zero2+cpu_gradients zero3+nvme_gradients" + kSim);
  ASSERT_EQ(rows.largest.size(), 4u);
  for (const auto& [way, row] : rows.largest) {
    EXPECT_GT(row["largest"], 0) << row;
    EXPECT_GT(row["fails"], row["largest"]) << row;
    EXPECT_GT(row["result"]["parameters"], 0) << row;
    EXPECT_LE(row["result"]["peak_bytes"], 2 << 20) << row;
    EXPECT_THAT(row["reason"].get<std::string>(),
                HasSubstr(way == "plain" ? "the budget is 2097152" : "device_budget"));
  }
  ASSERT_EQ(rows.ratios.size(), 3u);
  EXPECT_GT(rows.ratios.at("zero2+cpu")["ratio"], 1.4);
  EXPECT_GT(rows.ratios.at("zero2+cpu_gradients")["ratio"], 6);
  EXPECT_GT(rows.ratios.at("zero3+nvme_gradients")["ratio"], 6);
  EXPECT_EQ(rows.marked.at("mark"), 8);
  EXPECT_EQ(rows.marked.at("ratio"), rounded(parameters(rows, "zero2+cpu_gradients") / parameters(rows, "plain")));
}

TEST(GpuLargestTest, SLOW_FindsTheLargestBatchOnTheCpu) {
  const Rows rows = rows_of("--tiny cpu 1MiB batch plain zero2+cpu");
  ASSERT_EQ(rows.largest.size(), 2u);
  EXPECT_EQ(rows.largest.at("plain")["row"], "samples of the largest batch of 7 layers");
  EXPECT_GT(rows.largest.at("plain")["largest"], 1);
  EXPECT_EQ(rows.marked.at("mark"), 2);
}

TEST(GpuLargestTest, EndsASearchWhoseTimeIsOver) {
  const Rows rows = rows_of("--tiny --seconds 0.01 sim 2MiB model plain" + kSim);
  ASSERT_EQ(rows.largest.size(), 1u);
  EXPECT_EQ(rows.largest.at("plain")["complete"], false);
  EXPECT_THAT(rows.largest.at("plain")["reason"].get<std::string>(), HasSubstr("the time of the search is over"));
}

TEST(GpuLargestTest, SaysWhyItCannotStart) {
  const auto no_device = zr::testing::shell(kProgram + "nonsense 10GiB model");
  EXPECT_EQ(no_device.code, 3);
  EXPECT_THAT(no_device.output, HasSubstr("zeroth: error: job.device = \"nonsense\": this libtorch does not have a "));
  const auto no_unit = zr::testing::shell(kProgram + "cpu 10 model");
  EXPECT_EQ(no_unit.code, 2);
  EXPECT_THAT(no_unit.output, HasSubstr("BUDGET is '10'; write a number with a unit, such as 10GiB"));
  const auto no_way = zr::testing::shell(kProgram + "cpu 10GiB model zero9");
  EXPECT_EQ(no_way.code, 2);
  EXPECT_THAT(no_way.output,
              HasSubstr("'zero9' is not a way; the ways are plain zero2 zero2+cpu zero2+cpu_gradients zero3+cpu "));
}

}  // namespace
