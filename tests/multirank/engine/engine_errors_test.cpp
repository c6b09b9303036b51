// What zr::Engine rejects: programs, plug-ins and disks.
#include "multirank/parity/features.hpp"
#include "support/engine_test.hpp"

namespace {

using namespace engine_tests;

// A block that is recomputed in backward by a nested backward, as activation checkpointing does. Its weight is also
// used outside the block.
struct Again : torch::autograd::Function<Again> {
  static torch::Tensor forward(torch::autograd::AutogradContext* ctx, const torch::Tensor& x, const torch::Tensor& w) {
    ctx->save_for_backward({x, w});
    return torch::linear(x, w);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list gradient) {
    const auto saved = ctx->get_saved_variables();
    const torch::AutoGradMode on(true);
    torch::Tensor x = saved[0].detach().requires_grad_();
    torch::autograd::backward({torch::linear(x, saved[1])}, {gradient[0]});
    return {x.grad(), torch::Tensor()};
  }
};

struct Nested : parity::Model {
  Nested() { line = register_module("line", torch::nn::Linear(torch::nn::LinearOptions(8, 8).bias(false))); }
  torch::Tensor loss(int64_t step, int64_t m) override {
    const auto x = parity::draw(step, m, 9, {parity::kSamples, 8}).to(torch::kFloat);
    return Again::apply(torch::tanh(line(x)), line->weight).square().mean();
  }
  torch::nn::Linear line{nullptr};
};

RANK_BODY(backward_in_backward, Run) {
  torch::manual_seed(7);
  const auto nested = std::make_shared<Nested>();
  run.model = nested;
  zr::Engine engine(run.program, *run.model);
  const auto weight = engine.get("line.weight").clone().requires_grad_();
  const auto x = parity::draw(0, 0, 9, {parity::kSamples, 8}).to(torch::kFloat);
  torch::linear(torch::tanh(torch::linear(x, weight)), weight).square().mean().backward();
  engine.backward(run.model->loss(0, 0));
  engine.step();
  EXPECT_TRUE(torch::allclose(engine.get("line.weight", zr::TensorKind::gradient), weight.grad(), 1e-5, 1e-7))
      << "the gradient is the sum over both uses of the weight";
}

TEST_F(EngineTest, NestedBackwardRequiresOverlapOff) {
  const Result rejected = run(2, backward_in_backward);
  // mpirun passes the code of the first rank to end on, which may be one that has noticed the end of the other.
  EXPECT_TRUE(rejected.code == 2 || (zr::test::jobs_run_on_hosts() && rejected.code == 4)) << rejected.output;
  EXPECT_NE(rejected.output.find("'line.weight' received a second gradient in one backward after its first was handed "
                                 "to the strategy: a backward() ran inside this backward; set gradients.overlap = "
                                 "false"),
            std::string::npos)
      << rejected.output;
  const Result waits = run(1, backward_in_backward, "gradients.overlap=false");
  EXPECT_EQ(waits.code, 0) << waits.output;
}

RANK_BODY(prints_threads, Run) {
  run.build();
  if (run.engine->rank() == 0) std::cout << "threads " << at::get_num_threads() << std::endl;
}

TEST_F(EngineTest, ChoosesThreadsFromConfigThenLauncherThenCores) {
  const std::string launch = ZR_BUILD_DIR "/bin/zeroth launch -n 1 -t 3 -- ";
  EXPECT_NE(shell(launch + program(1, prints_threads, "job.threads=0")).output.find("threads 3\n"), std::string::npos);
  EXPECT_NE(shell(launch + program(1, prints_threads, "job.threads=2")).output.find("threads 2\n"), std::string::npos);
  EXPECT_NE(shell("taskset -c 0 " + program(1, prints_threads, "job.threads=0")).output.find("threads 1\n"),
            std::string::npos)
      << "a process on one core must use one thread";
}

TEST_F(EngineTest, RejectsPluginThatNeedsUnsupportedFeature) {
  const Result weights = run(2, trains, "strategy=halves");
  EXPECT_EQ(weights.code, 2);
  EXPECT_NE(weights.output.find("strategy 'halves' does not keep all of 'embedding.weight' on rank 0 and cannot "
                                "gather it before its use; choose another strategy"),
            std::string::npos)
      << weights.output;
  const Result blocks = run(2, trains, "optimizer=blocks");
  EXPECT_EQ(blocks.code, 2);
  EXPECT_NE(
      blocks.output.find("optimizer 'blocks' with strategy 'zero0': its state 'scale' is not sharded, which Zeroth "
                         "supports only for optimizers that need gradients that are not reduced over ranks"),
      std::string::npos)
      << blocks.output;
}

TEST_F(EngineTest, RejectsStrategyWithoutBufferForDeferredGradients) {
  const std::string words = "strategy=cramped train.gradient_accumulation=2";
  const Result each = run(2, trains, words);
  EXPECT_EQ(each.code, 0) << "gradients that are reduced in each micro-step must fit\n" << each.output;
  const Result deferred = run(2, trains, words + " gradients.reduce=last_micro_step");
  EXPECT_EQ(deferred.code, 2);
  EXPECT_NE(deferred.output.find("strategy 'cramped' has no buffer to hold the gradient of '"), std::string::npos)
      << deferred.output;
  EXPECT_NE(deferred.output.find(
                "' across micro-steps, which gradients.reduce = \"last_micro_step\" requires; set gradients.reduce = "
                "\"each_micro_step\", or choose another strategy"),
            std::string::npos)
      << deferred.output;
}

RANK_BODY(backward_outside, Run) {
  run.build();
  run.model->loss(0, 0).backward();
}

RANK_BODY(backward_twice, Run) {
  run.build();
  for (int i = 0; i < 2; ++i) run.engine->backward(run.model->loss(0, 0));
}

RANK_BODY(step_without_backward, Run) {
  run.build();
  run.engine->step();
}

RANK_BODY(loss_of_many, Run) {
  run.build();
  run.engine->backward(torch::ones({3}, torch::requires_grad()));
}

RANK_BODY(no_such_parameter, Run) {
  run.build();
  run.engine->get("twice.wieght");
}

RANK_BODY(no_such_state, Run) {
  run.build();
  run.engine->get("twice.weight", zr::TensorKind::state, "momentum");
}

RANK_BODY(another_model, Run) {
  if (run.program.rank() == 1)
    run.model = std::make_shared<parity::Tiny>();
  else
    run.model = parity::make("everything", 7);
  zr::Engine engine(run.program, *run.model);
}

TEST_F(EngineTest, ReportsProgramErrorsWithRemedy) { check_messages("engine_errors.txt", 8); }

TEST_F(EngineTest, ReportsActivationThatDiskCannotReadOrWrite) {
  fs::create_directories(folder_ / "swap");
  const auto trained = [&](const std::string& fault) {
    return shell("ZR_TIER_FAULT=" + fault + " " ZR_BUILD_DIR "/bin/zeroth launch -n 2 -- " +
                 program(2, trains,
                         "job.threads=1 strategy=zero1 offload.activation_bytes=1B offload.nvme.depth=1 "
                         "offload.activations=" ZR_BUILD_DIR "/tests/plugins/failing/zr_offload_nvme.so "
                         "offload.nvme.path=" +
                             (folder_ / "swap").string()));
  };
  const Result intact = trained("none");
  ASSERT_EQ(intact.code, 0) << intact.output;
  const Result read = trained("read=EIO@9"), write = trained("write=EIO@9");
  for (const auto& [result, what] : {std::pair{&read, "reading"}, std::pair{&write, "writing"}}) {
    EXPECT_EQ(result->code, 3) << result->output;
    for (const std::string& part :
         {std::string("offload 'nvme' ("), std::string("an activation of "), std::string(" (offload.activations): "),
          "tier nvme: " + (folder_ / "swap").string() + " (unnamed file): " + what + " ",
          std::string(" failed: Input/output error; the disk may be failing")})
      EXPECT_NE(result->output.find(part), std::string::npos) << part << "\n" << result->output;
  }
}

}  // namespace
