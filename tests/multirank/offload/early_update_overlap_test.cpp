// What overlaps with backward when states on tiers are updated early: the trace, the bytes, and the waits by cause.
#include <gmock/gmock.h>

#include <chrono>
#include <thread>

#include "support/offload_test.hpp"

namespace zr::test {
namespace {

using engine_tests::Run;

class EarlyUpdateOverlapTest : public OffloadTest {
 protected:
  struct Span {
    std::string track, name;
    double begin, end;
    bool contains(const Span& other) const { return begin <= other.begin && other.end <= end; }
  };
  // Rank 0's trace.
  std::vector<Span> spans_of(const std::string& name) const {
    const Json trace = Json::parse(std::ifstream(scratch_.path("runs/" + name + "/latest/trace-0.json")));
    std::map<int, std::string> tracks;
    std::vector<Span> spans;
    for (const Json& event : trace) {
      if (event.at("name") == "thread_name") tracks[event.at("tid")] = event.at("args").at("name");
      if (event.at("ph") != "X") continue;
      const double begin = event.at("ts");
      spans.push_back({tracks.at(event.at("tid")), event.at("name"), begin, begin + event.at("dur").get<double>()});
    }
    return spans;
  }
};

// Backward of the third step pauses before its last gradient. All buckets but the last ones have been reduced then,
// because their memory was needed for later ones: their states can be updated during the pause.
RANK_BODY(pauses_in_backward, Run) {
  run.build();
  run.model->named_parameters()["in.weight"].register_hook([&](const torch::Tensor& gradient) {
    if (run.engine->step_index() == 2) std::this_thread::sleep_for(std::chrono::milliseconds(500));
    return gradient;
  });
  run.train();
}

TEST_F(EarlyUpdateOverlapTest, TilesAreReadAndUpdatedWithinBackward) {
  for (const std::string how : {"strategy=zero0 train.nonfinite=stop", "strategy=zero2 train.nonfinite=stop"}) {
    train(2, pauses_in_backward, "traced", "parity.model=wide train.steps=3 job.trace=true " + how + states("nvme"));
    const std::vector<Span> spans = spans_of("traced");
    int reads = 0, updates = 0;
    for (const Span& backward : spans) {
      if (backward.track != "training" || backward.name != "backward") continue;
      for (const Span& span : spans) {
        if (!backward.contains(span)) continue;
        reads += span.track == "nvme" && span.name.starts_with("read states of ");
        updates += span.track == "early update" && span.name == "update";
      }
    }
    EXPECT_GT(reads, 0) << how;
    EXPECT_GT(updates, 0) << how;
  }
}

TEST_F(EarlyUpdateOverlapTest, TransfersTheBytesOfTheUpdateAfterBackward) {
  const std::string common = "parity.model=wide train.steps=4 train.nonfinite=stop strategy=zero2 ";
  train(2, engine_tests::trains, "late", common + "offload.overlap=false" + states("nvme"));
  train(2, engine_tests::trains, "early", common + states("nvme"));
  EXPECT_EQ(number("early", "/overlap/updates_early"), 3);
  EXPECT_EQ(number("early", "/overlap/states_early"), number("early", "/overlap/states"));
  EXPECT_EQ(number("early", "/overlap/bytes_early"), 3 * 8 * number("early", "/overlap/states")) << "two fp32 states";
  for (const char* way : {"/tiers/nvme/written_bytes", "/tiers/nvme/read_bytes"})
    EXPECT_EQ(number("early", way), number("late", way)) << way;
}

// The disk takes much longer than backward and the update: step() waits for it, in three of four steps for the worker.
TEST_F(EarlyUpdateOverlapTest, StepCountsWaitsForTheWorkersTransfersAsWaitsForTheDisk) {
  const Outcome done =
      shell("ZR_TIER_FAULT=slow=2ms " +
            launch(2, engine_tests::trains,
                   "job.name=slow parity.model=wide strategy=zero2 train.steps=4 train.nonfinite=stop" + disk() +
                       "offload.optimizer=" + kFailing));
  ASSERT_EQ(done.code, 0) << done.output;
  const Json waits = summary("slow").at("waits_ms");
  EXPECT_GT(waits.at("disk_read").get<double>() + waits.at("disk_write").get<double>(),
            waits.at("optimizer").get<double>())
      << waits;
}

}  // namespace
}  // namespace zr::test
