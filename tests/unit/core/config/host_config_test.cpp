// The typed structs of the host's keys, through the path by which a job loads them.
#include "config/host_config.hpp"

#include <gmock/gmock.h>

#include <filesystem>
#include <set>

#include "config/config.hpp"

namespace zr::host {

namespace {

using ::testing::ElementsAre;
using ::testing::UnorderedElementsAreArray;

config::JobConfig config_of(const std::vector<std::string>& overrides, int world = 0) {
  return config::Document::parse("", "job.toml", overrides).check({}, world);
}

template <class... Settings>
void add_keys(std::set<std::string>& to, const Settings&... settings) {
  (to.insert(settings.key), ...);
}

// The keys of the fields of every struct except the schedule's.
std::set<std::string> keys_of_fields(const config::JobConfig& c) {
  std::set<std::string> keys;
  const auto& [program, ranks, threads, name, device, device_library, trace, runs] = c.job();
  add_keys(keys, program, ranks, threads, name, device, device_library, trace, runs);
  const auto& [steps, seed, dtype, param_dtype, global, micro, accumulation, clipping, nonfinite, skipped, buffers,
               keep_fp32, cast_buffers] = c.train();
  add_keys(keys, steps, seed, dtype, param_dtype, global, micro, accumulation, clipping, nonfinite, skipped, buffers,
           keep_fp32, cast_buffers);
  const auto& [overlap, reduce, gradients_dtype, reduce_dtype] = c.gradients();
  add_keys(keys, overlap, reduce, gradients_dtype, reduce_dtype);
  const auto& [scale, power, window, hysteresis, consecutive, least] = c.fp16();
  add_keys(keys, scale, power, window, hysteresis, consecutive, least);
  const auto& [device_budget, host_budget] = c.memory();
  add_keys(keys, device_budget, host_budget, c.optimizer().lr, c.eval().every);
  const auto& [share_weights, exact, gradient_form, weight_form, timeout] = c.communicator();
  add_keys(keys, share_weights, exact, gradient_form, weight_form, timeout);
  const auto& [dir, every, keep, async, on_signal, resume, fallback, init, strict, convert] = c.checkpoint();
  add_keys(keys, dir, every, keep, async, on_signal, resume, fallback, init, strict, convert);
  const auto& [optimizer, gradients, parameters, activations, early, speculate, bytes, fraction, tiers] = c.offload();
  add_keys(keys, optimizer, gradients, parameters, activations, early, speculate, bytes, fraction, tiers);
  return keys;
}

struct KeysOfSchedule {
  std::set<std::string> keys;
  void operator()(const config::ConstantSchedule& of) { add_keys(keys, of.warmup_steps); }
  void operator()(const config::DecaySchedule& of) { add_keys(keys, of.warmup_steps, of.final_ratio); }
  void operator()(const config::OneCycleSchedule& of) { add_keys(keys, of.rise, of.start_ratio, of.final_ratio); }
  void operator()(const config::RangeTestSchedule& of) {
    add_keys(keys, of.min_lr, of.step_size, of.step_rate, of.staircase);
  }
  void operator()(const config::WarmupSchedule& of) {
    add_keys(keys, of.warmup_min_lr, of.warmup_max_lr, of.warmup_num_steps, of.warmup_type);
    if (of.decays) add_keys(keys, of.total_num_steps);
  }
  void operator()(const config::WarmupCosineSchedule& of) {
    add_keys(keys, of.warmup_min_ratio, of.cos_min_ratio, of.warmup_num_steps, of.warmup_type, of.total_num_steps);
  }
};

std::vector<std::string> schedules() {
  for (const config::ConfigKey& key : config::host_keys())
    if (key.path() == "schedule.use") return key.choices;
  return {};
}

bool is_of_schedule(const config::ConfigKey& key) { return key.table.rfind("schedule", 0) == 0; }

}  // namespace

TEST(HostConfigTest, HasAFieldForEveryKeyOfTheHost) {
  std::vector<std::string> expected;
  for (const config::ConfigKey& key : config::host_keys())
    if (!key.table.empty() && !is_of_schedule(key)) expected.push_back(key.path());
  EXPECT_THAT(keys_of_fields(config_of({})), UnorderedElementsAreArray(expected));
}

TEST(HostConfigTest, HasAFieldForEveryKeyOfTheChosenSchedule) {
  ASSERT_GE(schedules().size(), 8u);
  for (const std::string& name : schedules()) {
    std::vector<std::string> expected;
    for (const config::ConfigKey& key : config::host_keys())
      if (key.table == "schedule." + name) expected.push_back(key.path());
    const config::JobConfig config = config_of({"schedule.use=" + name});
    KeysOfSchedule fields;
    std::visit(fields, config.schedule());
    EXPECT_THAT(fields.keys, UnorderedElementsAreArray(expected)) << name;
  }
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
  EXPECT_EQ(c.memory().device_budget_bytes, 0);
  EXPECT_EQ(c.memory().host_budget_bytes, 0);
  EXPECT_EQ(c.optimizer().lr, 1e-3);
  EXPECT_EQ(std::get<config::ConstantSchedule>(c.schedule()).warmup_steps, 0);
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
  EXPECT_EQ(c.memory().device_budget_bytes, int64_t{2} << 30);
  EXPECT_EQ(c.memory().host_budget_bytes, int64_t{3} << 30);
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
  EXPECT_EQ(std::get<config::ConstantSchedule>(schedule("constant", {"warmup=3"})).warmup_steps, 3);
  const auto linear = std::get<config::DecaySchedule>(schedule("linear", {"warmup=4", "final_ratio=0.5"}));
  EXPECT_FALSE(linear.cosine);
  EXPECT_EQ(linear.warmup_steps, 4);
  EXPECT_EQ(linear.final_ratio, 0.5);
  EXPECT_TRUE(std::get<config::DecaySchedule>(schedule("cosine", {})).cosine);
  const auto cycle = std::get<config::OneCycleSchedule>(schedule("one_cycle", {"rise=0.5", "start_ratio=0.25"}));
  EXPECT_EQ(cycle.rise, 0.5);
  EXPECT_EQ(cycle.start_ratio, 0.25);
  EXPECT_EQ(cycle.final_ratio, 4e-6);
  const auto range = std::get<config::RangeTestSchedule>(
      schedule("range_test", {"min_lr=0.5", "step_size=6", "step_rate=2", "staircase=true"}));
  EXPECT_EQ(range.min_lr, 0.5);
  EXPECT_EQ(range.step_size, 6);
  EXPECT_EQ(range.step_rate, 2.0);
  EXPECT_TRUE(range.staircase);
  const auto warmup =
      std::get<config::WarmupSchedule>(schedule("WarmupLR", {"warmup_min_lr=0.25", "warmup_num_steps=8"}));
  EXPECT_FALSE(warmup.decays);
  EXPECT_EQ(warmup.warmup_min_lr, 0.25);
  EXPECT_EQ(warmup.warmup_max_lr, 0.5);  // optimizer.lr
  EXPECT_EQ(warmup.warmup_num_steps, 8);
  EXPECT_EQ(warmup.warmup_type, config::WarmupType::log);
  const auto decay = std::get<config::WarmupSchedule>(schedule("WarmupDecayLR", {"warmup_type=linear"}));
  EXPECT_TRUE(decay.decays);
  EXPECT_EQ(decay.warmup_type, config::WarmupType::linear);
  EXPECT_EQ(decay.total_num_steps, 77);  // train.steps
  const auto cosine = std::get<config::WarmupCosineSchedule>(
      schedule("WarmupCosineLR", {"warmup_min_ratio=0.25", "cos_min_ratio=0.5", "total_num_steps=9"}));
  EXPECT_EQ(cosine.warmup_min_ratio, 0.25);
  EXPECT_EQ(cosine.cos_min_ratio, 0.5);
  EXPECT_EQ(cosine.warmup_num_steps, 1000);
  EXPECT_EQ(cosine.total_num_steps, 9);
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
