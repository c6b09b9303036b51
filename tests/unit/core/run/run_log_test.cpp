// The rows and the summary of a run, as text.
#include "run/run_log.hpp"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "base/process_exit.hpp"
#include "unit/core/one_rank.hpp"

namespace zr::testing {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

using namespace host;
using run::Phase;
using run::RunLog;
using run::StepRow;

class RunLogTest : public ::testing::Test {
 protected:
  config::JobConfig config(const std::vector<std::string>& more = {}) const {
    std::vector<std::string> all{"job.name=a", "train.steps=3", "job.runs=" + scratch_.path("runs")};
    all.insert(all.end(), more.begin(), more.end());
    return config::Document::parse("", "job.toml", all).check({}, 1);
  }
  std::string path(const std::string& name) const { return scratch_.path("runs/a/" + name); }
  std::string text_of(const std::string& name) const {
    std::ostringstream text;
    text << std::ifstream(path(name), std::ios::binary).rdbuf();
    return text.str();
  }
  Json summary_of(const std::string& run, const std::string& name) const {
    return Json::parse(text_of(run + "/summary.json")).at(name);
  }
  static StepRow step(int64_t index) { return {index, 0.25, 2, 0.001, 12, 40, 300, 4096, false, 0}; }
  // The row of step().
  static std::string row(int64_t index) {
    return R"({"step":)" + std::to_string(index) +
           R"(,"loss":0.25,"grad_norm":2.0,"lr":0.001,"tokens":12,"step_ms":40.0,"tokens_per_s":300.0,)"
           R"("communication_bytes":4096})"
           "\n";
  }
  const test::Scratch scratch_;
};

TEST_F(RunLogTest, WritesTheConfigurationAndARowPerStep) {
  RunLog log(config(), "", 2, 0);
  EXPECT_EQ(log.folder(), "");
  log.accept();
  EXPECT_EQ(log.folder(), path("1"));
  log.step(step(1), {});
  log.validation(1, 0.75);
  log.step(step(2), {});
  EXPECT_EQ(text_of("1/config.toml"), config().to_toml());
  EXPECT_EQ(text_of("1/metrics.jsonl"), row(1) + "{\"step\":1,\"val_loss\":0.75}\n" + row(2));
}

// As on a full disk: the rows are written when there is space again.
TEST_F(RunLogTest, KeepsRowsThatCannotBeWritten) {
  RunLog log(config(), "", 1, 0);
  log.accept();
  struct rlimit before {};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const struct rlimit small { 10, before.rlim_max };
  const auto handler = ::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  log.step(step(1), {});
  log.step(step(2), {});
  log.settle_rows();
  EXPECT_TRUE(has_unwritten_file());
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  log.step(step(3), {});
  ::signal(SIGXFSZ, handler);
  EXPECT_EQ(text_of("1/metrics.jsonl"), row(1) + row(2) + row(3));
}

TEST_F(RunLogTest, RowOfASkippedStepHasItsLossScaleAndNullForInfinity) {
  RunLog log(config(), "", 1, 0);
  log.accept();
  log.step({1, NAN, INFINITY, 1e-5, 0, 0.5, 0, 0, true, 65536}, {});
  EXPECT_EQ(text_of("1/metrics.jsonl"),
            R"({"step":1,"loss":null,"grad_norm":null,"lr":1e-05,"tokens":0,"step_ms":0.5,"tokens_per_s":0.0,)"
            R"("communication_bytes":0,"loss_scale":65536.0,"skipped":true})"
            "\n");
}

TEST_F(RunLogTest, NumbersOfRowsReadBackAsTheSameDoubles) {
  RunLog log(config(), "", 1, 0);
  log.accept();
  for (const double value : {0.1, 1.0 / 3, 2.225073858507201e-308, 5e-324, 9.5e15 + 0.5, 1.7976931348623157e308}) {
    log.validation(1, value);
    const std::string rows = text_of("1/metrics.jsonl");
    const std::size_t last = rows.rfind('{');
    EXPECT_EQ(Json::parse(rows.substr(last)).at("val_loss").get<double>(), value) << rows.substr(last);
  }
}

TEST_F(RunLogTest, SummaryHasTheTotalsOfTheRun) {
  RunLog log(config(), "", 2, 0);
  log.accept();
  log.step(step(1), {});
  log.step({2, 0.5, INFINITY, 0.001, 8, 60, 133, 0, true, 128}, {});
  log.validation(2, 1.5);
  for (const auto& [phase, seconds] : {std::pair{Phase::forward, 1.5},
                                       {Phase::backward, 2.5},
                                       {Phase::reduce, 0.5},
                                       {Phase::step_sync, 0.25},
                                       {Phase::optimizer, 0.5},
                                       {Phase::optimizer, 0.25},
                                       {Phase::gather, 0.125},
                                       {Phase::checkpoint, 3.0}})
    log.add(phase, seconds);
  log.add_waits(Phase::backward, 0.5, 0.25);
  log.add_waits(Phase::optimizer, 0, 1);  // more than the phase took: its own time is 0, not negative
  log.add_waits(Phase::checkpoint, 16, 16);
  log.record_save(1);
  log.record_save(2);
  log.record_failed_save();
  log.record_signal(SIGTERM);
  comm::CommVolume communication;
  communication.bytes[ZR_ALL_GATHER] = 100;
  communication.calls[ZR_ALL_GATHER] = 2;
  communication.calls[ZR_REDUCE_SCATTER] = 1;
  communication.control_bytes = 5;
  log.set_totals("0123456789abcdef", communication);
  log.set_tiers({{"cpu", Tier::host, 7, 8}, {"nvme", Tier::disk, 1024, 2048}});
  log.set_digest({11, 12, 13});
  Ledger ledger;
  ledger.plan(Tier::device, MemoryKind::weights, 4000);
  ledger.add(Tier::device, MemoryKind::weights, "weights", 4096);
  ledger.add(Tier::device, MemoryKind::weights, "weights", -4096);
  ledger.observe(Tier::device, MemoryKind::activations, "activations", 10, 70);
  ledger.add(Tier::disk, MemoryKind::optimizer, "exp_avg", 512);
  log.finish(ledger, {21, 22, 23, 24, 25, 26, 36, 27, 28, 29, 32, 0.033, 0.034, 0.035});
  EXPECT_EQ(text_of("1/summary.json"), R"({
  "steps": 2,
  "ranks": 2,
  "loss": 0.5,
  "val_loss": 1.5,
  "weights_hash": "0123456789abcdef",
  "tokens": 20,
  "tokens_per_s": 200.0,
  "skipped": 1,
  "loss_scale": 128.0,
  "stopped_by": "SIGTERM",
  "failed": false,
  "checkpoints": {
    "saved": 2,
    "failed": 1,
    "last_step": 2
  },
  "memory": {
    "device": {
      "weights": {
        "planned": 4000,
        "peak": 4096
      },
      "activations": {
        "planned": null,
        "peak": 70
      }
    },
    "disk": {
      "optimizer": {
        "planned": 0,
        "peak": 512
      }
    }
  },
  "device_peak_bytes": null,
  "communication_bytes": {
    "reduce_scatter": 0,
    "all_gather": 100,
    "control": 5
  },
  "overlap": {
    "collectives": 21,
    "early": 22,
    "norm_blocks": 23,
    "norm_blocks_early": 24,
    "disk_reads": 25,
    "disk_reads_ahead": 26,
    "gradients_early": 36,
    "states": 27,
    "states_early": 28,
    "updates_early": 29,
    "bytes_early": 32,
    "early_ms": {
      "update": 33.0,
      "disk_read": 34.0,
      "disk_write": 35.0
    }
  },
  "weight_digest": {
    "bytes": 11,
    "optimizer_bytes": 12,
    "cycles": 13
  },
  "tiers": {
    "cpu": {
      "read_bytes": 7,
      "written_bytes": 8
    },
    "nvme": {
      "read_bytes": 1024,
      "written_bytes": 2048
    }
  },
  "waits_ms": {
    "compute": 3250.0,
    "communication": 875.0,
    "disk_read": 500.0,
    "disk_write": 1250.0,
    "optimizer": 0.0
  },
  "time_ms": {
    "forward": 1500.0,
    "backward": 2500.0,
    "reduce": 500.0,
    "step_sync": 250.0,
    "optimizer": 750.0,
    "gather": 125.0,
    "checkpoint": 3000.0
  }
}
)");
}

