// What an earlier run left in its folder is taken for activations, or it is not.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "engine/record.hpp"
#include "scratch.hpp"

namespace zr::host {
namespace {

class Measured : public testing::Test {
 protected:
  Config config(const std::vector<std::string>& more = {}) const {
    std::vector<std::string> all{"job.name=a", "job.runs=" + scratch_.path("runs")};
    all.insert(all.end(), more.begin(), more.end());
    return Document::parse("", "job.toml", all).check({}, 1);
  }
  // A run in the folder, with this in its summary.
  Besides after(const std::string& memory) const {
    Record record(config(), "", 2, 0);
    record.accept();
    record.finish(Ledger(), {});
    scratch_.write("runs/a/summary.json", "{\"memory\": " + memory + "}");
    return measured(config(), "");
  }
  const test::Scratch scratch_;
};

TEST_F(Measured, ActivationsAreThoseOfTheDeviceAndBesideThemThoseOfTiers) {
  const Besides all = after(R"({"device": {"activations": {"planned": null, "peak": 70}},
                                "host": {"activations": {"peak": 5}}, "disk": {"activations": {"peak": 8}}})");
  EXPECT_EQ(all.activations, 70);
  EXPECT_EQ(all.aside, 13);
  EXPECT_EQ(all.measured_by, scratch_.path("runs/a"));
  EXPECT_FALSE(measured(config({"train.micro_batch=2"}), "").activations) << "of another micro-batch";
  EXPECT_EQ(after(R"({"device": {"activations": {"peak": 70}}, "host": {}})").aside, 0);
}

TEST_F(Measured, ActivationsThatAreNoNumbersAreNone) {
  for (const std::string peak : {"null", "\"70\"", "[70]", "{}", "7.5", "true"}) {
    for (const std::string tier : {"device", "host", "disk"}) {
      std::string memory = "{";
      for (const std::string one : {"device", "host", "disk"})
        memory += (one == "device" ? "\"" : ", \"") + one +
                  "\": {\"activations\": {\"peak\": " + (one == tier ? peak : std::string("70")) + "}}";
      const Besides none = after(memory + "}");
      EXPECT_FALSE(none.activations) << tier << " " << peak;
      EXPECT_EQ(none.aside, 0) << tier << " " << peak;
      EXPECT_EQ(none.measured_by, "") << tier << " " << peak;
    }
  }
  for (const std::string memory : {"null", "3", "[]", "{\"device\": 3}", "{\"device\": {\"activations\": []}}"})
    EXPECT_FALSE(after(memory).activations) << memory;
}

}  // namespace
}  // namespace zr::host
