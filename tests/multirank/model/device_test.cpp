// Training on a device: the simulated accelerator of tests/simulators/sim_device, whose operators have the bits of the
// CPU's, so that a run on it equals one on the CPU.
#include <gmock/gmock.h>

#include "multirank/model/device_engine_test.hpp"
#include "multirank/parity/features.hpp"
#include "multirank/parity/models.hpp"
#include "zr/parameters.hpp"

namespace {

using namespace engine_tests;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

// Weights are shared on the CPU alone.
const std::string kModel =
    " train.steps=4 parity.model=everything train.gradient_accumulation=2 communicator.share_weights=false";

// The training state of adamw is on the device, unless offload.gradients names a tier.
struct Job {
  std::string strategy;  // and further overrides
  int ranks;
};
const std::vector<Job> kJobs = {
    {"zero1", 2}, {"zero3", 2}, {"zero2", 1}, {"zero3 offload.optimizer=cpu offload.gradients=cpu", 2}};

// Without the line that says where the state is. Messages come first, because mpirun passes standard output and error
// on in any order.
std::string without_state_line(const std::string& output) {
  std::istringstream lines(output);
  std::string messages, rest;
  for (std::string line; std::getline(lines, line);)
    if (!line.starts_with("zeroth: job.device")) (line.starts_with("zeroth: ") ? messages : rest) += line + "\n";
  return messages + rest;
}

// What print() wrote: the lines before it depend on the order of execution.
std::string last_line(const std::string& output) {
  return output.substr(output.find_last_of('\n', output.size() - 2) + 1);
}

class DeviceTest : public DeviceEngineTest {
 protected:
  // The output of a job that must succeed.
  std::string output(int ranks, const zr::test::RankBody& body, const std::string& overrides) {
    const auto result = run(ranks, body, kModel + " " + overrides);
    EXPECT_EQ(result.code, 0) << overrides << "\n" << result.output;
    return without_state_line(result.output);
  }
};

// What rank 0 sees: the loss, the hash of the weights, and the running statistics of batch norm.
void print(Run& run) {
  const std::string hash = run.engine->weights_hash();
  const auto mean = run.engine->buffer("batch_norm.running_mean").to(torch::kCPU);
  if (run.engine->rank() != 0) return;
  std::cout.precision(17);
  std::cout << run.engine->last_loss() << " " << hash << " " << mean.sum().item<double>() << std::endl;
}

void step(Run& run) {
  for (const int64_t before = run.engine->step_index(); run.engine->step_index() == before;) run.micro_step();
}

RANK_BODY(trains_and_prints, Run) {
  run.build();
  run.train();
  EXPECT_EQ(run.engine->device(), run.model->named_parameters()["scalar"].device());
  for (const auto& buffer : run.model->buffers()) EXPECT_EQ(buffer.device(), run.engine->device());
  print(run);
}

TEST_F(DeviceTest, SLOW_HasTheBitsOfTheCpuUnderEveryStrategy) {
  for (const std::string strategy : {"zero0", "zero1", "zero3"})
    for (const std::string more : {"", " offload.optimizer=cpu", " train.dtype=bf16", " gradients.overlap=false"})
      for (const int ranks : {1, 2}) {
        const std::string overrides = "strategy=" + strategy + more;
        EXPECT_EQ(output(ranks, trains_and_prints, overrides + kDevice), output(ranks, trains_and_prints, overrides))
            << overrides << " on " << ranks;
      }
}

RANK_BODY(prints_device, Run) {
  run.build();
  std::cout << "rank " + std::to_string(run.engine->rank()) + " on " + run.engine->device().str() + "\n" << std::flush;
}

TEST_F(DeviceTest, RanksUseTheDeviceOfTheirLocalRank) {
  const std::string three = output(3, prints_device, "strategy=zero1" + kDevice);  // the node has two devices
  EXPECT_THAT(three, HasSubstr("rank 0 on sim:0"));
  EXPECT_THAT(three, HasSubstr("rank 1 on sim:1"));
  EXPECT_THAT(three, HasSubstr("rank 2 on sim:0"));
  EXPECT_THAT(output(2, prints_device, "strategy=zero1 job.device=sim:1 job.device_library=" + kSimLibrary),
              HasSubstr("rank 0 on sim:1"));
}

// A checkpoint does not depend on the device.
TEST_F(DeviceTest, SLOW_ResumesOnAnotherDevice) {
  int folders = 0;
  for (const auto& [strategy, ranks] : kJobs) {
    const std::string common = "strategy=" + strategy + " train.dtype=bf16";
    const std::string all = output(ranks, trains_and_prints, common + " train.steps=6");
    for (const bool first_on_device : {true, false}) {
      const std::string dir = " checkpoint.dir=" + (folder_ / std::to_string(++folders)).string();
      output(ranks, trains_and_prints, common + dir + " checkpoint.every=3" + (first_on_device ? kDevice : ""));
      const std::string resumed =
          output(ranks, trains_and_prints,
                 common + dir + " checkpoint.resume=true train.steps=6" + (first_on_device ? "" : kDevice));
      EXPECT_EQ(last_line(resumed), last_line(all))
          << strategy << (first_on_device ? " from the device" : " to the device");
    }
  }
}

RANK_BODY(writes_to_weights, Run) {
  run.build();
  const torch::Tensor twice = run.model->named_parameters()["twice.weight"];
  const auto write = [&] {
    {
      const auto scope = zr::gather(twice);
      const torch::NoGradGuard no_grad;
      twice.mul_(0.5);
      twice[0][0] = 2.0f;
    }
    const torch::Tensor value = run.engine->get("twice.weight");
    EXPECT_EQ(value[0][0].item<float>(), 2.0f);
    const auto scope = zr::gather(twice);
    EXPECT_TRUE(torch::equal(value, twice.detach().to(torch::kCPU, torch::kFloat)));
  };
  while (!run.engine->done()) {
    write();
    step(run);
  }
  run.engine->set("scalar", zr::TensorKind::value, torch::full({}, 3.0f).to(run.engine->device()));
  EXPECT_EQ(run.engine->get("scalar").item<float>(), 3.0f);
  const torch::Tensor scalar = run.model->named_parameters()["scalar"];
  {
    const auto scope = zr::gather(scalar);
    EXPECT_EQ(scalar.item<float>(), 3.0f);
  }
  print(run);
}

TEST_F(DeviceTest, WritesToWeightsReachTheMasters) {
  for (const auto& [strategy, ranks] : {Job{"zero0", 2}, {"zero2", 2}, {"zero3", 2}, {"zero0", 1}, {"zero3", 1}})
    for (const std::string dtype : {"fp32", "bf16"}) {
      const std::string overrides = "strategy=" + strategy + " train.dtype=" + dtype;
      EXPECT_EQ(output(ranks, writes_to_weights, overrides + kDevice), output(ranks, writes_to_weights, overrides))
          << overrides << " on " << ranks;
    }
}

// The values that operators on the device see.
torch::Tensor on_device(Run& run, const std::string& name) {
  const torch::Tensor parameter = run.model->named_parameters()[name];
  const auto scope = zr::gather(parameter);
  return parameter.detach().to(torch::kCPU, torch::kFloat);
}

RANK_BODY(sets_and_loads_frozen_parameters, Run) {
  run.build();
  const std::string name = "frozen.weight";
  const torch::Tensor half = torch::full_like(run.engine->get(name), 0.5f), quarter = half / 2;
  run.engine->set(name, zr::TensorKind::value, half);
  EXPECT_TRUE(torch::equal(run.engine->get(name), half));
  EXPECT_TRUE(torch::equal(on_device(run, name), half));
  const std::string saved = run.engine->save(run.program.text("checkpoint.dir"));
  run.engine->set(name, zr::TensorKind::value, quarter);
  EXPECT_TRUE(torch::equal(on_device(run, name), quarter));
  run.engine->load(saved);
  EXPECT_TRUE(torch::equal(on_device(run, name), half));
  run.train();
  print(run);
}

TEST_F(DeviceTest, SeesFrozenParametersThatAreSetOrLoaded) {
  const fs::path saved = folder_ / "frozen";
  for (const auto& [strategy, ranks] : kJobs)
    for (const std::string more : {"", " offload.optimizer=cpu train.dtype=bf16"}) {
      const std::string overrides = "strategy=" + strategy + more + " checkpoint.dir=" + saved.string();
      const std::string on_cpu = last_line(output(ranks, sets_and_loads_frozen_parameters, overrides));
      fs::remove_all(saved);
      EXPECT_EQ(last_line(output(ranks, sets_and_loads_frozen_parameters, overrides + kDevice)), on_cpu)
          << overrides << " on " << ranks;
      fs::remove_all(saved);
    }
}

RANK_BODY(evaluates_and_sets_buffers, Run) {
  run.build();
  while (!run.engine->done()) {
    step(run);
    double loss = 0;
    {
      const zr::Engine::Evaluation evaluation(*run.engine);
      run.model->eval();
      loss = run.model->loss(100, 0).item<double>();
      run.model->train();
    }
    const double mean = run.engine->mean(loss);
    if (run.engine->rank() == 0) std::cout << mean << "\n";
  }
  const torch::Tensor values = torch::linspace(0, 1, parity::kWidth);
  run.engine->set_buffer("batch_norm.running_mean", values);
  EXPECT_TRUE(torch::equal(run.engine->buffer("batch_norm.running_mean").to(torch::kCPU, torch::kFloat), values));
  const torch::Tensor on_device = torch::full({3}, static_cast<float>(run.engine->rank() + 1)).to(run.engine->device());
  EXPECT_EQ(run.engine->sum(on_device).device(), run.engine->device());
  EXPECT_EQ(run.engine->sum(on_device).to(torch::kCPU)[2].item<float>(), 3.0f);
  EXPECT_EQ(run.engine->all_gather(on_device).sizes(), (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(run.engine->broadcast(on_device, 1).to(torch::kCPU)[0].item<float>(), 2.0f);
  print(run);
}

TEST_F(DeviceTest, EvaluationAndBuffersAreThoseOfTheCpu) {
  for (const std::string buffers : {"rank0", "mean", "per_rank"}) {
    const std::string overrides = "strategy=zero3 train.buffers=" + buffers;
    EXPECT_EQ(output(2, evaluates_and_sets_buffers, overrides + kDevice),
              output(2, evaluates_and_sets_buffers, overrides))
        << overrides;
  }
}

RANK_BODY(releases_on_device, Run) {
  run.build();
  step(run);
  const torch::Tensor before = run.engine->get("twice.weight");
  const at::Device device = run.engine->device();
  run.program.text("job.name") == "master" ? run.engine->release(torch::kFloat) : run.engine->release();
  for (const auto& item : run.model->named_parameters()) {
    EXPECT_EQ(item.value().device(), device) << item.key();
    EXPECT_TRUE(item.value().detach().to(torch::kCPU).isfinite().all().item<bool>()) << item.key();
  }
  const torch::Tensor twice = run.model->named_parameters()["twice.weight"];
  EXPECT_TRUE(torch::equal(twice.detach().to(torch::kCPU), before.to(twice.scalar_type())));
  run.model->loss(5, 0).backward();  // plain autograd
  EXPECT_EQ(twice.grad().device(), device);
  run.model->zero_grad();
  run.engine = std::make_unique<zr::Engine>(run.program, *run.model);
  while (!run.engine->done()) step(run);
  print(run);
}

TEST_F(DeviceTest, ReleasedModelStaysOnTheDevice) {
  for (const auto& [strategy, ranks] : kJobs)
    for (const std::string more : {"", " train.dtype=bf16", " train.dtype=bf16 job.name=master"}) {
      const std::string overrides = "strategy=" + strategy + more;
      EXPECT_EQ(output(ranks, releases_on_device, overrides + kDevice), output(ranks, releases_on_device, overrides))
          << overrides << " on " << ranks;
    }
}

// Delays of the streams change nothing.
TEST_F(DeviceTest, DelaysOfStreamsChangeNothing) {
  for (const auto& [strategy, ranks] : kJobs) {
    const std::string overrides = "strategy=" + strategy + " offload.activations=cpu offload.activation_bytes=1B";
    const std::string plain = output(ranks, trains_and_prints, overrides);
    for (const int seed : {1, 2, 3}) {
      const auto result =
          launch(ranks, program(ranks, trains_and_prints, overrides + kModel + kDevice + " job.threads=1"),
                 "ZR_SIM_DELAY_US=200 ZR_SIM_SEED=" + std::to_string(seed));
      EXPECT_EQ(result.code, 0) << result.output;
      EXPECT_EQ(without_state_line(result.output), plain) << overrides << ", seed " << seed;
    }
  }
}

RANK_BODY(writes_through_data, Run) {
  run.build();
  torch::Tensor alias;
  while (!run.engine->done()) {
    step(run);
    run.model->named_parameters()["twice.weight"].data().clamp_(-0.1, 0.1);
    alias = run.model->named_parameters()["large.bias"].data();
    alias.mul_(0.5);
  }
  EXPECT_LE(run.engine->get("twice.weight").abs().max().item<float>(), 0.101f);  // rounded to bf16
  print(run);
}

TEST_F(DeviceTest, TakesOverWritesThroughData) {
  for (const int ranks : {1, 2})
    for (const std::string dtype : {"fp32", "bf16"}) {
      const std::string overrides = "strategy=zero2 train.dtype=" + dtype;
      EXPECT_EQ(output(ranks, writes_through_data, overrides + kDevice), output(ranks, writes_through_data, overrides))
          << overrides << " on " << ranks;
    }
}

// The hook of the loss throws before a gradient is computed, so the call has no effect.
RANK_BODY(repeats_a_failed_backward, Run) {
  run.build();
  for (bool fails = true; !run.engine->done(); fails = !fails) {
    const torch::Tensor loss = run.model->loss(run.engine->step_index(), run.engine->micro_index());
    if (fails) {
      const torch::Tensor scaled = loss * 1;
      scaled.register_hook([](const torch::Tensor&) { throw std::runtime_error("of the hook"); });
      EXPECT_THROW(run.engine->backward(scaled), std::runtime_error);
      continue;
    }
    run.engine->backward(loss);
    run.engine->step();
  }
  print(run);
}

// The gradients of other parameters have been computed before the hook throws: training cannot continue, on any device.
RANK_BODY(fails_after_the_first_gradient, Run) {
  run.build();
  step(run);
  const auto fails = [&](const auto& call) {
    try {
      call();
      ADD_FAILURE() << "did not throw";
    } catch (const std::exception& failure) {
      if (run.engine->rank() == 0) std::cout << failure.what() << "\n";
    }
  };
  torch::Tensor weight = run.model->named_parameters()["embedding.weight"];
  const unsigned hook = weight.register_hook([](const torch::Tensor&) { throw std::runtime_error("of the hook"); });
  const auto backward = [&] {
    run.engine->backward(run.model->loss(run.engine->step_index(), run.engine->micro_index()));
  };
  fails(backward);
  weight.remove_hook(hook);
  fails(backward);
}

TEST_F(DeviceTest, EndsTrainingAfterABackwardThatFailedHalfway) {
  const std::string overrides = "strategy=zero1";
  const std::string on_cpu = output(1, fails_after_the_first_gradient, overrides);
  EXPECT_THAT(on_cpu, HasSubstr("of the hook"));
  EXPECT_THAT(on_cpu, HasSubstr("the last engine.backward() ended with an exception"));
  EXPECT_EQ(output(1, fails_after_the_first_gradient, overrides + kDevice), on_cpu);
}

RANK_BODY(refreshes, Run) {
  run.build();
  step(run);
  run.model->named_parameters()["twice.bias"].requires_grad_(false);
  run.model->named_parameters()["frozen.weight"].requires_grad_(true);
  run.engine->refresh();
  EXPECT_EQ(run.model->named_parameters()["frozen.weight"].device(), run.engine->device());
  while (!run.engine->done()) step(run);
  print(run);
}

RANK_BODY(builds_without_memory, Run) {
  run.model = zr::deferred([&] { return parity::make("everything", 7); });
  run.engine = std::make_unique<zr::Engine>(run.program, *run.model);
  parity::device = run.engine->device();
  run.train();
  print(run);
}

TEST_F(DeviceTest, HasTheBitsOfTheCpuInUnusualCalls) {
  for (const zr::test::RankBody* body : {static_cast<const zr::test::RankBody*>(&repeats_a_failed_backward),
                                         static_cast<const zr::test::RankBody*>(&refreshes),
                                         static_cast<const zr::test::RankBody*>(&builds_without_memory)})
    for (const auto& [strategy, ranks] : kJobs) {
      const std::string overrides = "strategy=" + strategy + " gradients.reduce=last_micro_step";
      EXPECT_EQ(output(ranks, *body, overrides + kDevice), output(ranks, *body, overrides))
          << body->name() << overrides << " on " << ranks;
    }
}

// A model that is built on the device, with a buffer that is a part of a larger storage, and tensors without elements.
RANK_BODY(has_parts_and_empty_tensors, Run) {
  const auto on_device = torch::TensorOptions().device("sim:0");
  auto module = std::make_shared<torch::nn::Module>();
  const torch::Tensor weight = module->register_parameter("weight", torch::ones({3}, on_device));
  const torch::Tensor none = module->register_parameter("none", torch::ones({0}));
  const torch::Tensor all = torch::arange(12, torch::kFloat).to(on_device.device());
  const torch::Tensor part = module->register_buffer("part", all.narrow(0, 4, 4));
  const torch::Tensor empty = module->register_buffer("empty", torch::ones({0}));
  zr::Engine engine(run.program, *module);
  EXPECT_EQ(none.device(), engine.device());
  EXPECT_EQ(empty.device(), engine.device());
  EXPECT_TRUE(torch::equal(engine.buffer("part").to(torch::kCPU), torch::arange(4, 8).to(torch::kFloat)));
  engine.set_buffer("part", torch::full({4}, -1.0f));
  const torch::Tensor seen = all.to(torch::kCPU);
  EXPECT_EQ(seen[3].item<float>(), 3.0f);
  EXPECT_EQ(seen[4].item<float>(), -1.0f);
  EXPECT_EQ(seen[8].item<float>(), 8.0f);
  engine.backward((torch::cat({weight, none, empty}) * part.sum()).sum());
  engine.step();
  EXPECT_FALSE(torch::equal(engine.get("weight"), torch::ones({3})));
}

TEST_F(DeviceTest, AcceptsPartsOfStoragesAndEmptyTensors) {
  const auto result = run(1, has_parts_and_empty_tensors, "strategy=zero2 train.steps=1" + kDevice);
  EXPECT_EQ(result.code, 0) << result.output;
}

RANK_BODY(lists_loaded_backends, Run) {
  run.build();
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);)
    if (line.find("libtorch_cuda") != line.npos || line.find("libzr_sim_device") != line.npos)
      std::cout << "loaded: " << line << std::endl;
}

TEST_F(DeviceTest, BackendsAreLoadedOnlyForJobsThatNameThem) {
  EXPECT_THAT(output(1, lists_loaded_backends, "strategy=zero1"), Not(HasSubstr("loaded: ")));
  EXPECT_THAT(output(1, lists_loaded_backends, "strategy=zero1" + kDevice),
              AllOf(HasSubstr("libzr_sim_device"), Not(HasSubstr("libtorch_cuda"))));
}

}  // namespace