TEST_F(RunLogTest, SummaryHasNullForUnknownTotals) {
  RunLog log(config(), "", 1, 0);
  log.accept();
  log.finish(Ledger(), {});
  EXPECT_EQ(summary_of("1", "steps"), 0);
  for (const char* name : {"loss", "val_loss", "weights_hash", "loss_scale", "stopped_by", "communication_bytes"})
    EXPECT_TRUE(summary_of("1", name).is_null()) << name;
  EXPECT_EQ(summary_of("1", "tokens_per_s"), 0);
}

TEST_F(RunLogTest, StepClearsTheHashAndTheCommunication) {
  RunLog log(config(), "", 1, 0);
  log.accept();
  log.step(step(1), {});
  log.set_totals("0123456789abcdef", {});
  log.finish(Ledger(), {});
  EXPECT_EQ(summary_of("1", "weights_hash"), "0123456789abcdef");
  EXPECT_EQ(summary_of("1", "communication_bytes"), Json({{"control", 0}}));
  log.step(step(2), {});
  log.finish(Ledger(), {});
  EXPECT_TRUE(summary_of("1", "weights_hash").is_null());
  EXPECT_TRUE(summary_of("1", "communication_bytes").is_null());
}

TEST_F(RunLogTest, ClearHashKeepsTheCommunication) {
  RunLog log(config(), "", 1, 0);
  log.accept();
  log.set_totals("0123456789abcdef", {});
  log.clear_hash();
  log.finish(Ledger(), {});
  EXPECT_TRUE(summary_of("1", "weights_hash").is_null());
  EXPECT_EQ(summary_of("1", "communication_bytes"), Json({{"control", 0}}));
}

