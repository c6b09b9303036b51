// The messages for mistakes of a program that uses zr::Engine: exceptions, keys, losses, collective calls on one rank.
#include <gmock/gmock.h>

#include <limits>
#include <thread>

#include "multirank/engine/user_errors.hpp"

namespace {

using namespace user_errors_tests;
using testing::HasSubstr;
using zr::test::RankBodyOf;

RANK_BODY(wrong_shape, Run) { run.net->forward(torch::randn({4, 5}, run.net->left->weight.options())); }

TEST_F(UserErrorsTest, PrintsTheLibtorchStackOnRequest) {
  const auto plain = run(1, wrong_shape, "strategy=zero0");
  EXPECT_EQ(plain.output.find("Exception raised from"), std::string::npos) << plain.output;
  const auto full = shell("TORCH_SHOW_CPP_STACKTRACES=1 " + program(1, wrong_shape, "strategy=zero0"));
  EXPECT_EQ(full.code, 1);
  EXPECT_THAT(full.output, HasSubstr("Exception raised from"));
}

using Case = std::function<void(Run&)>;

RANK_BODY(float_input, Run) { run.net->forward(torch::randn({4, 6})); }

RANK_BODY(double_input, Run) { run.net->forward(torch::randn({4, 6}, torch::kDouble)); }

RANK_BODY(reads_pointer, Run) { std::cout << run.net->left->weight.data_ptr<float>()[0]; }

RANK_BODY(prints_strategy, Run) {
  std::cout << run.program.text("strategy.use") << " " << run.program.text("strategy") << std::endl;
}

RANK_BODY(unknown_key, Run) { run.program.integer("train.stepz"); }

RANK_BODY(key_of_other_type, Run) { run.program.integer("job.name"); }

RANK_BODY(detached, Run) { run.engine->backward(run.loss().detach()); }

RANK_BODY(backward_through_a_freed_graph, Run) {
  const torch::Tensor loss = run.loss();
  run.engine->backward(loss);
  run.engine->step();
  run.engine->backward(loss);
}

RANK_BODY(keeps_a_graph_for_the_next_step, Run) {
  const torch::Tensor kept = run.net->left->weight.square().sum().to(torch::kFloat);
  run.engine->backward(run.loss() + kept);
  run.engine->step();
  run.engine->backward(run.loss() + kept);
}

RANK_BODY(changes_in_place, Run) {
  torch::Tensor y = torch::sigmoid(run.net->forward(torch::randn({4, 6})));
  const torch::Tensor loss = y.square().mean();
  y.mul_(2);
  run.engine->backward(loss);
}

RANK_BODY(reshapes_a_parameter, Run) {
  run.step();
  run.net->left->weight.set_data(torch::zeros({7, 8}, run.net->left->weight.options()));
  run.step();
}

RANK_BODY(sparse_buffer, Run) {
  run.engine.reset();
  run.net->register_buffer("adjacency", torch::eye(3).to_sparse());
  run.make_engine();
}

RANK_BODY(undefined_loss, Run) { run.engine->backward(torch::Tensor()); }

RANK_BODY(backward_in_evaluation, Run) {
  const auto loss = run.loss();
  const zr::Engine::Evaluation evaluation(*run.engine);
  run.engine->backward(loss);
}

RANK_BODY(step_in_evaluation, Run) {
  run.backward();
  const zr::Engine::Evaluation evaluation(*run.engine);
  run.engine->step();
}

// An exception after some gradients were reduced: every later call fails with an error that says so.
RANK_BODY(throws_late, Run) {
  run.net->left->weight.register_hook([](const torch::Tensor&) { throw std::runtime_error("a bug in a hook"); });
  says("backward", [&] { run.backward(); });
  says("step", [&] { run.engine->step(); });
  says("backward again", [&] { run.backward(); });
}

RANK_BODY(gets_at_the_end, Run) {
  run.step();
  if (run.first()) run.engine->get("left.weight");
}

RANK_BODY(gets_others, Run) { run.engine->get(run.first() ? "left.weight" : "right.weight"); }

RANK_BODY(loads_others, Run) { run.engine->load(run.first() ? "one.safetensors" : "other.safetensors"); }

RANK_BODY(calls_others, Run) {
  if (run.first())
    run.engine->weights_hash();
  else
    run.engine->mean(1);
}

// Rank 1 skips the first layer.
RANK_BODY(branches, Run) {
  run.step();
  const auto x = torch::randn({4, 7}, run.net->left->weight.options());
  if (run.first())
    run.backward();
  else
    run.engine->backward(run.net->right(x).to(torch::kFloat).mean());
  run.engine->step();
}

RANK_BODY(infers_alone, Run) {
  run.step();
  if (run.first()) {
    const torch::NoGradGuard no_grad;
    run.net->loss(0, 0);
  }
  run.step();
}

RANK_BODY(writes_alone, Run) {
  run.step();
  if (run.first()) {
    const torch::NoGradGuard no_grad;
    run.net->left->weight.clamp_(-0.1, 0.1);
  }
  run.step();
}

// A transposed weight: its gradient would be added to the wrong elements.
RANK_BODY(transposes, Run) {
  torch::nn::Linear square(4, 4);
  zr::Engine engine(run.program, *square, "square");
  {
    const torch::NoGradGuard no_grad;
    square->weight.t_();
  }
  engine.backward(square(torch::ones({2, 4})).square().mean());
}

RANK_BODY(set_misuse, Run) {
  zr::Engine& engine = *run.engine;
  const auto set = [&](const torch::Tensor& tensor) { engine.set("left.bias", zr::TensorKind::value, tensor); };
  says("undefined", [&] { set({}); });
  says("shape", [&] { set(torch::zeros({2, 3})); });
  says("complex", [&] { set(torch::zeros({7}, torch::kComplexFloat)); });
  says("sparse", [&] { set(torch::zeros({7}).to_sparse()); });
  says("meta", [&] { set(torch::zeros({7}, torch::kMeta)); });
  says("slot", [&] { engine.set("left.bias", zr::TensorKind::value, torch::zeros({7}), "exp_avg"); });
  says("gradient", [&] { engine.set("left.bias", zr::TensorKind::gradient, torch::zeros({7})); });
  says("get slot", [&] { engine.get("left.bias", zr::TensorKind::gradient, "exp_avg"); });
  says("odd name", [&] { engine.get("left\n\x1b[31m.bias"); });
  says("no name", [&] { engine.get(""); });
  says("save", [&] { engine.save(""); });
  says("load", [&] { engine.load(""); });
  says("tokens", [&] { engine.add_tokens(-1); });
  set(torch::arange(7, torch::kDouble).flip(0));
  EXPECT_TRUE(torch::equal(engine.get("left.bias"), torch::arange(7, torch::kFloat).flip(0)))
      << "set() accepts a correct tensor";
  run.step();
}

RANK_BODY(accumulation_misuse, Run) {
  says("zero", [&] { run.engine->set_accumulation(0); });
  says("more than planned", [&] { run.engine->set_accumulation(2); });
  run.backward();
  says("within a step", [&] { run.engine->set_accumulation(1); });
  run.engine->step();
}

RANK_BODY(sum_misuse, Run) {
  zr::Engine& engine = *run.engine;
  says("bool", [&] { engine.sum(torch::ones({2}, torch::kBool)); });
  says("uint16", [&] { engine.sum(torch::zeros({2}).to(torch::kUInt16)); });
  says("float8", [&] { engine.sum(torch::zeros({2}).to(torch::kFloat8_e5m2)); });
  run.step();
}

RANK_BODY(set_differs, Run) {
  run.engine->set("left.bias", zr::TensorKind::value, torch::full({7}, run.engine->rank() == 2 ? 1 : 0));
}

RANK_BODY(other_thread, Run) {
  std::thread([&] {
    says("get", [&] { run.engine->get("left.weight"); });
    says("backward", [&] { run.backward(); });
    says("gather", [&] { const auto scope = zr::gather(run.net->left->weight); });
  }).join();
  run.step();
}

RANK_BODY(calls_in_hook, Run) {
  auto loss = run.loss();
  loss.register_hook([&](const torch::Tensor&) {
    for (const auto& [name, fn] :
         std::map<std::string, std::function<void()>>{{"backward", [&] { run.engine->backward(loss); }},
                                                      {"get", [&] { run.engine->get("left.weight"); }},
                                                      {"step", [&] { run.engine->step(); }}})
      says(name.c_str(), fn);
  });
  run.engine->backward(loss);
  run.engine->step();
}

RANK_BODY(calls_in_functions, Run) {
  run.engine->set_schedule([&](int64_t) {
    says("schedule", [&] { run.engine->mean(1); });
    return 0.1;
  });
  run.engine->edit_gradients(
      [&](const std::string&, torch::Tensor, int64_t) { says("edit", [&] { run.engine->get("left.weight"); }); });
  run.step();
  run.engine->set_schedule({});
  run.engine->edit_gradients({});
  run.engine->mean(1);
  run.step();
}

struct Empty : torch::nn::Module {};

RANK_BODY(no_parameters, Run) {
  run.engine.reset();
  Empty model;
  zr::Engine engine(run.program, model);
}

const RankBodyOf<Run> throws_own("throws_own", [](Run&) { throw std::runtime_error("line 7 of the data is torn"); });
const RankBodyOf<Run> throws_argument("throws_argument",
                                      [](Run&) { throw std::invalid_argument("--epochs 0: must be above 0"); });
const RankBodyOf<Run> throws_no_memory("throws_no_memory", [](Run&) { throw std::bad_alloc(); });
const RankBodyOf<Run> throws_object("throws_object", [](Run&) { throw 5; });

template <class... Keys>
Case declares(Keys... keys) {
  return [=](Run& run) { const zr::Program program(run.toml, {}, {keys...}); };
}

const RankBodyOf<Run> key_without_meaning("key_without_meaning", declares(zr::Key("my.layers", 4, "")));
const RankBodyOf<Run> key_without_table("key_without_table", declares(zr::Key("layers", 4, "blocks of the model")));
const RankBodyOf<Run> key_out_of_range("key_out_of_range",
                                       declares(zr::Key("my.layers", 4, "blocks of the model", 5, 9)));
const RankBodyOf<Run> key_twice("key_twice",
                                declares(zr::Key("my.layers", 4, "blocks"), zr::Key("my.layers", 5, "blocks")));
const RankBodyOf<Run> key_of_zeroth("key_of_zeroth", declares(zr::Key("train.steps", 4, "steps")));

Case command_line(const char* word) {
  return [word](Run&) {
    std::string name = "/some/folder/app", argument = word;
    char* argv[] = {name.data(), argument.data(), nullptr};
    const zr::Program program(2, argv,
                              {{"model.layers", 4, "blocks of the model", 1, 64},
                               {"model.dropout", 0.1, "part of the activations left out"},
                               {"data.text", "", "the file to learn from"}});
  };
}

const RankBodyOf<Run> help("help", command_line("--help"));
const RankBodyOf<Run> unknown_option("unknown_option", command_line("--verbose"));

Case weighs(double weight) {
  return [weight](Run& run) { run.engine->backward(run.loss(), weight); };
}

const RankBodyOf<Run> weighs_nan("weighs_nan", weighs(std::numeric_limits<double>::quiet_NaN()));
const RankBodyOf<Run> weighs_less("weighs_less", weighs(-0.5));
const RankBodyOf<Run> weighs_much("weighs_much", weighs(1e300));
const RankBodyOf<Run> weighs_little("weighs_little", weighs(1e-300));
const RankBodyOf<Run> weighs_too_little_for_fp16("weighs_too_little_for_fp16", weighs(1e-5));
const RankBodyOf<Run> weighs_infinite("weighs_infinite", weighs(std::numeric_limits<double>::infinity()));

Case on_rank_0(const std::function<void(Run&)>& call) {
  return [call](Run& run) {
    run.step();
    if (run.first()) call(run);
    run.step();
  };
}

const RankBodyOf<Run> rank0_get("rank0_get", on_rank_0([](Run& run) {
                                  run.engine->get("left.weight", zr::TensorKind::state, "exp_avg");
                                }));
const RankBodyOf<Run> rank0_set("rank0_set", on_rank_0([](Run& run) {
                                  run.engine->set("left.bias", zr::TensorKind::value, torch::zeros({7}));
                                }));
const RankBodyOf<Run> rank0_hash("rank0_hash", on_rank_0([](Run& run) { run.engine->weights_hash(); }));
const RankBodyOf<Run> rank0_mean("rank0_mean", on_rank_0([](Run& run) { run.engine->mean(1); }));
const RankBodyOf<Run> rank0_save("rank0_save", on_rank_0([](Run& run) {
                                   run.engine->save(run.program.text("job.runs") + "/saved");
                                 }));
const RankBodyOf<Run> rank0_finish("rank0_finish", on_rank_0([](Run& run) { run.engine->finish(); }));
const RankBodyOf<Run> rank0_release("rank0_release", on_rank_0([](Run& run) { run.engine->release(); }));

void gathers_alone(Run& run) { const auto scope = zr::gather(run.net->left->weight); }

const RankBodyOf<Run> rank0_gather("rank0_gather", on_rank_0(gathers_alone));

void evaluates_alone(Run& run) { const zr::Engine::Evaluation evaluation(*run.engine); }

const RankBodyOf<Run> rank0_evaluation("rank0_evaluation", on_rank_0(evaluates_alone));

TEST_F(UserErrorsTest, CollectiveCallOnOneRankFailsUnderEveryStrategy) {
  for (const auto& strategy : kLayouts)
    for (const auto* body : {&rank0_get, &rank0_set, &rank0_hash, &rank0_mean, &rank0_save, &rank0_finish,
                             &rank0_release, &rank0_gather, &rank0_evaluation}) {
      const auto result = run(2, *body, strategy);
      EXPECT_EQ(result.code, 4) << body->name() << ", " << strategy << "\n" << result.output;
      EXPECT_THAT(result.output, HasSubstr(" is collective: call it on all ranks")) << body->name() << ", " << strategy;
    }
}

// Some cases of user_errors.txt run bodies of release_test.cpp and user_errors_test.cpp.
TEST_F(UserErrorsTest, ErrorsNameCallAndRemedy) { check_messages("user_errors.txt", 40); }

}  // namespace
