// The typed structs of the host's keys, through the path by which a job loads them.
#include "config/host_config.hpp"

#include <gmock/gmock.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <set>

#include "config/config.hpp"

namespace zr::host {

namespace {

using ::testing::ElementsAre;

config::JobConfig config_of(const std::vector<std::string>& overrides, int world = 0) {
  return config::Document::parse("", "job.toml", overrides).check({}, world);
}

bool is_of_schedule(const config::ConfigKey& key) { return key.table.rfind("schedule", 0) == 0; }

struct Member {
  std::string type, name;
};

// The members of each struct of host_config.hpp, with those of its base.
std::map<std::string, std::vector<Member>> structs_of_header() {
  std::ifstream in(ZR_SOURCE_DIR "/core/config/host_config.hpp");
  const std::regex begins("struct (\\w+)(?: : (\\w+))? \\{"),
      declares("^  (Setting<.*>|\\w+) ([a-z_0-9, ]+)(?:\\{\\})?;.*");
  std::map<std::string, std::vector<Member>> all;
  std::string current;
  for (std::string line; std::getline(in, line);) {
    std::smatch match;
    if (std::regex_match(line, match, begins)) {
      current = match[1];
      all[current] = match[2].matched ? all[match[2]] : std::vector<Member>{};
    } else if (std::regex_match(line, match, declares)) {
      std::istringstream names(match[2].str());
      for (std::string name; std::getline(names >> std::ws, name, ',');) all[current].push_back({match[1], name});
    }
  }
  return all;
}

// The paths of the settings below a struct.
void add_settings(const std::map<std::string, std::vector<Member>>& structs, const std::string& of,
                  const std::string& path, std::set<std::string>& to) {
  for (const Member& member : structs.at(of)) {
    if (member.type.starts_with("Setting<"))
      to.insert(path + member.name);
    else if (structs.contains(member.type))
      add_settings(structs, member.type, path + member.name + ".", to);
  }
}

}  // namespace

// A field without a row in keys.cpp would keep its initial value, whatever the file says.
TEST(HostConfigTest, EveryFieldHasAKey) {
  std::set<std::string> fields, keys;
  add_settings(structs_of_header(), "HostConfig", "", fields);
  for (const config::ConfigKey& key : config::host_keys()) keys.insert(key.path());
  EXPECT_GE(fields.size(), 60u);
  for (const std::string& field : fields) EXPECT_TRUE(keys.contains(field)) << field;
}

TEST(HostConfigTest, HasAValueForEveryChoiceOfEveryKey) {
  int tried = 0;
  for (const config::ConfigKey& key : config::host_keys())
    for (const std::string& choice : key.choices) {
      std::vector<std::string> overrides{key.path() + "=" + choice, "checkpoint.dir=c"};
      if (is_of_schedule(key) && key.name != "use") overrides.push_back("schedule.use=" + key.table.substr(9));
      if (key.path() == "gradients.reduce_dtype" && choice == "bf16") overrides.push_back("gradients.dtype=bf16");
      EXPECT_NO_THROW(config_of(overrides)) << key.path() << " = " << choice;
      ++tried;
    }
  EXPECT_GE(tried, 30);
}

TEST(HostConfigTest, HoldsDefaults) {
  const config::JobConfig c = config_of({});
  EXPECT_EQ(c.job().program.value, "");
  EXPECT_EQ(c.job().ranks, 1);
  EXPECT_EQ(c.job().threads, 0);
  EXPECT_EQ(c.job().name.value, "job");  // that of the file
  EXPECT_EQ(c.job().device.value, "cpu");
  EXPECT_EQ(c.job().device_library.value, "");
  EXPECT_FALSE(c.job().trace);
  EXPECT_EQ(c.job().runs.value, (std::filesystem::current_path() / "runs").string());
  EXPECT_EQ(c.train().steps, 100);
  EXPECT_EQ(c.train().seed, 0);
  EXPECT_EQ(c.train().dtype, ZR_F32);
  EXPECT_EQ(c.train().param_dtype, config::ParamDtypeRule::convert);
  EXPECT_EQ(c.train().global_batch, 1);
  EXPECT_EQ(c.train().micro_batch, 1);
  EXPECT_EQ(c.train().gradient_accumulation, 1);
  EXPECT_EQ(c.train().gradient_clipping, 0.0);
  EXPECT_EQ(c.train().nonfinite, config::NonFiniteRule::skip);
  EXPECT_EQ(c.train().max_skipped_steps, 50);
  EXPECT_EQ(c.train().buffers, config::BufferRule::rank0);
  EXPECT_TRUE(c.gradients().overlap);
  EXPECT_EQ(c.gradients().reduce, config::GradientReduction::each_micro_step);
  EXPECT_EQ(c.gradients().dtype, ZR_F32);
  EXPECT_EQ(c.gradients().reduce_dtype, ZR_NONE);
  EXPECT_EQ(c.fp16().loss_scale, 0.0);
  EXPECT_EQ(c.fp16().initial_scale_power, 16);
  EXPECT_EQ(c.fp16().loss_scale_window, 1000);
  EXPECT_EQ(c.fp16().hysteresis, 2);
  EXPECT_FALSE(c.fp16().consecutive_hysteresis);
  EXPECT_EQ(c.fp16().min_loss_scale, 1.0);
  EXPECT_EQ(c.memory().device_budget, 0);
  EXPECT_EQ(c.memory().host_budget, 0);
  EXPECT_EQ(c.optimizer().lr, 1e-3);
  EXPECT_EQ(c.schedule().use, config::ScheduleKind::constant);
  EXPECT_EQ(c.schedule().constant.warmup, 0);
  EXPECT_EQ(c.schedule().constant.warmup_from, -1);
  EXPECT_EQ(c.schedule().constant.warmup_type, config::WarmupType::linear);
  EXPECT_EQ(c.schedule().constant.start_ratio, 0.0);
  EXPECT_EQ(c.eval().every, 0);
  EXPECT_TRUE(c.communicator().share_weights);
  EXPECT_TRUE(c.communicator().exact);
  EXPECT_EQ(c.communicator().gradients, config::ValueForm::exact);
  EXPECT_EQ(c.communicator().weights, config::ValueForm::exact);
  EXPECT_EQ(c.communicator().timeout.value, std::chrono::minutes(5));
  EXPECT_EQ(c.checkpoint().dir.value, "");
  EXPECT_EQ(c.checkpoint().every, 0);
  EXPECT_EQ(c.checkpoint().keep, 0);
  EXPECT_FALSE(c.checkpoint().async);
  EXPECT_EQ(c.checkpoint().on_signal, config::OnSignal::end);
  EXPECT_FALSE(c.checkpoint().resume);
  EXPECT_FALSE(c.checkpoint().fallback);
  EXPECT_EQ(c.checkpoint().init.value, "");
  EXPECT_TRUE(c.checkpoint().strict);
  EXPECT_FALSE(c.checkpoint().convert);
  EXPECT_TRUE(c.offload().optimizer->on_device());
  EXPECT_TRUE(c.offload().gradients->on_device());
  EXPECT_TRUE(c.offload().parameters->on_device());
  EXPECT_TRUE(c.offload().activations->on_device());
  EXPECT_EQ(c.offload().activation_bytes, 65536);
  EXPECT_EQ(c.offload().device_fraction, 0.0);
  EXPECT_FALSE(c.offload().tiers->empty());
}

TEST(HostConfigTest, HoldsGivenValuesOfJobAndTrain) {
  const config::JobConfig c = config_of(
      {"job.program=gpt", "job.ranks=4", "job.threads=3", "job.name=n", "job.device=d:1", "job.device_library=/d.so",
       "job.trace=true", "job.runs=r", "train.steps=7", "train.seed=8", "train.dtype=bf16", "train.param_dtype=reject",
       "train.global_batch=48", "train.micro_batch=2", "train.gradient_clipping=0.5", "train.max_skipped_steps=9",
       "train.nonfinite=stop", "train.buffers=mean"});
  EXPECT_EQ(c.job().program.value, "gpt");
  EXPECT_EQ(c.job().ranks, 4);
  EXPECT_EQ(c.job().threads, 3);
  EXPECT_EQ(c.job().name.value, "n");
  EXPECT_EQ(c.job().device.value, "d:1");
  EXPECT_EQ(c.job().device_library.value, "/d.so");
  EXPECT_TRUE(c.job().trace);
  EXPECT_EQ(c.job().runs.value, (std::filesystem::current_path() / "r").string());
  EXPECT_EQ(c.train().steps, 7);
  EXPECT_EQ(c.train().seed, 8);
  EXPECT_EQ(c.train().dtype, ZR_BF16);
  EXPECT_EQ(c.train().param_dtype, config::ParamDtypeRule::reject);
  EXPECT_EQ(c.train().global_batch, 48);
  EXPECT_EQ(c.train().micro_batch, 2);
  EXPECT_EQ(c.train().gradient_accumulation, 6);  // derived
  EXPECT_EQ(c.train().gradient_accumulation.origin.text(), "derived");
  EXPECT_EQ(c.train().gradient_clipping, 0.5);
  EXPECT_EQ(c.train().nonfinite, config::NonFiniteRule::stop);
  EXPECT_EQ(c.train().max_skipped_steps, 9);
  EXPECT_EQ(c.train().buffers, config::BufferRule::mean);
  EXPECT_EQ(config_of({"train.dtype=fp16", "train.buffers=per_rank"}).train().dtype, ZR_F16);
  EXPECT_EQ(config_of({"train.buffers=per_rank"}).train().buffers, config::BufferRule::per_rank);
  EXPECT_EQ(config_of({"job.ranks=4"}, 2).job().ranks, 2);  // the launcher decides
}

TEST(HostConfigTest, HoldsGivenValuesOfGradientsAndFp16) {
  const config::JobConfig c = config_of({"gradients.overlap=false", "gradients.reduce=last_micro_step",
                                         "gradients.dtype=bf16", "gradients.reduce_dtype=bf16", "fp16.loss_scale=8",
                                         "fp16.initial_scale_power=3", "fp16.loss_scale_window=5", "fp16.hysteresis=6",
                                         "fp16.consecutive_hysteresis=true", "fp16.min_loss_scale=4"});
  EXPECT_FALSE(c.gradients().overlap);
  EXPECT_EQ(c.gradients().reduce, config::GradientReduction::last_micro_step);
  EXPECT_EQ(c.gradients().dtype, ZR_BF16);
  EXPECT_EQ(c.gradients().reduce_dtype, ZR_BF16);
  EXPECT_EQ(c.fp16().loss_scale, 8.0);
  EXPECT_EQ(c.fp16().initial_scale_power, 3);
  EXPECT_EQ(c.fp16().loss_scale_window, 5);
  EXPECT_EQ(c.fp16().hysteresis, 6);
  EXPECT_TRUE(c.fp16().consecutive_hysteresis);
  EXPECT_EQ(c.fp16().min_loss_scale, 4.0);
}

TEST(HostConfigTest, HoldsGivenValuesOfTheSmallTables) {
  const config::JobConfig c =
      config_of({"memory.device_budget=2GiB", "memory.host_budget=3GiB", "optimizer.lr=0.5", "eval.every=10",
                 "communicator.share_weights=false", "communicator.timeout=1.5s", "communicator.exact=false",
                 "communicator.gradients=int4", "communicator.weights=int8"});
  EXPECT_EQ(c.memory().device_budget, int64_t{2} << 30);
  EXPECT_EQ(c.memory().host_budget, int64_t{3} << 30);
  EXPECT_EQ(c.optimizer().lr, 0.5);
  EXPECT_EQ(c.eval().every, 10);
  EXPECT_FALSE(c.communicator().share_weights);
  EXPECT_FALSE(c.communicator().exact);
  EXPECT_EQ(c.communicator().gradients, config::ValueForm::int4);
  EXPECT_EQ(c.communicator().weights, config::ValueForm::int8);
  EXPECT_EQ(c.communicator().timeout.value, std::chrono::milliseconds(1500));
}

TEST(HostConfigTest, HoldsGivenValuesOfCheckpoint) {
  const config::JobConfig c =
      config_of({"checkpoint.dir=c", "checkpoint.every=5", "checkpoint.keep=2", "checkpoint.async=true",
                 "checkpoint.on_signal=save", "checkpoint.resume=true", "checkpoint.fallback=true", "checkpoint.init=w",
                 "checkpoint.strict=false", "checkpoint.convert=true"});
  EXPECT_EQ(c.checkpoint().dir.value, (std::filesystem::current_path() / "c").string());
  EXPECT_EQ(c.checkpoint().every, 5);
  EXPECT_EQ(c.checkpoint().keep, 2);
  EXPECT_TRUE(c.checkpoint().async);
  EXPECT_EQ(c.checkpoint().on_signal, config::OnSignal::save);
  EXPECT_TRUE(c.checkpoint().resume);
  EXPECT_TRUE(c.checkpoint().fallback);
  EXPECT_EQ(c.checkpoint().init.value, (std::filesystem::current_path() / "w").string());
  EXPECT_FALSE(c.checkpoint().strict);
  EXPECT_TRUE(c.checkpoint().convert);
}

TEST(HostConfigTest, HoldsGivenValuesOfOffload) {
  const config::JobConfig c = config_of(
      {"offload.optimizer=auto", "offload.gradients=x", "offload.parameters=/tmp/t.so", "offload.activations=y",
       "offload.activation_bytes=1KiB", "offload.device_fraction=0.25", "offload.tiers=near  far"});
  EXPECT_TRUE(c.offload().optimizer->automatic());
  EXPECT_FALSE(c.offload().optimizer->names_tier());
  EXPECT_TRUE(c.offload().gradients->names_tier());
  EXPECT_EQ(c.offload().gradients->text, "x");
  EXPECT_EQ(c.offload().parameters->text, "/tmp/t.so");
  EXPECT_EQ(c.offload().activations->text, "y");
  EXPECT_EQ(c.offload().activation_bytes, 1024);
  EXPECT_EQ(c.offload().device_fraction, 0.25);
  EXPECT_THAT(c.offload().tiers.value, ElementsAre("near", "far"));
}

TEST(HostConfigTest, HoldsTheChosenSchedule) {
  const auto schedule = [](const std::string& name, const std::vector<std::string>& keys) {
    std::vector<std::string> overrides{"schedule.use=" + name, "optimizer.lr=0.5", "train.steps=77"};
    for (const std::string& key : keys) overrides.push_back("schedule." + name + "." + key);
    return config_of(overrides).schedule();
  };
  EXPECT_EQ(schedule("constant", {"warmup=3"}).constant.warmup, 3);
  const auto linear = schedule("linear", {"warmup=4", "warmup_from=2", "warmup_type=log", "start_ratio=0.25",
                                          "decay_from=5", "decay_until=9", "final_ratio=0.5"});
  EXPECT_EQ(linear.use, config::ScheduleKind::linear);
  EXPECT_EQ(linear.linear.warmup, 4);
  EXPECT_EQ(linear.linear.warmup_from, 2);
  EXPECT_EQ(linear.linear.warmup_type, config::WarmupType::log);
  EXPECT_EQ(linear.linear.start_ratio, 0.25);
  EXPECT_EQ(linear.linear.decay_from, 5);
  EXPECT_EQ(linear.linear.decay_until, 9);
  EXPECT_EQ(linear.linear.final_ratio, 0.5);
  EXPECT_EQ(linear.cosine.warmup.key, "");  // of a table that is not chosen
  const auto cosine = schedule("cosine", {"warmup=6"});
  EXPECT_EQ(cosine.use, config::ScheduleKind::cosine);
  EXPECT_EQ(cosine.cosine.decay_from, 6);    // warmup
  EXPECT_EQ(cosine.cosine.decay_until, 77);  // train.steps
  const auto cycle = schedule("one_cycle", {"rise=0.5", "start_ratio=0.25"});
  EXPECT_EQ(cycle.use, config::ScheduleKind::one_cycle);
  EXPECT_EQ(cycle.one_cycle.rise, 0.5);
  EXPECT_EQ(cycle.one_cycle.start_ratio, 0.25);
  EXPECT_EQ(cycle.one_cycle.final_ratio, 4e-6);
  const auto range = schedule("range_test", {"min_lr=0.5", "step_size=6", "step_rate=2", "staircase=true"});
  EXPECT_EQ(range.use, config::ScheduleKind::range_test);
  EXPECT_EQ(range.range_test.min_lr, 0.5);
  EXPECT_EQ(range.range_test.step_size, 6);
  EXPECT_EQ(range.range_test.step_rate, 2.0);
  EXPECT_TRUE(range.range_test.staircase);
}

TEST(HostConfigTest, KeepsTheOriginOfEachValue) {
  const config::JobConfig c =
      config::Document::parse("[train]\nsteps = 5\n", "job.toml", {"train.seed=3"}).check({}, 1);
  EXPECT_EQ(c.train().steps.key, "train.steps");
  EXPECT_EQ(c.train().steps.written, "5");
  EXPECT_EQ(c.train().steps.origin.text(), "job.toml:2:9");
  EXPECT_TRUE(c.train().steps.given());
  EXPECT_EQ(c.train().seed.origin.text(), "command line");
  EXPECT_TRUE(c.train().seed.given());
  EXPECT_EQ(c.train().dtype.origin.text(), "default");
  EXPECT_FALSE(c.train().dtype.given());
}

TEST(DocumentTest, ReadsTheKeysThatFindAllOthers) {
  const config::Document document =
      config::Document::parse("[job]\nranks = 3\nprogram = \"gpt\"\n[offload]\noptimizer = \"auto\"\n[offload.far]\n",
                              "job.toml", {"offload.tiers=near far", "offload.activations=far"});
  EXPECT_EQ(document.timeout().value, std::chrono::minutes(5));
  EXPECT_FALSE(document.timeout().given());
  EXPECT_EQ(document.ranks(), 3);
  EXPECT_EQ(document.ranks().origin.text(), "job.toml:2:9");
  EXPECT_EQ(document.program().value, "gpt");
  EXPECT_THAT(document.tiers().value, ElementsAre("near", "far"));
  std::vector<std::string> choices;
  for (const auto& choice : document.tier_choices()) choices.push_back(choice.key + "=" + choice->text);
  EXPECT_THAT(choices, ElementsAre("offload.optimizer=auto", "offload.gradients=device", "offload.parameters=device",
                                   "offload.activations=far"));
  EXPECT_TRUE(document.has_table("offload", "far"));
  EXPECT_FALSE(document.has_table("offload", "near"));
}

}  // namespace zr::host
