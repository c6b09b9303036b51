// Disks that fail during a job: all ranks end, the message says what failed, and the job can resume from the previous
// checkpoint.
#include <gmock/gmock.h>

#include <array>

#include "support/offload_test.hpp"

namespace zr::test {
namespace {

using ::testing::HasSubstr;

class OffloadFaultTest : public OffloadTest {
 protected:
  // Two ranks with the tier that fails on demand.
  Outcome train(const std::string& fault, const std::string& overrides) const {
    return shell("ZR_TIER_FAULT=" + fault + " " + launch(2, engine_tests::trains, overrides));
  }
  // Only optimizer states are on the failing tier.
  std::string states() const { return "strategy=zero2 train.steps=3 " + disk() + "offload.optimizer=" + kFailing; }
  // Only shards of weights and reduced gradients are on the failing tier.
  std::string shards() const {
    return kGathered + "train.steps=4 offload.nvme.path=" + scratch_.path("swap") +
           " offload.nvme.block_bytes=4KiB offload.nvme.depth=1 offload.gradients=" + kFailing +
           "offload.parameters=" + kFailing;
  }
  // Read calls of the tier on rank 0 before the checkpoint of the last step; each reads one block.
  int64_t reads(const std::string& job) const { return number(job, "/tiers/nvme/read_bytes") / 4096; }

