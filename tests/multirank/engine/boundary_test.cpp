// Checks when engine.get, set, save, load and step may be called. Rejected calls change nothing for any layout of
// weights.
#include "support/engine_test.hpp"
#include "support/layouts.hpp"
#include "zr/parameters.hpp"

namespace {

using namespace engine_tests;

class BoundaryTest : public EngineTest {
 protected:
  // The line that rank 0 prints, from `word` on.
  std::string printed(int ranks, const zr::test::RankBody& body, const std::string& overrides,
                      const std::string& word) {
    const Result result = run(ranks, body, overrides);
    EXPECT_EQ(result.code, 0) << overrides << "\n" << result.output;
    const auto at = result.output.find(word + " ");
    if (at == std::string::npos) return "";
    return result.output.substr(at, result.output.find('\n', at) - at);
  }
};

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

void print_result(Run& run) {
  const std::string hash = run.engine->weights_hash();
  if (run.engine->rank() == 0) std::cout << "result " << run.engine->last_loss() << " " << hash << std::endl;
}

RANK_BODY(trains_and_prints, Run) {
  run.build();
  run.train();
  print_result(run);
}

// Every call that reads or writes weights is rejected inside a zr::gather scope of one parameter; the step follows.
RANK_BODY(calls_inside_scope, Run) {
  run.build();
  run.micro_step();
  while (!run.engine->done()) {
    run.engine->backward(run.model->loss(run.engine->step_index(), run.engine->micro_index()));
    {
      const auto scope = zr::gather(run.model->named_parameters()["twice.weight"]);
      for (const auto& [name, call] : std::map<std::string, std::function<void()>>{
               {"engine.step()", [&] { run.engine->step(); }},
               {"engine.get('twice.weight')", [&] { run.engine->get("twice.weight"); }},
               {"engine.set('scalar')", [&] { run.engine->set("scalar", zr::TensorKind::value, torch::ones({})); }},
               {"engine.weights_hash()", [&] { run.engine->weights_hash(); }}})
        EXPECT_THROW(call(), zr::UserError) << name;
    }
    run.engine->step();
  }
  print_result(run);
}

TEST_F(BoundaryTest, RejectedCallInsideGatherScopeDoesNotChangeResults) {
  const std::string expected = printed(2, trains_and_prints, "strategy=zero0 train.steps=4", "result");
  ASSERT_NE(expected, "");
  for (const std::string& layout : zr::test::kLayouts)
    EXPECT_EQ(printed(2, calls_inside_scope, layout + " train.steps=4", "result"), expected) << layout;
}

// The gradient is readable on every rank between a step and the next backward; at any other time get() throws.
RANK_BODY(reads_gradients, Run) {
  run.build();
  const auto gradient = [&] { return run.engine->get("twice.weight", zr::TensorKind::gradient); };
  const std::string none =
      "engine.get('twice.weight', zr::TensorKind::gradient): this engine has no gradient yet; call engine.get() after "
      "engine.backward() and engine.step()";
  const std::string early =
      "engine.get('twice.weight', zr::TensorKind::gradient): the gradient is not reduced over ranks and micro-batches "
      "until engine.step() ends the step; call engine.get() after engine.step(), which keeps the gradient until the "
      "next engine.backward()";
  EXPECT_EQ(error_of(gradient), none) << "before the first step: " + error_of(gradient);
  while (!run.engine->done()) {
    const int64_t micro = run.engine->micro_index();
    run.engine->backward(run.model->loss(run.engine->step_index(), micro));
    EXPECT_EQ(error_of(gradient), early) << "after backward: " + error_of(gradient);
    if (!run.engine->step()) {
      EXPECT_EQ(error_of(gradient), early) << "between micro-steps: " + error_of(gradient);
      continue;
    }
    const torch::Tensor all = gradient();
    EXPECT_TRUE(torch::isfinite(all).all().item<bool>() && all.abs().sum().item<double>() > 0)
        << "the gradient is finite and not zero";
    EXPECT_EQ(std::abs(run.engine->mean(all.sum().item<double>()) - all.sum().item<double>()), 0)
        << "every rank gets the same gradient";
  }
  const double sum = gradient().sum().item<double>();
  if (run.engine->rank() == 0) std::cout << "gradient " << std::hexfloat << sum << std::endl;
  print_result(run);
}

TEST_F(BoundaryTest, GradientAfterStepIsIdenticalOnEveryRankAndStrategy) {
  for (const std::string accumulation : {"1", "2"}) {
    std::string expected;
    for (const std::string& layout : zr::test::kLayouts) {
      const std::string sum =
          printed(2, reads_gradients, layout + " train.gradient_accumulation=" + accumulation, "gradient");
      ASSERT_NE(sum, "") << layout;
      if (expected.empty()) expected = sum;
      EXPECT_EQ(sum, expected) << layout << ", accumulation " << accumulation;
    }
  }
}

RANK_BODY(steps_inside_scope, Run) {
  run.build();
  run.engine->backward(run.model->loss(0, run.engine->micro_index()));
  const auto scope = zr::gather(run.model->parameters());
  run.engine->step();
}

RANK_BODY(saves_inside_scope, Run) {
  run.build();
  const auto scope = zr::gather(run.model->parameters());
  run.engine->save("never");
}

RANK_BODY(loads_inside_scope, Run) {
  run.build();
  const auto scope = zr::gather(run.model->parameters());
  run.engine->load("never");
}

RANK_BODY(reads_gradient_before_step, Run) {
  run.build();
  run.engine->backward(run.model->loss(0, run.engine->micro_index()));
  run.engine->get("twice.weight", zr::TensorKind::gradient);
}

RANK_BODY(reads_gradient_at_start, Run) {
  run.build();
  run.engine->get("twice.weight", zr::TensorKind::gradient);
}

// Only the last rank changes a weight, with an operator; hash and save then read the weights before another step.
void write_on_last_rank(Run& run) {
  run.build();
  run.micro_step();
  const torch::NoGradGuard no_grad;
  if (run.engine->rank() == run.engine->world() - 1) run.model->named_parameters()["twice.weight"].mul_(1.5);
}

RANK_BODY(hashes_after_a_write, Run) {
  write_on_last_rank(run);
  run.engine->weights_hash();
}

RANK_BODY(saves_after_a_write, Run) {
  write_on_last_rank(run);
  run.engine->save(run.program.text("job.runs") + "/never");
}

// Each rank writes different values before the first step.
RANK_BODY(fills_per_rank, Run) {
  run.build();
  {
    const torch::NoGradGuard no_grad;
    run.model->named_parameters()["twice.weight"].fill_(0.5 + run.engine->rank());
  }
  run.train();
}

// Has more parameters with a dtype other than fp32 than one log line lists; one of them is tied.
struct MixedImpl : torch::nn::Module {
  MixedImpl() {
    for (const char* name : {"a", "b", "c", "d", "e"}) register_parameter(name, torch::ones({4}, torch::kDouble));
    register_parameter("half", torch::ones({4}, torch::kHalf));
    register_parameter("single", torch::ones({4}));
    register_parameter("tied", named_parameters()["a"]);
  }
};

RANK_BODY(has_mixed_types, Run) {
  const auto model = std::make_shared<MixedImpl>();
  zr::Engine engine(run.program, *model);
  EXPECT_NE(model->named_parameters()["a"].scalar_type(), torch::kDouble) << "a double parameter is converted";
}

struct TransposedImpl : torch::nn::Module {
  TransposedImpl() { register_parameter("weight", torch::ones({4, 8}).t()); }
};

RANK_BODY(has_another_layout, Run) {
  const auto model = std::make_shared<TransposedImpl>();
  zr::Engine engine(run.program, *model);
  EXPECT_TRUE(model->named_parameters()["weight"].is_contiguous()) << "the parameter is row-major";
}

struct OneDoubleImpl : torch::nn::Module {
  OneDoubleImpl() { register_parameter("weight", torch::ones({4}, torch::kDouble)); }
};

RANK_BODY(has_one_double, Run) {
  const auto model = std::make_shared<OneDoubleImpl>();
  zr::Engine engine(run.program, *model);
}

// boundary_errors.txt names the bodies above.
TEST_F(BoundaryTest, ErrorsNameCallReasonAndRemedy) { check_messages("boundary_errors.txt", 12); }

}  // namespace
