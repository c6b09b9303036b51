// zr::Swap, and writes that a program undoes: the state of training is bit for bit as before.
#include "zr/swap.hpp"

#include <gmock/gmock.h>
#include <sys/wait.h>
#include <unistd.h>

#include <optional>
#include <typeinfo>

#include "support/engine_test.hpp"
#include "support/user_error.hpp"
#include "zr/parameters.hpp"

namespace {

using namespace engine_tests;

using testing::HasSubstr;
using Tensors = std::map<std::string, torch::Tensor>;

class SwapTest : public EngineTest {};

Tensors all_values(Run& run) {
  Tensors values;
  for (const zr::ParameterInfo& parameter : run.engine->parameters())
    values[parameter.name] = run.engine->get(parameter.name);
  return values;
}

// Averages of weights that no engine has: functions of the name alone.
torch::Tensor average(const std::string& name, const torch::Tensor& like) {
  const auto number = static_cast<int64_t>(std::hash<std::string>()(name) % 17);
  return (torch::arange(like.numel()).remainder(13) / 7.0 - static_cast<double>(number) / 20).view(like.sizes());
}

Tensors averages(const Tensors& like) {
  Tensors values;
  for (const auto& [name, tensor] : like) values[name] = average(name, tensor);
  return values;
}

// The loss of a model with these weights, by libtorch alone.
torch::Tensor plain_loss(Run& run, const Tensors& values, int64_t step) {
  const auto model = parity::make(run.program.text("parity.model"), 7);
  const torch::NoGradGuard no_grad;
  for (auto& item : model->named_parameters())
    if (values.count(item.key())) item.value().copy_(values.at(item.key()));
  parity::move(*model, run.engine->dtype());
  for (const auto& item : model->named_buffers()) item.value().copy_(run.engine->buffer(item.key()));
  model->eval();
  return model->loss(step, 0);
}

torch::Tensor evaluated_loss(Run& run, int64_t step) {
  const zr::Engine::Evaluation evaluation(*run.engine);
  run.model->eval();
  const torch::Tensor loss = run.model->loss(step, 0);
  run.model->train();
  return loss;
}

// Trains, evaluates with other weights after each step, and prints the hash of the result.
void train_with(Run& run, const std::function<void()>& between) {
  run.build();
  while (!run.engine->done()) {
    run.micro_step();
    between();
  }
  const std::string hash = run.engine->weights_hash();
  if (run.engine->rank() == 0) std::cout << "hash " << hash << " loss " << run.engine->last_loss() << std::endl;
}

RANK_BODY(trains_without, Run) {
  train_with(run, [] {});
}

RANK_BODY(swaps_after_each_step, Run) {
  train_with(run, [&] {
    const Tensors values = averages(all_values(run));
    const torch::Tensor expected = plain_loss(run, values, 50), own = evaluated_loss(run, 50);
    {
      const zr::Swap swap(*run.engine, values);
      EXPECT_TRUE(torch::equal(evaluated_loss(run, 50), expected));
      const auto scope = zr::gather(run.model->parameters());
      for (const auto& item : run.model->named_parameters()) {
        const auto value = values.find(item.key());
        if (value == values.end()) continue;  // the second name of a tied parameter
        EXPECT_TRUE(torch::equal(item.value(), value->second.to(run.engine->dtype()))) << item.key();
      }
    }
    EXPECT_TRUE(torch::equal(evaluated_loss(run, 50), own));
  });
}

TEST_F(SwapTest, TrainingContinuesBitForBit) {
  for (const std::string storage :
       {"strategy=zero0", "strategy=zero1", "strategy=zero3 communicator.share_weights=false",
        "strategy=zero2 offload.optimizer=nvme offload.nvme.path=\"{}\"",
        "strategy=zero3 communicator.share_weights=false offload.parameters=cpu"})
    for (const std::string dtype : {"fp32", "bf16"}) {
      if (dtype == "fp32" && storage.find("offload.optimizer") != storage.npos) continue;
      std::string options = storage + " train.dtype=" + dtype;
      if (const auto at = options.find("{}"); at != options.npos) options.replace(at, 2, folder_.string());
      const Result plain = run(2, trains_without, options), swapped = run(2, swaps_after_each_step, options);
      EXPECT_EQ(swapped.code, 0) << options << "\n" << swapped.output;
      EXPECT_EQ(plain.output, swapped.output) << options;
      EXPECT_THAT(plain.output, HasSubstr("hash ")) << options;
    }
}

// Some parameters keep their values; writes inside the scope are lost; tied names are accepted.
RANK_BODY(swaps_some, Run) {
  train_with(run, [&] {
    const torch::Tensor weight = run.model->named_parameters()["twice.weight"];
    const torch::Tensor narrow = run.engine->get("narrow.bias");
    const zr::Swap swap(*run.engine, Tensors{{"head.weight", torch::ones({61, 36})}});
    const torch::NoGradGuard no_grad;
    weight.zero_();
    {
      const auto scope = zr::gather(run.model->parameters());
      EXPECT_TRUE(
          torch::equal(run.model->named_parameters()["embedding.weight"].to(torch::kFloat), torch::ones({61, 36})));
      EXPECT_TRUE(torch::equal(run.model->named_parameters()["narrow.bias"], narrow.to(run.engine->dtype())));
      run.model->named_parameters()["large.weight"].fill_(3);
    }
    EXPECT_EQ(weight.abs().max().item<float>(), 0);
  });
}

TEST_F(SwapTest, WritesInsideTheScopeAreLost) {
  for (const std::string how :
       {"strategy=zero1 train.dtype=bf16", "strategy=zero2 communicator.share_weights=false train.dtype=bf16",
        "strategy=zero3 communicator.share_weights=false"}) {
    const Result plain = run(2, trains_without, how), swapped = run(2, swaps_some, how);
    EXPECT_EQ(swapped.code, 0) << how << "\n" << swapped.output;
    EXPECT_EQ(plain.output, swapped.output) << how;
  }
}

// A program without zr::Swap: it writes averages in place or in a scope, evaluates, and writes its copy back.
RANK_BODY(writes_back, Run) {
  const bool in_scope = run.program.boolean("parity.weighted");
  train_with(run, [&] {
    const torch::NoGradGuard no_grad;
    const auto write = [&](const Tensors& values) {
      std::optional<zr::Gathered> scope;
      if (in_scope) scope.emplace(run.model->parameters());
      for (auto& item : run.model->named_parameters()) item.value().copy_(values.at(item.key()));
    };
    Tensors own;
    {
      const auto scope = zr::gather(run.model->parameters());
      for (const auto& item : run.model->named_parameters()) own[item.key()] = item.value().clone();
    }
    write(averages(own));
    evaluated_loss(run, 50);
    write(own);
  });
}

TEST_F(SwapTest, AValueThatIsWrittenBackUnchangedLeavesItsMaster) {
  for (const std::string how :
       {"strategy=zero0 train.dtype=bf16", "strategy=zero1 train.dtype=bf16",
        "strategy=zero3 train.dtype=bf16 communicator.share_weights=false", "strategy=zero2 train.dtype=fp16"})
    for (const std::string in_scope : {"false", "true"}) {
      const std::string options = how + " parity.weighted=" + in_scope;
      const Result plain = run(2, trains_without, options), written = run(2, writes_back, options);
      EXPECT_EQ(written.code, 0) << options << "\n" << written.output;
      EXPECT_EQ(plain.output, written.output) << options;
    }
}

// The scope's errors leave the weights as they were.
RANK_BODY(misuses, Run) {
  run.build();
  run.micro_step();
  const std::string before = run.engine->weights_hash();
  const auto says = [](const std::function<void()>& call) { return zr::test::user_error_of(call); };
  EXPECT_EQ(says([&] {
              zr::Swap(*run.engine, Tensors{{"twice.wait", torch::ones({36, 36})}});
            }),
            "the model has no parameter 'twice.wait'; did you mean 'twice.weight'?");
  EXPECT_EQ(says([&] {
              zr::Swap(*run.engine, Tensors{{"twice.weight", torch::ones({36})}});
            }),
            "zr::Swap: the tensor for 'twice.weight' does not fit: it has shape [36], but the parameter has shape "
            "[36, 36]");
  if (run.engine->world() > 1) {
    EXPECT_EQ(says([&] {
                zr::Swap(*run.engine, Tensors{{"twice.weight", torch::full({36, 36}, run.engine->rank())}});
              }),
              "zr::Swap: rank 1 passes different values for 'twice.weight' than rank 0; pass the same tensor on all "
              "ranks; the weights are unchanged");
  }
  const auto throws_on_one_rank = [&](const std::string& name) -> torch::Tensor {
    if (name == "narrow.weight" && run.engine->rank() == run.engine->world() - 1)
      throw std::runtime_error("no average");
    return torch::zeros(run.model->named_parameters()[name].sizes());
  };
  if (run.engine->rank() == run.engine->world() - 1) {
    try {
      const zr::Swap swap(*run.engine, throws_on_one_rank);
      ADD_FAILURE() << "no exception";
    } catch (const std::runtime_error& exception) {  // the program's own
      EXPECT_TRUE(typeid(exception) == typeid(std::runtime_error)) << exception.what();
      EXPECT_STREQ(exception.what(), "no average");
    }
  } else {
    EXPECT_THROW(zr::Swap(*run.engine, throws_on_one_rank), zr::PeerFailedError);
  }
  EXPECT_THAT(says([&] { zr::Swap(*run.engine, [&](const std::string& name) { return run.engine->get(name); }); }),
              HasSubstr("\") was called inside the function passed to zr::Swap; call it outside that function"));
  const Tensors wrong_on_one_rank{
      {run.engine->rank() == run.engine->world() - 1 ? "typo" : "narrow.weight", torch::zeros({1})}};
  if (run.engine->rank() == run.engine->world() - 1) {
    EXPECT_THAT(says([&] { zr::Swap(*run.engine, wrong_on_one_rank); }), HasSubstr("no parameter 'typo'"));
  } else if (run.engine->world() > 1) {
    EXPECT_THROW(zr::Swap(*run.engine, wrong_on_one_rank), zr::PeerFailedError);
  }
  EXPECT_EQ(run.engine->weights_hash(), before);
  {
    const zr::Swap swap(*run.engine, Tensors{});
    EXPECT_EQ(says([&] { run.engine->backward(run.model->loss(1, 0)); }),
              "engine.backward() was called inside a zr::Swap; end that scope first");
    EXPECT_EQ(says([&] { run.engine->step(); }), "engine.step() was called inside a zr::Swap; end that scope first");
    EXPECT_EQ(says([&] { run.engine->get("scalar"); }),
              "engine.get(\"scalar\") was called inside a zr::Swap; end that scope first");
    EXPECT_EQ(says([&] { zr::Swap(*run.engine, Tensors{}); }),
              "engine.Swap(begin) was called inside a zr::Swap; end that scope first");
  }
  EXPECT_EQ(run.engine->weights_hash(), before);
}

TEST_F(SwapTest, ErrorsLeaveTheWeightsAsTheyWere) {
  for (const std::string how : {"strategy=zero1", "strategy=zero3 communicator.share_weights=false"})
    for (const int ranks : {1, 2}) {
      const Result result = run(ranks, misuses, how);
      EXPECT_EQ(result.code, 0) << how << "\n" << result.output;
    }
}

// An exception ends the scope on all ranks, which catch it.
RANK_BODY(throws_inside, Run) {
  run.build();
  run.micro_step();
  const std::string folder = run.program.text("checkpoint.dir");
  run.engine->save(folder);
  const std::string before = run.engine->weights_hash();
  try {
    const zr::Swap swap(*run.engine, averages(all_values(run)));
    throw std::runtime_error("evaluation failed");
  } catch (const std::runtime_error&) {
  }
  if (run.engine->world() > 1) {
    EXPECT_EQ(
        zr::test::user_error_of([&] { run.engine->backward(run.model->loss(1, 0)); }),
        "engine.backward(): an exception ended a zr::Swap, so the model has the values of the swap instead of "
        "the weights of training; load a checkpoint with engine.load() (all parameters: with strict = true), or catch "
        "exceptions inside the zr::Swap");
    EXPECT_NE(zr::test::user_error_of([&] { run.engine->load(folder, {.strict = false}); }), "");
    run.engine->load(folder);
  }
  EXPECT_EQ(run.engine->weights_hash(), before);
  run.micro_step();
}

// A zr::gather scope of the swap's values that is open at its end would store them as weights of training.
RANK_BODY(gathers_past_the_end, Run) {
  run.build();
  run.micro_step();
  const std::string folder = run.program.text("checkpoint.dir");
  run.engine->save(folder);
  const std::string before = run.engine->weights_hash();
  std::optional<zr::Gathered> scope;
  EXPECT_NE(zr::test::user_error_of([&] {
              const zr::Swap swap(*run.engine, averages(all_values(run)));
              scope.emplace(run.model->parameters());
            })
                .find("the end of zr::Swap was called inside a zr::gather "
                      "scope of '"),
            std::string::npos);
  scope.reset();
  EXPECT_NE(zr::test::user_error_of([&] { run.engine->backward(run.model->loss(1, 0)); }), "");
  run.engine->load(folder);
  EXPECT_EQ(run.engine->weights_hash(), before);
  run.micro_step();
}

TEST_F(SwapTest, AGatherScopeThatOutlivesItIsAnError) {
  for (const std::string how : {"zero3 communicator.share_weights=false", "zero1", "zero0"}) {
    const std::string folder = (folder_ / "gathered").string();
    const Result result =
        run(2, gathers_past_the_end, "train.dtype=bf16 checkpoint.dir=" + folder + " strategy=" + how);
    EXPECT_EQ(result.code, 0) << how << result.output;
    fs::remove_all(folder);
  }
}

// A child that leaves the scope changes nothing for the rank.
RANK_BODY(forks_inside, Run) {
  run.build();
  run.micro_step();
  const std::string before = run.engine->weights_hash();
  {
    const zr::Swap swap(*run.engine, averages(all_values(run)));
    const pid_t child = ::fork();
    if (child == 0) {
      {
        const zr::Swap* mine = &swap;
        mine->~Swap();
      }
      ::_exit(0);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    EXPECT_EQ(status, 0);
  }
  EXPECT_EQ(run.engine->weights_hash(), before);
  run.micro_step();
}

TEST_F(SwapTest, AChildThatLeavesTheScopeChangesNothing) {
  for (const int ranks : {1, 2}) {
    const Result result = run(ranks, forks_inside, "strategy=zero1 train.dtype=bf16");
    EXPECT_EQ(result.code, 0) << result.output;
  }
}

TEST_F(SwapTest, AnExceptionInsideNeverTrainsOtherWeights) {
  for (const int ranks : {1, 2}) {
    const std::string folder = (folder_ / ("saved" + std::to_string(ranks))).string();
    const Result result = run(ranks, throws_inside, "strategy=zero1 train.dtype=bf16 checkpoint.dir=" + folder);
    EXPECT_EQ(result.code, 0) << result.output;
  }
}

// The copy of the weights is in the ledger, to the byte, and freed.
RANK_BODY(measures, Run) {
  run.build();
  run.micro_step();
  { const zr::Swap swap(*run.engine, Tensors{}); }
  run.micro_step();
}

TEST_F(SwapTest, TheLedgerCountsTheCopy) {
  const int64_t elements = Sizes::sum(Sizes().trainable) + Sizes::sum(Sizes().frozen);
  ASSERT_EQ(run(1, measures, "strategy=zero0 train.dtype=bf16 train.steps=2").code, 0);
  const Json snapshot = summary()["memory"]["host"]["snapshot"];
  EXPECT_EQ(snapshot["peak"], 2 * elements);
}

}  // namespace
