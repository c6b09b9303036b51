// Runs `zeroth tune`: checks its output, the stored profile, that it removes its files, and that later plans use it.
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <regex>
#include <sstream>

#include "support/golden_cases.hpp"
#include "support/scratch.hpp"

namespace {

using zr::golden::lines_of;
using zr::test::Scratch;

struct Machine {
  const Scratch scratch;
  const std::string profile = scratch.path("home/machine.json"), disk = scratch.path("disk");
  Machine() { std::filesystem::create_directories(disk); }
  // Returns the standard output; an error fails the test.
  std::string run(const std::string& arguments) const {
    const std::string out = scratch.path("out"), err = scratch.path("err");
    const int status = std::system(("ZR_PLUGIN_PATH= ZR_MACHINE_PROFILE=" + profile + " " ZR_BUILD_DIR "/bin/zeroth " +
                                    arguments + " >" + out + " 2>" + err + " </dev/null")
                                       .c_str());
    EXPECT_EQ(WEXITSTATUS(status), 0) << text_of(err);
    return text_of(out);
  }
  static std::string text_of(const std::string& file) {
    std::ostringstream text;
    text << std::ifstream(file).rdbuf();
    return text.str();
  }
  std::string tiles(const std::string& keys) const {  // tiles that a plan keeps in flight
    const std::string text = run("plan --params 1e8 offload.optimizer=nvme offload.nvme.path=" + disk + " " + keys);
    std::smatch match;
    const std::regex row("states in flight on host memory +([^\n]+)\n");
    return std::regex_search(text, match, row) ? match[1].str() : text;
  }
};

TEST(ZerothTune, MeasuresStoresAndPrintsTheCostOfAStep) {
  const Machine machine;
  const std::string before = machine.tiles("");
  EXPECT_EQ(before, "32.00 MiB");  // four of 8 x 1 MiB
  const auto lines = lines_of(machine.run("tune --path " + machine.disk +
                                          " --seconds 2 --bytes 64MiB --params 1e8 "
                                          "offload.optimizer=nvme"));
  ASSERT_EQ(lines.size(), 23u) << ::testing::PrintToString(lines);
  EXPECT_TRUE(std::regex_match(lines[0], std::regex("tier nvme in " + machine.disk +
                                                    " \\(file system /.*\\): 64\\.00 MiB, [0-9.ms ]+, [0-9.]+ GB "
                                                    "written")))
      << lines[0];
  EXPECT_EQ(lines[1].rfind("     block  depth    read   write   mixed  GB/s", 0), 0u) << lines[1];
  std::vector<std::string> chosen;
  const std::regex row(" +([0-9]+) ([KM])iB +([0-9]+)((?: +[0-9]+\\.[0-9]{3}){3}|(?: +-){3})(  chosen)?");
  for (std::size_t i = 2; i < 18; ++i) {
    std::smatch part;
    ASSERT_TRUE(std::regex_match(lines[i], part, row)) << lines[i];
    if (part[5].matched) chosen = {part[1].str() + " " + part[2].str() + "iB", part[3].str()};
  }
  ASSERT_EQ(chosen.size(), 2u);
  EXPECT_TRUE(std::regex_match(
      lines[21], std::regex("optimizer phase of a step: 1 rank reads 0\\.80 GB and writes 0\\.80 GB of states; "
                            "1\\.60 GB / [0-9.]+ GB/s mixed = [0-9.]+ ?s")))
      << lines[21];
  EXPECT_TRUE(std::regex_match(
      lines[22], std::regex("wear: 0\\.80 GB written per step; a drive rated for 600 TB lasts 749[0-9]{3} "
                            "steps, or [0-9.]+ days of optimizer phases back to back")))
      << lines[22];
  EXPECT_TRUE(std::filesystem::is_empty(machine.disk));

  const auto kept = nlohmann::json::parse(Machine::text_of(machine.profile)).at("disks");
  ASSERT_EQ(kept.size(), 1u);
  const auto block_bytes = kept[0].at("block_bytes").get<int64_t>(), depth = kept[0].at("depth").get<int64_t>();
  EXPECT_EQ(
      block_bytes < 1 << 20 ? std::to_string(block_bytes >> 10) + " KiB" : std::to_string(block_bytes >> 20) + " MiB",
      chosen[0]);
  EXPECT_EQ(std::to_string(depth), chosen[1]);
  for (const char* rate : {"read", "write", "mixed"}) EXPECT_GT(kept[0].at(rate).get<double>(), 0) << rate;
}

TEST(ZerothTune, ListsAndForgetsMeasurements) {
  const Machine machine;
  EXPECT_EQ(machine.run("tune --list"), machine.profile + ": no disks were measured\n");
  machine.scratch.write(
      "home/machine.json",
      R"({"format": 1, "disks": [{"mount": "/mnt/gone", "device": 7, "block_bytes": 1048576, "depth": 8,
                            "read": 2e9, "write": 1e9, "mixed": 1.5e9, "date": "2026-01-01T00:00:00Z",
                            "disturbance": "other processes used 1.7 of 2 cores"}]})");
  EXPECT_EQ(machine.run("tune --list"),
            machine.profile +
                ":\n  /mnt/gone: 1024 KiB x 8, read 2.000, write 1.000, mixed 1.500 GB/s, 2026-01-01T00:00:00Z\n"
                "    measured while other processes used 1.7 of 2 cores\n");
  EXPECT_EQ(machine.run("tune --forget /mnt/gone"),
            "removed the measurements of /mnt/gone from " + machine.profile + "\n");
  EXPECT_EQ(machine.run("tune --list"), machine.profile + ": no disks were measured\n");
}

TEST(ZerothTune, SetsBlockSizeAndDepthOfLaterPlansUnlessKeysSetThem) {
  const Machine machine;
  machine.run("tune --path " + machine.disk + " --seconds 1 --bytes 32MiB");
  auto kept = nlohmann::json::parse(Machine::text_of(machine.profile));
  kept["disks"][0]["block_bytes"] = 512 << 10;
  kept["disks"][0]["depth"] = 4;
  machine.scratch.write("home/machine.json", kept.dump());
  EXPECT_EQ(machine.tiles(""), "8.00 MiB");  // four of 4 x 512 KiB
  EXPECT_EQ(machine.tiles("offload.nvme.depth=16"), "32.00 MiB");
  EXPECT_EQ(machine.tiles("offload.nvme.block_bytes=256KiB"), "4.00 MiB");
  EXPECT_EQ(machine.tiles("offload.nvme.block_bytes=2MiB offload.nvme.depth=2"), "16.00 MiB");
  kept["disks"][0]["device"] = kept["disks"][0]["device"].get<uint64_t>() + 1;  // another disk
  machine.scratch.write("home/machine.json", kept.dump());
  EXPECT_EQ(machine.tiles(""), "32.00 MiB");
}

TEST(ZerothTune, ReportsThatAModelHasNoStatesOnDisk) {
  const Machine machine;
  const std::string text =
      machine.run("tune --path " + machine.disk + " --seconds 1 --bytes 32MiB --params 1e6 offload.optimizer=device");
  EXPECT_NE(text.find("steps do not use the disk: offload.optimizer is \"device\"; set it to \"nvme\" to use it\n"),
            text.npos)
      << text;
}

}  // namespace
