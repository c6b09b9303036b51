// Every key has an effect: the tests change every key of the host, of the plug-ins and of the gpt example in a small
// job and check that the job's results differ. A key without a row fails.
#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "cli/trainer.hpp"
#include "plugin/plugin.hpp"
#include "support/launch_job.hpp"
#include "support/scratch.hpp"
#include "support/shell.hpp"

namespace zr::test {
namespace {

using Json = nlohmann::json;
namespace fs = std::filesystem;

const std::string kBin = ZR_BUILD_DIR "/bin/", kTests = ZR_BUILD_DIR "/tests/";

// The files and output of a finished run.
struct Trained {
  std::string out;
  Json summary;
  std::vector<Json> rows;
};
Trained run_in(const fs::path& folder, const std::string& out = "") {
  Trained run{out, Json::parse(std::ifstream(folder / "summary.json"), nullptr, false), {}};
  std::ifstream rows(folder / "metrics.jsonl");
  for (std::string line; std::getline(rows, line);) run.rows.push_back(Json::parse(line));
  return run;
}

using Look = std::string (*)(const Trained&);
std::string column(const Trained& run, const char* name) {
  std::string all;
  for (const Json& row : run.rows)
    if (row.contains(name)) all += row[name].dump() + " ";
  return all;
}
std::string rates(const Trained& run) { return column(run, "lr"); }
std::string losses(const Trained& run) { return column(run, "loss"); }
std::string tokens(const Trained& run) { return column(run, "tokens"); }
std::string validations(const Trained& run) { return column(run, "val_loss"); }
std::string weights(const Trained& run) { return run.summary.at("weights_hash").dump(); }
// Activations vary by the rounding of the C library's allocator.
std::string memory(const Trained& run) {
  Json memory = run.summary.at("memory");
  memory.at("device").erase("activations");
  return memory.dump();
}
// Rounded to a quarter: recomputed blocks keep much less.
std::string activations(const Trained& run) {
  const double peak = run.summary.at("memory").at("device").at("activations").at("peak").get<double>();
  return std::to_string(std::lround(4 * std::log2(peak) / 2));
}
std::string communication(const Trained& run) { return run.summary.at("communication_bytes").dump(); }
std::string overlap(const Trained& run) {
  auto counts = run.summary.at("overlap");
  counts.erase("early_ms");  // times
  return counts.dump();
}
std::string steps(const Trained& run) { return run.summary.at("steps").dump(); }
std::string ranks(const Trained& run) { return run.summary.at("ranks").dump(); }
std::string scales(const Trained& run) { return column(run, "loss_scale"); }
std::string checkpoints(const Trained& run) { return run.summary.at("checkpoints").dump(); }
std::string printed(const Trained& run) { return run.out; }

// A key, two of its values, the result that must differ, and the other settings that the key needs to have an effect.
struct Row {
  std::string key, one, other;
  Look look;
  std::string with = "";
  std::string with_value(const std::string& value) const {
    return with + (with.empty() ? "" : " ") + key + "=" + value;
  }
};

const std::string kMuon =
    "optimizer=muon "
    "optimizer.groups=[{match=[\"*.bias\",\"*norm.*\",\"scalar\",\"embedding.weight\"],use=\"adamw\"}]";
const std::string kCopied = "strategy=zero3 communicator.share_weights=false",
                  kDisk = "offload.optimizer=nvme offload.nvme.path=.";

// Rank body trains_list of engine_test trains these on two ranks for six steps.
const std::vector<Row> kTrained{
    {"strategy", "zero0", "zero1", communication},
    {"optimizer", "adamw", "sgd", memory},
    {"communicator", "shm", "poor", memory},
    {"train.steps", "2", "3", steps},
    {"train.seed", "1", "2", losses, "parity.model=dropout"},
    {"train.dtype", "fp32", "bf16", memory},
    {"train.global_batch", "12", "24", tokens, "train.micro_batch=3"},
    {"train.micro_batch", "2", "3", tokens},
    {"train.gradient_accumulation", "1", "2", tokens},
    {"train.gradient_clipping", "0.0", "0.001", weights, "optimizer=sgd"},
    {"gradients.dtype", "fp32", "bf16", memory},
    {"gradients.reduce_dtype", "auto", "bf16", communication},
    {"fp16.loss_scale", "0.0", "64.0", scales, "train.dtype=fp16"},
    {"fp16.initial_scale_power", "5", "6", scales, "train.dtype=fp16"},
    {"fp16.loss_scale_window", "1", "3", scales, "train.dtype=fp16 fp16.initial_scale_power=4"},
    {"fp16.hysteresis", "1", "2", scales, "train.dtype=fp16 parity.overflows=true"},
    {"fp16.consecutive_hysteresis", "false", "true", scales, "train.dtype=fp16 parity.overflows=true"},
    {"fp16.min_loss_scale", "4.0", "8.0", scales,
     "train.dtype=fp16 parity.overflows=true fp16.hysteresis=1 fp16.initial_scale_power=4"},
    {"gradients.overlap", "true", "false", overlap},
    {"offload.activations", "device", "cpu", memory, "offload.activation_bytes=1KiB"},
    {"offload.activation_bytes", "1KiB", "16KiB", memory, "offload.activations=cpu"},
    {"gradients.reduce", "each_micro_step", "last_micro_step", communication, "train.gradient_accumulation=2"},
    {"gradients.divisor", "ranks_and_micro_steps", "ranks", losses, "train.gradient_accumulation=2"},
    {"optimizer.lr", "0.01", "0.02", rates},
    {"optimizer.groups", "[{match=\"*.weight\",lr_scale=0.5}]", "[{match=\"*.bias\",lr_scale=0.5}]", weights},
    {"optimizer.groups", "[{match=\"*.weight\",lr_scale=0.5}]", "[{match=\"*.weight\",lr_scale=0.25}]", weights},
    {"schedule.use", "constant", "linear", rates},
    {"schedule.constant.warmup", "0", "3", rates},
    {"schedule.linear.warmup", "0", "3", rates, "schedule.use=linear"},
    {"schedule.linear.final_ratio", "0.1", "0.2", rates, "schedule.use=linear"},
    {"schedule.cosine.warmup", "0", "3", rates, "schedule.use=cosine"},
    {"schedule.cosine.final_ratio", "0.1", "0.2", rates, "schedule.use=cosine"},
    {"schedule.one_cycle.rise", "0.4", "0.7", rates, "schedule.use=one_cycle"},
    {"schedule.one_cycle.start_ratio", "0.1", "0.2", rates, "schedule.use=one_cycle schedule.one_cycle.rise=0.5"},
    {"schedule.one_cycle.final_ratio", "0.1", "0.2", rates, "schedule.use=one_cycle"},
    {"schedule.range_test.min_lr", "0.1", "0.2", rates, "schedule.use=range_test"},
    {"schedule.range_test.step_size", "2", "3", rates, "schedule.use=range_test"},
    {"schedule.range_test.step_rate", "2.0", "3.0", rates, "schedule.use=range_test"},
    {"schedule.range_test.staircase", "false", "true", rates,
     "schedule.use=range_test schedule.range_test.step_size=2"},
    {"schedule.constant.warmup_from", "-1", "1", rates, "schedule.constant.warmup=4"},
    {"schedule.constant.warmup_type", "linear", "log", rates, "schedule.constant.warmup=4"},
    {"schedule.constant.start_ratio", "0.0", "0.5", rates, "schedule.constant.warmup=4"},
    {"schedule.linear.warmup_from", "-1", "1", rates, "schedule.use=linear schedule.linear.warmup=4"},
    {"schedule.linear.warmup_type", "linear", "log", rates, "schedule.use=linear schedule.linear.warmup=4"},
    {"schedule.linear.start_ratio", "0.0", "0.5", rates, "schedule.use=linear schedule.linear.warmup=4"},
    {"schedule.cosine.warmup_from", "-1", "1", rates, "schedule.use=cosine schedule.cosine.warmup=4"},
    {"schedule.cosine.warmup_type", "linear", "log", rates, "schedule.use=cosine schedule.cosine.warmup=4"},
    {"schedule.cosine.start_ratio", "0.0", "0.5", rates, "schedule.use=cosine schedule.cosine.warmup=4"},
    {"schedule.linear.decay_from", "0", "2", rates, "schedule.use=linear"},
    {"schedule.linear.decay_until", "6", "9", rates, "schedule.use=linear"},
    {"schedule.cosine.decay_from", "0", "2", rates, "schedule.use=cosine"},
    {"schedule.cosine.decay_until", "6", "9", rates, "schedule.use=cosine"},
    {"strategy.zero0.bucket_bytes", "64KiB", "1MiB", overlap, "strategy=zero0"},
    {"strategy.zero1.bucket_bytes", "64KiB", "1MiB", overlap, "strategy=zero1"},
    {"strategy.zero2.bucket_bytes", "64KiB", "1MiB", overlap, "strategy=zero2"},
    {"communicator.share_weights", "true", "false", communication, "strategy=zero1"},
    {"strategy.zero3.bucket_bytes", "64KiB", "1MiB", overlap, kCopied + " strategy.zero3.persistence_threshold=0"},
    {"strategy.zero3.prefetch_bytes", "0B", "1MiB", memory, kCopied + " strategy.zero3.persistence_threshold=0"},
    {"strategy.zero3.persistence_threshold", "0", "100000", memory, kCopied},
    {"strategy.zero3.max_live_bytes", "0B", "1GiB", memory, kCopied + " strategy.zero3.persistence_threshold=0"},
    {"strategy.zero3.max_reuse_bytes", "0B", "1GiB", communication,
     kCopied + " strategy.zero3.persistence_threshold=0"},
    {"communicator.shm.staging_bytes", "1MiB", "2MiB", memory},
    {"optimizer.adamw.beta1", "0.9", "0.8", weights},
    {"optimizer.adamw.beta2", "0.9", "0.8", weights},
    {"optimizer.adamw.eps", "1e-8", "1e-2", weights},
    {"optimizer.adamw.weight_decay", "0.0", "0.1", weights},
    {"optimizer.adafactor.beta2_decay", "-0.8", "-0.5", weights, "optimizer=adafactor"},
    {"optimizer.adafactor.eps1", "1e-7", "1e-1", weights, "optimizer=adafactor"},
    {"optimizer.adafactor.eps2", "1e-3", "10.0", weights, "optimizer=adafactor"},
    {"optimizer.adafactor.clip_threshold", "0.1", "1.0", weights, "optimizer=adafactor"},
    {"optimizer.adafactor.weight_decay", "0.0", "0.1", weights, "optimizer=adafactor"},
    {"optimizer.onebit_adam.beta1", "0.9", "0.8", weights, "optimizer=onebit_adam strategy=zero1"},
    {"optimizer.onebit_adam.beta2", "0.9", "0.8", weights, "optimizer=onebit_adam strategy=zero1"},
    {"optimizer.onebit_adam.eps", "1e-8", "1e-2", weights, "optimizer=onebit_adam strategy=zero1"},
    {"optimizer.onebit_adam.weight_decay", "0.0", "0.1", weights, "optimizer=onebit_adam strategy=zero1"},
    {"optimizer.onebit_adam.freeze_step", "2", "3", weights, "optimizer=onebit_adam strategy=zero1"},
    {"optimizer.adamw8bit.beta1", "0.9", "0.8", weights, "optimizer=adamw8bit"},
    {"optimizer.adamw8bit.beta2", "0.9", "0.8", weights, "optimizer=adamw8bit"},
    {"optimizer.adamw8bit.eps", "1e-8", "1e-2", weights, "optimizer=adamw8bit"},
    {"optimizer.adamw8bit.weight_decay", "0.0", "0.1", weights, "optimizer=adamw8bit"},
    {"optimizer.adamw8bit.min_8bit_elements", "100", "1000000", memory, "optimizer=adamw8bit"},
    {"optimizer.lamb.beta1", "0.9", "0.8", weights, "optimizer=lamb"},
    {"optimizer.lamb.beta2", "0.9", "0.8", weights, "optimizer=lamb"},
    {"optimizer.lamb.eps", "1e-6", "1e-2", weights, "optimizer=lamb"},
    {"optimizer.lamb.weight_decay", "0.0", "0.1", weights, "optimizer=lamb"},
    {"optimizer.lamb.min_trust_ratio", "0.0", "5.0", weights, "optimizer=lamb"},
    {"optimizer.lamb.max_trust_ratio", "0.02", "10.0", weights, "optimizer=lamb"},
    {"optimizer.lamb.adapt", "true", "false", weights, "optimizer=lamb"},
    {"optimizer.muon.momentum", "0.5", "0.9", weights, kMuon},
    {"optimizer.muon.nesterov", "true", "false", weights, kMuon},
    {"optimizer.muon.weight_decay", "0.0", "0.1", weights, kMuon},
    {"optimizer.muon.eps", "1e-7", "1.0", weights, kMuon},
    {"optimizer.muon.adjust_lr", "original", "match_rms_adamw", weights, kMuon},
    {"optimizer.muon.iterations", "1", "5", weights, kMuon},
    {"optimizer.muon.precision", "fp32", "bf16", weights, kMuon},
    {"optimizer.sgd.momentum", "0.5", "0.9", weights, "optimizer=sgd"},
    {"optimizer.sgd.dampening", "0.0", "0.5", weights, "optimizer=sgd optimizer.sgd.nesterov=false"},
    {"optimizer.sgd.nesterov", "false", "true", weights, "optimizer=sgd"},
    {"optimizer.sgd.weight_decay", "0.0", "0.1", weights, "optimizer=sgd"},
    {"checkpoint.every", "2", "3", checkpoints, "checkpoint.dir=every"},
    {"checkpoint.async", "false", "true", memory, "checkpoint.dir=async checkpoint.every=2"},
    {"offload.optimizer", "device", "cpu", memory},
    {"offload.gradients", "device", "cpu", memory, "strategy=zero2"},
    {"offload.parameters", "device", "cpu", memory, kCopied + " strategy.zero3.persistence_threshold=0"},
    {"offload.overlap", "true", "false", overlap, "offload.optimizer=cpu train.nonfinite=stop"},
    {"train.nonfinite", "skip", "stop", overlap, "offload.optimizer=cpu"},
    {"offload.device_fraction", "0.25", "0.75", memory, "offload.optimizer=cpu"},
    {"offload.nvme.checksum", "true", "false", memory, kDisk},
    {"offload.nvme.block_bytes", "4KiB", "32KiB", memory, kDisk + " offload.nvme.depth=1"},
    {"offload.nvme.depth", "1", "4", memory, kDisk + " offload.nvme.block_bytes=8KiB"},
};

// The gpt example trains these on one rank.
const std::vector<Row> kGpt{
    {"model.layers", "1", "2", memory},
    {"model.width", "16", "32", memory},
    {"model.heads", "2", "4", losses},
    {"model.context", "8", "16", memory},
    {"model.dropout", "0.0", "0.5", losses},
    {"model.recompute", "false", "true", activations, "model.layers=8"},
    {"data.text", "a.txt", "b.txt", losses},
    {"sample.length", "0", "30", printed},
    {"sample.temperature", "0.1", "10.0", printed, "sample.length=30"},
    {"eval.every", "0", "2", validations},
};

// Each of these keys has its own test, below or in the named files.
const std::set<std::string> kApart{
    "job.program", "job.ranks", "job.threads", "job.name", "job.runs", "train.max_skipped_steps",
    "communicator.timeout", "memory.device_budget",
    "train.cast_buffers",  // tests/multirank/engine/buffer_types_test.cpp
    "train.keep_fp32",     // tests/multirank/engine/kept_parameters_test.cpp
    "train.param_dtype",   // tests/multirank/engine/boundary_test.cpp
    // Tested in tests/multirank/offload/ and tests/unit/plugins/offload_*.cpp.
    "memory.host_budget", "job.trace", "offload.tiers", "offload.activations", "offload.nvme.path",
    "offload.nvme.engine", "offload.nvme.direct", "offload.cpu.pin",
    // Tested in tests/multirank/checkpoint/.
    "checkpoint.dir", "checkpoint.keep", "checkpoint.on_signal", "checkpoint.resume", "checkpoint.fallback",
    "checkpoint.init", "checkpoint.strict", "checkpoint.convert", "checkpoint.rename",
    // Tested in tests/multirank/model/device_test.cpp.
    "job.device", "job.device_library",
    // Tested in tests/multirank/comm/mpi_*_test.cpp.
    "strategy.zero3.shard_within", "communicator.exact", "communicator.gradients", "communicator.weights",
    "communicator.mpi.hierarchy", "communicator.mpi.hierarchy_min_bytes", "communicator.mpi.staging_bytes",
    // Tested in tests/multirank/engine/buffers_test.cpp.
    "train.buffers"};

void expect_difference(const Row& row, const Trained& one, const Trained& other, const Trained& one_again) {
  EXPECT_NE(row.look(one), row.look(other))
      << row.key << " = " << row.one << " or " << row.other << " makes no difference";
  EXPECT_EQ(row.look(one), row.look(one_again)) << row.key << ": the result differs between identical runs";
}

class KeysTest : public ::testing::Test {
 protected:
  std::string zeroth(const std::string& arguments) const {
    return "cd " + scratch_.folder().string() + " && ZR_PLUGIN_PATH=" + kTests + "plugins " + kBin + "zeroth " +
           arguments;
  }
  std::string quickstart(const std::string& overrides) const {
    return "train " ZR_SOURCE_DIR "/examples/quickstart/quickstart.toml train.steps=3 " + overrides;
  }
  fs::path runs(const std::string& name) const { return scratch_.folder() / "runs" / name; }
  void launch_list(const std::vector<std::string>& lines) const {
    std::string list;
    for (const std::string& line : lines) list += line + "\n";
    const auto done = zr::testing::shell("TRAINS_LIST=" + scratch_.write("list", list) + "; export TRAINS_LIST; " +
                                         zeroth("launch -n 2 -- " + kTests +
                                                "engine_test --rank trains_list " ZR_SOURCE_DIR
                                                "/tests/multirank/parity/parity.toml strategy=zero1 train.steps=6"));
    ASSERT_EQ(done.code, 0) << done.output;
  }
  const Scratch scratch_;
};

}  // namespace

TEST(KeysTable, HasExactlyOneRowForEveryKey) {
  std::set<std::string> there{"optimizer.groups", "checkpoint.rename"}, tested = kApart;
  for (const host::config::ConfigKey& key : host::config::host_keys())
    there.insert(key.table == "schedule" ? "schedule.use" : key.path());
  for (const host::plugin::PluginValidation& plugin : host::plugin::Registry({ZR_BUILD_DIR "/plugins"}).list()) {
    ASSERT_TRUE(plugin.accepted) << plugin.file << ": " << plugin.reason;
    for (const host::plugin::Component& one : plugin.components)
      for (const host::config::ConfigKey& key : host::config::keys_of(
               one.table->keys, one.table->n_keys, std::string(host::plugin::role_of(one)) + "." + one.table->id))
        there.insert(key.path());
  }
  for (const host::config::ConfigKey& key : host::cli::query_keys(kBin + "gpt", "gpt.toml")) there.insert(key.path());
  for (const auto* rows : {&kTrained, &kGpt})
    for (const Row& row : *rows) tested.insert(row.key);
  std::vector<std::string> silent, gone;
  std::set_difference(there.begin(), there.end(), tested.begin(), tested.end(), std::back_inserter(silent));
  std::set_difference(tested.begin(), tested.end(), there.begin(), there.end(), std::back_inserter(gone));
  EXPECT_EQ(silent, std::vector<std::string>{}) << "keys without a row: add a row with the result that the key changes";
  EXPECT_EQ(gone, std::vector<std::string>{}) << "rows without a key";
}

TEST_F(KeysTest, EngineAndPluginKeysChangeTheRun) {
  std::vector<std::string> lines;
  for (std::size_t i = 0; i < kTrained.size(); ++i)
    for (const auto& [name, value] :
         {std::pair{"a", kTrained[i].one}, {"b", kTrained[i].other}, {"c", kTrained[i].one}})
      lines.push_back(kTrained[i].with_value(value) + " job.name=" + std::to_string(i) + name);
  launch_list(lines);
  for (std::size_t i = 0; i < kTrained.size(); ++i) {
    const std::string name = std::to_string(i);
    expect_difference(kTrained[i], run_in(runs(name + "a")), run_in(runs(name + "b")), run_in(runs(name + "c")));
  }
}

TEST_F(KeysTest, SLOW_ExampleKeysChangeTheRun) {
  std::string text;
  while (text.size() < 20000) text += "to be or not to be, that is the question " + std::to_string(text.size()) + "\n";
  scratch_.write("a.txt", text);
  scratch_.write("b.txt", std::string(20000, 'b') + text);
  scratch_.write("gpt.toml",
                 "[job]\nprogram = \"gpt\"\nthreads = 1\n[model]\nlayers = 1\nwidth = 16\nheads = 2\ncontext = 8\n"
                 "[train]\nsteps = 4\nmicro_batch = 2\n[data]\ntext = \"a.txt\"\n[sample]\nlength = 0\n");
  int number = 0;
  const auto trained = [&](const std::string& overrides) {
    const std::string name = "run" + std::to_string(++number);
    const auto done =
        zr::testing::shell("export ZR_PROGRESS=off; " +
                           zeroth("launch -n 1 -- " + kBin + "gpt gpt.toml job.name=" + name + " " + overrides));
    EXPECT_EQ(done.code, 0) << done.output;
    return run_in(runs(name), done.output);
  };
  for (const Row& row : kGpt) {
    const std::string one = row.with_value(row.one), other = row.with_value(row.other);
    expect_difference(row, trained(one), trained(other), trained(one));
  }
}

TEST_F(KeysTest, JobKeysChooseTheRunFolder) {
  launch_list({"job.name=first", "job.name=second", "job.name=first job.runs=elsewhere"});
  for (const char* folder : {"runs/first", "runs/second", "elsewhere/first"})
    EXPECT_TRUE(fs::exists(scratch_.folder() / folder / "summary.json")) << folder;
}

TEST_F(KeysTest, JobKeysChooseTheProgramAndTheNumberOfRanks) {
  for (const char* count : {"1", "2"}) {
    const auto done = zr::testing::shell(zeroth(quickstart(std::string("job.name=") + count + " job.ranks=" + count)));
    EXPECT_EQ(done.code, 0) << done.output;
    EXPECT_EQ(ranks(run_in(runs(count))), count);
  }
  const auto plan = [&](const std::string& program) {
    const auto done =
        zr::testing::shell(zeroth("plan " ZR_SOURCE_DIR "/examples/quickstart/quickstart.toml job.program=" + program));
    EXPECT_EQ(done.code, 0) << done.output;
    return done.output;
  };
  EXPECT_NE(plan("quickstart"), plan("gpt"));
}

int threads_of(pid_t pid) {
  std::ifstream status("/proc/" + std::to_string(pid) + "/status");
  for (std::string word; status >> word;)
    if (word == "Threads:") return status >> word, std::stoi(word);
  return 0;
}

TEST_F(KeysTest, JobThreadsSetsTheThreadsOfARank) {
  std::map<std::string, int> seen;
  for (const std::string threads : {"1", "5"}) {
    Scene scene;
    Job job(scene, {kBin + "zeroth", "train", ZR_SOURCE_DIR "/examples/quickstart/quickstart.toml", "job.ranks=1",
                    "train.steps=100000", "job.threads=" + threads, "job.name=" + threads,
                    "job.runs=" + (scratch_.folder() / "runs").string()});
    ASSERT_TRUE(eventually([&] { return run_in(runs(threads)).rows.size() > 20; })) << job.err();
    seen[threads] = threads_of(ranks_of(job.pid())[0]);
    kill(job.pid(), SIGTERM);
    job.wait();
  }
  EXPECT_GE(seen["5"], seen["1"] + 4);
}

TEST_F(KeysTest, MaxSkippedStepsLimitsTheSkippedSteps) {
  std::map<std::string, std::size_t> seen;
  for (const std::string skips : {"2", "4"}) {
    const auto done = zr::testing::shell(zeroth(
        "launch -n 2 -- " + kTests + "engine_test --rank never_finite " ZR_SOURCE_DIR "/tests/multirank/parity/" +
        "parity.toml train.steps=50 job.name=" + skips + " train.max_skipped_steps=" + skips));
    EXPECT_EQ(done.code, 2) << done.output;
    seen[skips] = run_in(runs(skips)).rows.size();
  }
  EXPECT_EQ(seen["4"], seen["2"] + 2);
}

TEST_F(KeysTest, DeviceBudgetLimitsTheMemoryOfARank) {
  for (const std::string budget : {"64KiB", "1GiB"}) {
    const auto done = zr::testing::shell(zeroth(
        "launch -n 2 -- " + kTests + "engine_test --rank trains " ZR_SOURCE_DIR "/tests/multirank/parity/parity.toml " +
        "train.steps=2 job.name=" + budget + " memory.device_budget=" + budget));
    EXPECT_EQ(done.code, budget == "1GiB" ? 0 : 2) << done.output;
  }
}

TEST_F(KeysTest, CommunicatorTimeoutLimitsHowLongARankWaits) {
  for (const std::string patience : {"500ms", "5min"}) {
    Scene scene;
    Job job(scene, {kBin + "zeroth", "train", ZR_SOURCE_DIR "/examples/quickstart/quickstart.toml", "train.steps=1000",
                    "communicator.timeout=" + patience, "job.name=" + patience,
                    "job.runs=" + (scratch_.folder() / "runs").string()});
    ASSERT_TRUE(eventually([&] {
      return fs::exists(runs(patience) / "metrics.jsonl") && !run_in(runs(patience)).rows.empty();
    })) << job.err();
    const pid_t stopped = ranks_of(job.pid())[1];
    ASSERT_GT(stopped, 0);
    kill(stopped, SIGSTOP);
    std::this_thread::sleep_for(milliseconds(1500));
    kill(stopped, SIGCONT);
    EXPECT_EQ(job.wait(milliseconds(30000)), patience == "5min" ? 0 : 4) << job.err();
  }
}

}  // namespace zr::test
