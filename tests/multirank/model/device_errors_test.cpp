// Errors of jobs on a device: what cannot be used, and what libtorch throws in the program. The simulated accelerator
// of tests/simulators/sim_device.
#include <gmock/gmock.h>

#include <filesystem>

#include "multirank/model/device_engine_test.hpp"

namespace {

using namespace engine_tests;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;

class DeviceErrorsTest : public DeviceEngineTest {};

RANK_BODY(calls_plain_backward, Run) {
  run.build();
  run.model->loss(0, 0).backward();
}

RANK_BODY(has_a_parameter_elsewhere, Run) {
  auto moved = std::make_shared<torch::nn::Module>();
  moved->register_parameter("w", torch::ones({2}, torch::TensorOptions().device("sim:1")));
  const zr::Engine engine(run.program, *moved);
}

RANK_BODY(exhausts_the_device, Run) {
  run.build();
  const torch::Tensor large = torch::empty({int64_t{1} << 40}, torch::TensorOptions().device(run.engine->device()));
}

// Such as a tensor in pinned memory, if the device is lost during its copy.
struct ThrowsInItsDestructor {
  static void check() { TORCH_CHECK(false, "CUDA error: device-side assert triggered"); }
  void (*const call)() = check;
  ~ThrowsInItsDestructor() { call(); }
};

RANK_BODY(throws_in_a_destructor, Run) {
  run.build();
  const ThrowsInItsDestructor throws;
  throw std::runtime_error("another problem");
}

RANK_BODY(has_an_input_on_the_cpu, Run) {
  run.build();
  const auto options = torch::TensorOptions().dtype(run.engine->dtype());
  const torch::Tensor weight = torch::ones({2, 2}, options.device(run.engine->device()));
  torch::nn::functional::linear(torch::ones({1, 2}, options), weight);
}

// What libtorch throws after an assertion of a CUDA kernel.
RANK_BODY(loses_the_device, Run) {
  run.build();
  TORCH_CHECK(false, "CUDA error: device-side assert triggered");
}

// A program that continues after a failure.
RANK_BODY(succeeds_after_a_failure, Run) {
  std::atexit([] { std::puts("an exit handler runs"); });
  run.build();
  EXPECT_EQ(zr::guarded([] { throw std::runtime_error("planted"); }), 1);
}

TEST_F(DeviceErrorsTest, ExitHandlersRunIfTheProgramSucceeds) {
  const auto done = run(1, succeeds_after_a_failure, "strategy=zero1" + kDevice);
  EXPECT_EQ(done.code, 0) << done.output;
  EXPECT_THAT(done.output, HasSubstr("an exit handler runs"));
}

TEST_F(DeviceErrorsTest, NameTheDeviceAndTheRemedy) {
  const auto says = [&](const zr::test::RankBody& body, const std::string& overrides, int code, const std::string& text,
                        const std::string& remedy = "") {
    const auto result = run(1, body, "strategy=zero1 " + overrides);
    EXPECT_EQ(result.code, code) << result.output;
    EXPECT_THAT(result.output, AllOf(HasSubstr(text), HasSubstr(remedy)));
  };
  const std::string library = " job.device_library=" + kSimLibrary;
  says(trains, "job.device=nonsense", 3,
       "job.device = \"nonsense\": this libtorch does not have a backend for 'nonsense' (",
       "libtorch_nonsense.so does not exist); use a libtorch that was built for it, or name the library with the "
       "backend in job.device_library\n");
  says(trains, "job.device=other" + library, 2,
       "job.device = \"other\": libtorch does not know a device of this name; use \"cpu\", \"cuda\" or "
       "\"cuda:<number>\", or name the library with the device's backend in job.device_library\n");
  says(trains, "job.device=sim:7" + library, 2,
       "job.device = \"sim:7\": this node has 2 such devices, numbered from 0; choose one of them, or "
       "leave out the number: each rank then uses the device of its local rank\n");
  says(trains, "job.device=sim job.device_library=/none/such.so", 3,
       "job.device = \"sim\": cannot load /none/such.so: ",
       "; correct job.device_library, the library with libtorch's backend for this device\n");
  says(trains, "job.device=sim job.device_library=such.so", 3,
       "job.device = \"sim\": cannot load " + (fs::current_path() / "such.so").string() + ": ");
  says(trains, "job.device=cpu:0", 2, "job.device: expected \"cpu\" without a number, found \"cpu:0\"");
  says(trains, "job.device_library=" + kSimLibrary, 2,
       "but job.device is \"cpu\"; set job.device to the name that the library");
  says(calls_plain_backward, kDevice, 2, "backward() ran outside engine.backward() and computed a gradient for",
       "; call engine.backward(loss) instead of loss.backward()\n");
  says(has_a_parameter_elsewhere, kDevice, 2,
       "parameter 'w' is on the device sim:1, but the engine trains on sim:0 (job.device); build the model on the CPU");
  says(exhausts_the_device, kDevice, 3, "out of memory",
       "raise job.ranks (now 1), set offload.optimizer and offload.gradients to a tier, or use a strategy that shards "
       "more; otherwise lower train.micro_batch (now 3)");
  says(has_an_input_on_the_cpu, kDevice, 1, "Expected all tensors to be on the same device",
       "; the engine keeps parameters on its device (job.device): move the inputs of the model there with "
       "x.to(engine.device())\n");
  says(throws_in_a_destructor, kDevice, 1,
       "zeroth: error: the program threw c10::Error: CUDA error: device-side assert triggered; an operator has "
       "rejected its input");
  says(loses_the_device, kDevice, 1,
       "CUDA error: device-side assert triggered; an operator has rejected its input, such as an index outside of an "
       "embedding, and the process has lost the device");
}

// Of the CUDA backend of this libtorch.
TEST_F(DeviceErrorsTest, SayWhyCudaCannotBeUsed) {
  if (std::filesystem::exists("/dev/nvidiactl")) GTEST_SKIP() << "this machine may have a GPU";
  const auto result = run(1, trains, "strategy=zero1 job.device=cuda");
  EXPECT_EQ(result.code, 3) << result.output;
  EXPECT_THAT(result.output, HasSubstr("job.device = \"cuda\": "));
  EXPECT_THAT(result.output, AnyOf(HasSubstr("; install the libraries that it needs, or set job.device = \"cpu\"\n"),
                                   HasSubstr("; use a libtorch that was built for it, or name the library with the "
                                             "backend in job.device_library\n"),
                                   HasSubstr("; check the driver, or set job.device = \"cpu\"\n")));
}

}  // namespace