  // The job ended because of the tier alone, and the message says so.
  void expect_reported(const Outcome& failed, const std::string& whose, const std::string& call) const {
    EXPECT_EQ(failed.code, 3) << failed.output;
    for (const std::string& text : {std::string("offload 'nvme'"), whose, scratch_.path("swap"),
                                    call + " 4096 bytes at byte ", std::string(" failed: Input/output error; ")})
      EXPECT_THAT(failed.output, HasSubstr(text));
    EXPECT_THAT(failed.output, Not(HasSubstr("training continues")));
  }
  // The committed checkpoints are complete; the job resumes from them to the results of the run without a fault.
  void expect_good(const std::vector<std::string>& committed, const std::string& how,
                   const std::string& uninterrupted) {
    const Outcome verified = shell(zeroth_bin() + "verify c");
    EXPECT_EQ(verified.code, 0) << verified.output;
    std::vector<std::string> names = names_in("c");
    std::erase(names, "lock");
    EXPECT_EQ(names, committed);
    const Outcome rest = train("", how + " checkpoint.resume=true");
    ASSERT_EQ(rest.code, 0) << rest.output;
    EXPECT_EQ(hash("f"), hash(uninterrupted));
    EXPECT_EQ(losses("f"), losses(uninterrupted));
  }
};

TEST_F(OffloadFaultTest, ReportsTheFailedStatesAndTheirFolder) {
  for (const std::string fault : {"read=EIO@7", "write=EIO@9", "write=ENOSPC@9"}) {
    const Outcome failed = train(fault, states());
    EXPECT_EQ(failed.code, 3) << fault << failed.output;
    EXPECT_THAT(failed.output, HasSubstr("offload 'nvme'")) << fault;
    EXPECT_THAT(failed.output, HasSubstr("states of '")) << fault;
    EXPECT_THAT(failed.output, HasSubstr(scratch_.path("swap"))) << fault;
    EXPECT_THAT(failed.output, HasSubstr(fault.find("ENOSPC") == fault.npos ? "Input/output error" : "No space left"))
        << fault;
  }
  const Outcome flipped = train("flip@9", states());
  EXPECT_EQ(flipped.code, 3) << flipped.output;
  EXPECT_THAT(flipped.output, HasSubstr("states of '"));
  EXPECT_THAT(flipped.output, HasSubstr("returned other data than was written"));
}

TEST_F(OffloadFaultTest, ReportsTheFailedGradientBuffer) {
  for (const auto& [fault, overrides, text] : std::vector<std::array<std::string, 3>>{
           {"write=EIO@3", "train.gradient_accumulation=2",
            "'reduced gradients, own shard' for reduce_scatter 'bucket "},
           {"read=EIO@3", "train.gradient_accumulation=2",
            "'reduced gradients, own shard' for reduce_scatter 'bucket "},
           {"read=EIO@2", "train.gradient_accumulation=1", "reduced gradient of '"},
           {"flip@2", "train.gradient_accumulation=1", "returned other data than was written"}}) {
    const Outcome failed =
        train(fault, "strategy=zero2 train.steps=3 parity.model=large strategy.zero2.bucket_bytes=64KiB " + disk() +
                         "offload.optimizer=device offload.gradients=" + kFailing + overrides);
    EXPECT_EQ(failed.code, 3) << fault << failed.output;
    EXPECT_THAT(failed.output, HasSubstr("offload 'nvme'")) << fault;
    EXPECT_THAT(failed.output, HasSubstr(text)) << fault << " " << overrides;
  }
}

TEST_F(OffloadFaultTest, ShortAndSlowTransfersKeepResultsBitIdentical) {
  run(2, "job.name=plain\n", "strategy=zero2 train.steps=3");
  for (const std::string fault : {"read=SHORT", "write=SHORT", "slow=2ms", "uring=EPERM"}) {
    const Outcome done = train(fault, states() + "job.name=f train.gradient_accumulation=12");
    ASSERT_EQ(done.code, 0) << fault << done.output;
    EXPECT_EQ(hash("f"), hash("plain")) << fault;
    if (fault == "slow=2ms") {
      const double waited = summary("f").at("waits_ms").at("disk_read").get<double>() +
                            summary("f").at("waits_ms").at("disk_write").get<double>();
      EXPECT_GT(waited, 20) << "the wait is attributed to the disk";
    }
  }
}

TEST_F(OffloadFaultTest, FaultOnOneRankEndsAllRanks) {
  const std::string activations = "offload.nvme.path=" + scratch_.path("swap") +
                                  " offload.activation_bytes=1KiB parity.model=large strategy=zero2 "
                                  "offload.activations=" +
                                  kFailing;
  for (const std::string rank : {"0", "1"})
    for (const auto& [fault, overrides, text] : std::vector<std::array<std::string, 3>>{
             {"read=EIO@7", states(), "states of '"},
             {"write=EIO@9", states(), "states of '"},
             {"read=EIO@9", shards() + "parity.model=large", "'weights, own shard' for all_gather '"},
             {"write=EIO@60", shards() + "parity.model=large", "'"},
             {"write=EIO@1", activations, "an activation of "}}) {
      const Outcome failed = train("rank=" + rank + ":" + fault, overrides);
      EXPECT_EQ(failed.code, 3) << rank << fault << failed.output;
      EXPECT_THAT(failed.output, HasSubstr("offload 'nvme'")) << fault;
      EXPECT_THAT(failed.output, HasSubstr(text)) << fault;
      EXPECT_THAT(failed.output, HasSubstr("zeroth: error: rank " + rank + " ")) << "this rank ends first";
      EXPECT_THAT(failed.output, HasSubstr("\n  rank " + std::string(rank == "0" ? "1" : "0") + "  pid"));
    }
}

// The fault occurs while the checkpoint of step 2 is saved; the checkpoint of step 1 exists.
TEST_F(OffloadFaultTest, FaultDuringASaveKeepsThePreviousCheckpoint) {
  const std::string model = "parity.model=large train.dtype=bf16 train.gradient_accumulation=2 ",
                    how = states() + model;
  ASSERT_EQ(train("", how + "job.name=uninterrupted").code, 0);
  ASSERT_EQ(train("", how + "job.name=none train.steps=2").code, 0);
  ASSERT_EQ(train("", how + "job.name=once train.steps=2 checkpoint.every=1 checkpoint.dir=counted").code, 0);
  const int64_t before = reads("once"), of_one = before - reads("none");
  ASSERT_GT(of_one, 40) << "the number of calls differs slightly on the other rank";
  const std::string fault = "read=EIO@" + std::to_string(before + of_one / 2);
  for (const std::string async : {"false", "true"})
    for (const std::string who : {"", "rank=0:", "rank=1:"}) {
      const std::string saves =
          how + "job.name=f checkpoint.dir=c checkpoint.every=1 checkpoint.async=" + async + " checkpoint.keep=0";
      const Outcome failed = train(who + fault, saves);
      SCOPED_TRACE(who + fault + " async " + async);
      expect_reported(failed, "states of '", "reading");
      EXPECT_EQ(losses("f").size(), 2u) << "two steps were trained";
      expect_good({"step-00000001"}, how + "job.name=f checkpoint.dir=c", "uninterrupted");
      fs::remove_all(scratch_.path("c"));
    }
}

// The number of reads ahead of collectives varies: the fault occurs in the second checkpoint or in an adjacent step.
TEST_F(OffloadFaultTest, FaultDuringASaveOfShardsKeepsThePreviousCheckpoint) {
  const std::string how = shards() + "parity.model=large train.gradient_accumulation=2 ";
  ASSERT_EQ(train("", how + "job.name=uninterrupted").code, 0);
  ASSERT_EQ(train("", how + "job.name=once train.steps=2 checkpoint.every=1 checkpoint.dir=counted").code, 0);
  for (const std::string who : {"rank=0:", "rank=1:"}) {
    const std::string fault = who + "read=EIO@" + std::to_string(reads("once") + 12);
    const Outcome failed = train(fault, how + "job.name=f checkpoint.dir=c checkpoint.every=1 checkpoint.keep=0");
    SCOPED_TRACE(fault);
    expect_reported(failed, "'", "reading");
    const std::size_t saved = host::checkpoint::checkpoints_in(scratch_.path("c")).size();
    EXPECT_TRUE(saved == 1 || saved == 2) << saved;
    expect_good(host::checkpoint::checkpoints_in(scratch_.path("c")), how + "job.name=f checkpoint.dir=c",
                "uninterrupted");
    fs::remove_all(scratch_.path("c"));
  }
}

TEST_F(OffloadFaultTest, FaultDuringALoadKeepsTheCheckpoint) {
  const std::string how = states() + "parity.model=large train.gradient_accumulation=2 ",
                    from = "job.name=f checkpoint.dir=c ";
  ASSERT_EQ(train("", how + "job.name=uninterrupted").code, 0);
  for (const std::string fault :
       {"write=EIO@5", "read=EIO@2", "rank=0:write=EIO@5", "rank=1:write=EIO@5", "rank=1:read=EIO@2"}) {
    ASSERT_EQ(train("", how + from + "train.steps=2 checkpoint.every=2").code, 0);
    const Outcome failed = train(fault, how + from + "checkpoint.resume=true");
    SCOPED_TRACE(fault);
    expect_reported(failed, "states of '", fault.find("read=") == fault.npos ? "writing" : "reading");
    EXPECT_EQ(losses("f").size(), 2u) << "no further step was trained";
    expect_good({"step-00000002"}, how + from, "uninterrupted");
    fs::remove_all(scratch_.path("c"));
    fs::remove_all(scratch_.path("runs/f"));
  }
}

// Loading writes the shards to disk as training does.
TEST_F(OffloadFaultTest, FaultDuringALoadOfShardsKeepsTheCheckpoint) {
  const std::string how = shards() + "parity.model=large train.gradient_accumulation=2 ",
                    from = "job.name=f checkpoint.dir=c ";
  ASSERT_EQ(train("", how + "job.name=uninterrupted").code, 0);
  ASSERT_EQ(train("", how + from + "train.steps=2 checkpoint.every=2").code, 0);
  const auto before = losses("f");
  for (const std::string who : {"rank=0:", "rank=1:"}) {
    // The shards of the first parameters are written once at the start, and again from the checkpoint.
    const Outcome failed = train(who + "write=EIO@30", how + from + "checkpoint.resume=true");
    SCOPED_TRACE(who);
    expect_reported(failed, "weights or reduced gradients of '", "writing");
    EXPECT_EQ(losses("f"), before) << "no further step was trained";
  }
  expect_good({"step-00000002"}, how + from, "uninterrupted");
}

}  // namespace
}  // namespace zr::test