TEST_F(RunLogTest, ResumedRunCopiesTheRowsUpToItsCheckpoint) {
  {
    RunLog first(config(), "", 1, 0);
    first.accept();
    first.step(step(1), {});
    first.step(step(2), {});
  }
  RunLog resumed(config({"checkpoint.resume=true", "checkpoint.dir=ck"}), "", 1, 0);
  resumed.resume(1);
  resumed.accept();
  EXPECT_EQ(resumed.folder(), path("2"));
  EXPECT_EQ(text_of("2/metrics.jsonl"), row(1));
  resumed.finish(Ledger(), {});
  EXPECT_EQ(summary_of("2", "steps"), 1) << "the step of the checkpoint";
  resumed.step(step(2), {});
  EXPECT_EQ(text_of("2/metrics.jsonl"), row(1) + row(2));
  EXPECT_EQ(text_of("1/metrics.jsonl"), row(1) + row(2)) << "the first run keeps its rows";
}

TEST_F(RunLogTest, RunThatLoadsAnotherCheckpointBeginsWithoutRows) {
  {
    RunLog first(config(), "", 1, 0);
    first.accept();
    first.step(step(1), {});
  }
  RunLog second(config(), "", 1, 0);
  second.resume(1);
  second.accept();
  EXPECT_EQ(text_of("2/metrics.jsonl"), "");
}

TEST_F(RunLogTest, ResumeOfACompletedRunCreatesNoFolderUntilItsFirstRow) {
  {
    RunLog first(config(), "", 1, 0);
    first.accept();
    first.step(step(3), {});
    first.finish(Ledger(), {});
  }
  RunLog resumed(config({"checkpoint.resume=true", "checkpoint.dir=ck"}), "", 1, 0);
  resumed.resume(3);
  resumed.accept();
  resumed.finish(Ledger(), {});
  EXPECT_EQ(resumed.folder(), "");
  EXPECT_FALSE(fs::exists(path("2")));
  resumed.validation(3, 0.5);
  EXPECT_EQ(resumed.folder(), path("2"));
  EXPECT_EQ(text_of("2/metrics.jsonl"), row(3) + "{\"step\":3,\"val_loss\":0.5}\n");
}

TEST_F(RunLogTest, ResumeOfACompletedRunWithoutSummaryCreatesAFolder) {
  {
    RunLog first(config(), "", 1, 0);
    first.accept();
    first.step(step(3), {});
  }
  RunLog resumed(config({"checkpoint.resume=true", "checkpoint.dir=ck"}), "", 1, 0);
  resumed.resume(3);
  resumed.accept();
  EXPECT_EQ(resumed.folder(), path("2"));
  EXPECT_EQ(text_of("2/metrics.jsonl"), row(3));
}

TEST_F(RunLogTest, OtherRanksWriteNothing) {
  RunLog log(config(), "", 2, 1);
  log.step(step(1), {});
  log.validation(1, 0.5);
  log.finish(Ledger(), {});
  EXPECT_EQ(log.folder(), "");
  EXPECT_FALSE(fs::exists(scratch_.path("runs")));
}

}  // namespace
}  // namespace zr::testing
