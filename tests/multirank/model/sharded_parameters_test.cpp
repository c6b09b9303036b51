// Sharded parameters: what a program may do with them, and the errors for what it may not do.
#include "multirank/model/sharded_parameters.hpp"

#include <algorithm>

namespace {

using namespace sharded_tests;
using testing::HasSubstr;
using testing::Not;

RANK_BODY(saves_module, Run) {
  std::ostringstream out;
  torch::serialize::OutputArchive archive;
  run.net->save(archive);
  archive.save_to(out);
}

RANK_BODY(reads_pointer, Run) { std::cout << run.net->in->weight.data_ptr<float>()[3]; }

RANK_BODY(reads_accessor, Run) { std::cout << run.net->in->weight.accessor<float, 2>()[0][0]; }

RANK_BODY(aliases_storage, Run) {
  const torch::NoGradGuard no_grad;
  auto alias = torch::empty({0});
  alias.set_(run.net->in->weight.storage(), 0, {64, 48}, {48, 1});
  std::cout << alias.sum().item<float>();
}

TEST_F(ShardedParametersTest, RawReadsReportTheParameterAndTheRemedy) {
  for (const auto* body : {&reads_pointer, &reads_accessor, &saves_module, &aliases_storage}) rejects(*body, kSharded);
}

RANK_BODY(saves_gathered_module, Run) {
  const auto scope = zr::gather(run.net->parameters());
  saves_module(run);
}

// Scopes may be nested, and operators may write inside them.
RANK_BODY(nests_scopes, Run) {
  run.step();
  const auto& weight = run.net->in->weight;
  {
    const auto outer = zr::gather({weight, weight, run.net->out->weight});
    const torch::NoGradGuard no_grad;
    weight.fill_(0.5);
    {
      const auto inner = zr::gather(weight);
      weight.mul_(0.5);
    }
    weight.view(-1).slice(0, 0, 1).fill_(0.125);
  }
  const auto value = run.engine->get("first.weight").view(-1);
  EXPECT_TRUE(value[0].item<float>() == 0.125f && value[1].item<float>() == 0.25f) << "all writes are kept";
  try {
    const auto scope = zr::gather(weight);
    throw std::invalid_argument("no file");
  } catch (const std::invalid_argument&) {
  }
  run.step();
  std::cout << run.engine->weights_hash() << std::endl;
}

// Values that a program writes in place or by pointer reach every rank, and the optimizer continues from them.
RANK_BODY(writes, Run) {
  run.step();
  {
    const torch::NoGradGuard no_grad;
    run.net->in->weight.fill_(0.25);
  }
  {
    const auto scope = zr::gather(run.net->out->weight);
    if (run.net->out->weight.scalar_type() == torch::kFloat)
      run.net->out->weight.data_ptr<float>()[7] = 0.5;
    else
      run.net->out->weight.data_ptr<at::BFloat16>()[7] = 0.5f;
  }
  EXPECT_TRUE(run.engine->get("first.weight").eq(0.25).all().item<bool>()) << "the fill is in the fp32 weights";
  run.step();
  const auto in = run.engine->get("first.weight"), out = run.engine->get("last.weight");
  EXPECT_LT((in - 0.25).abs().max().item<float>(), 0.02) << "the update starts from the filled value";
  EXPECT_LT(std::abs(out.view(-1)[7].item<float>() - 0.5f), 0.02f)
      << "the update starts from the value written by pointer";
  std::cout << run.engine->weights_hash() << std::endl;
}

// Reading by pointer changes nothing, not even the part of the master that the weights do not show.
RANK_BODY(reads_gathered, Run) {
  run.step();
  const auto before = run.engine->weights_hash();
  double sum = 0;
  {
    const auto scope = zr::gather(run.net->parameters());
    for (const auto& parameter : run.net->parameters()) sum += parameter.to(torch::kDouble).sum().item<double>();
  }
  EXPECT_EQ(run.engine->weights_hash(), before) << "reading changes nothing";
  run.step();
  std::cout << run.engine->weights_hash() << " " << sum << std::endl;
}

TEST_F(ShardedParametersTest, GatherScopeProvidesMemory) {
  EXPECT_EQ(run(saves_gathered_module).code, 0);
  for (const auto* body : {&writes, &reads_gathered, &nests_scopes})
    for (const std::string dtype : {"fp32", "bf16"}) {
      const Result unsharded = run(*body, "zero0", "train.dtype=" + dtype),
                   sharded = run(*body, "zero3", "train.dtype=" + dtype);
      EXPECT_EQ(unsharded.code, 0) << unsharded.output;
      EXPECT_EQ(sharded.code, 0) << sharded.output;
      EXPECT_EQ(said(sharded), said(unsharded)) << body->name() << ", " << dtype;
    }
}

RANK_BODY(converts_module, Run) {
  run.net->to(torch::kDouble);
  run.step();
}

// Inference inside a step, without and with zr::Engine::Evaluation.
RANK_BODY(infers, Run) {
  run.step();
  run.backward();
  const auto x = torch::ones({2, 48}, run.net->in->weight.options());
  {
    const c10::InferenceMode inference;
    std::cout << run.net->loss(x).item<float>() << " ";
  }
  {
    const zr::Engine::Evaluation evaluation(*run.engine);
    std::cout << run.net->loss(x).item<float>() << " ";
  }
  run.engine->step();
  run.step();
  std::cout << run.engine->weights_hash() << std::endl;
}

TEST_F(ShardedParametersTest, OwnersWriteSharedWeightsOnce) {
  for (const std::string dtype : {"fp32", "bf16"})
    for (const auto* body : {&writes, &reads_gathered, &infers, &nests_scopes}) {
      const Result unsharded = run(*body, "zero0", "train.dtype=" + dtype);
      EXPECT_EQ(unsharded.code, 0) << unsharded.output;
      for (const std::string strategy : {"zero1", "zero2", "zero3"}) {
        const Result shared = run(*body, strategy, "communicator.share_weights=true train.dtype=" + dtype);
        EXPECT_EQ(shared.code, 0) << shared.output;
        EXPECT_EQ(said(shared), said(unsharded)) << body->name() << ", " << strategy << ", " << dtype;
      }
    }
  if (zr::test::jobs_run_on_hosts()) return;  // with one rank each: weights are not shared
  rejects(converts_module,
          "parameter 'first.weight' is shared by the ranks of this node (communicator.share_weights): it has memory "
          "only inside "
          "operators; read or write it within a zr::gather(parameter) scope; to replace its data, " +
              kInstead,
          "zero1 communicator.share_weights=true");
}

// One scope over the parameters of two engines, then again with the list of the last rank in reverse order.
RANK_BODY(gathers_of_two_engines, Run) {
  const int rank = run.engine->rank(), last = run.engine->world() - 1;
  run.engine.reset();
  Net nets[2];
  std::vector<std::unique_ptr<zr::Engine>> engines;
  for (const char* name : {"generator", "critic"}) {
    engines.push_back(std::make_unique<zr::Engine>(run.program, nets[engines.size()], name));
  }
  for (const bool backwards : {false, rank == last}) {
    std::vector<torch::Tensor> all = nets[0].parameters();
    for (const auto& parameter : nets[1].parameters()) all.push_back(parameter);
    if (backwards) std::reverse(all.begin(), all.end());
    {
      const auto scope = zr::gather(all);
      for (const Net& net : nets)
        for (const auto& parameter : net.parameters()) {
          float* const values = parameter.data_ptr<float>();
          for (int64_t i = 0; i < parameter.numel(); ++i) values[i] = values[i] * 2 + (&net == nets ? 1 : 2);
        }
    }
    for (int i = 0; i < 2; ++i)
      for (const auto& item : nets[i].named_parameters()) {
        const torch::Tensor value = engines[static_cast<std::size_t>(i)]->get(item.key());
        std::cout << (rank == 0 ? item.key() + " " + std::to_string(value.sum().item<double>()) + "\n" : "");
      }
  }
}

TEST_F(ShardedParametersTest, ScopeOverTwoEnginesEntersThemInTheSameOrderOnAllRanks) {
  const Result unsharded = run(gathers_of_two_engines, "zero0");
  EXPECT_EQ(unsharded.code, 0) << unsharded.output;
  for (const std::string strategy : {"zero1 communicator.share_weights=true", "zero3"}) {
    const Result result = run(gathers_of_two_engines, strategy);
    EXPECT_EQ(result.code, 0) << strategy << "\n" << result.output;
    EXPECT_EQ(said(result), said(unsharded)) << strategy;
  }
}

// An operator on one rank that throws before it writes.
RANK_BODY(throws_in_place, Run) {
  run.step();
  if (run.engine->rank() == 1) {
    const torch::NoGradGuard no_grad;
    bool thrown = false;
    try {
      run.net->in->weight.copy_(torch::zeros({3, 5}));
    } catch (const c10::Error&) {
      thrown = true;
    }
    EXPECT_TRUE(thrown) << "a copy of another shape is rejected";
  }
  run.step();
  std::cout << run.engine->weights_hash() << std::endl;
}

TEST_F(ShardedParametersTest, IgnoresWritesOfAnOperatorThatThrew) {
  const Result unsharded = run(throws_in_place, "zero0");
  EXPECT_EQ(unsharded.code, 0) << unsharded.output;
  for (const std::string strategy : {"zero1", "zero2", "zero3"})
    for (const std::string alias : {"true", "false"}) {
      const Result sharded = run(throws_in_place, strategy, "communicator.share_weights=" + alias);
      EXPECT_EQ(sharded.code, 0) << sharded.output;
      EXPECT_EQ(said(sharded), said(unsharded)) << strategy << " " << alias;
    }
}

RANK_BODY(goes_on_after_failure, Run) {
  run.net->in->weight.register_hook([](const torch::Tensor&) { throw std::runtime_error("a bug in a hook"); });
  try {
    run.backward();  // throws after the gradients of the last layer were reduced
  } catch (const std::exception&) {
  }
  run.step();
}

TEST_F(ShardedParametersTest, FailedBackwardEndsTraining) {
  for (const std::string strategy : {"zero0", "zero3"})
    rejects(goes_on_after_failure,
            "the last engine.backward() ended with an exception, so its gradients are incomplete; end the job, or "
            "create a new engine",
            strategy);
}

RANK_BODY(steps_within_scope, Run) {
  {
    const auto scope = zr::gather(run.net->in->weight);
    run.backward();
    EXPECT_THROW(run.engine->step(), zr::UserError);
  }
  run.engine->step();
}

TEST_F(ShardedParametersTest, RejectsAStepInsideAScope) {
  for (const std::string strategy : {"zero1 communicator.share_weights=true", "zero3"}) {
    const Result result = run(steps_within_scope, strategy);
    EXPECT_EQ(result.code, 0) << strategy << "\n" << result.output;
  }
  if (!zr::test::jobs_run_on_hosts())  // with one rank each: weights are not shared
    for (const auto* body : {&reads_pointer, &saves_module})
      rejects(*body, "parameter 'first.weight' is shared by the ranks of this node",
              "zero2 communicator.share_weights=true");
}

RANK_BODY(loads_module, Run) {
  Net other;
  std::stringstream file;
  torch::serialize::OutputArchive out;
  other.save(out);
  out.save_to(file);
  torch::serialize::InputArchive in;
  in.load_from(file);
  run.net->load(in);
  run.step();
}

TEST_F(ShardedParametersTest, RejectsReplacedParameterData) {
  for (const auto* body : {&converts_module, &loads_module})
    rejects(*body, kSharded + "; to replace its data, " + kInstead);
  rejects(converts_module,
          "the data of parameter 'first.weight' was replaced after the engine was made (torch::load(), module->to(), "
          "set_data()); " +
              kInstead,
          "zero1");
}

// Module::to() to what the module is already, as programs call it before evaluation and at their end.
void train_and_convert(Run& run, bool converts) {
  const auto convert = [&] {
    if (!converts) return;
    run.net->to(torch::kFloat);
    run.net->to(torch::kCPU);
    run.net->to(torch::kCPU, torch::kFloat);
  };
  for (int step = 0; step < 3; ++step) {
    run.backward();
    convert();
    run.engine->step();
    convert();
  }
  const std::string hash = run.engine->weights_hash();
  if (run.engine->rank() == 0) std::cout << "hash " << hash << std::endl;
}
RANK_BODY(converts_nothing, Run) { train_and_convert(run, false); }
RANK_BODY(converts_to_the_same, Run) { train_and_convert(run, true); }

TEST_F(ShardedParametersTest, ConversionsThatChangeNothingAreAllowed) {
  const std::string expected = said(run(converts_nothing));
  EXPECT_THAT(expected, HasSubstr("hash "));
  for (const std::string layout : {"zero3 communicator.share_weights=false", "zero1 communicator.share_weights=true"}) {
    const Result converted = run(converts_to_the_same, layout);
    EXPECT_EQ(said(converted), expected) << layout << "\n" << converted.output;
  }
}

// Where a rank owns its weights, nothing fails when a conversion replaces them: the next call that uses them does.
void convert_there_and_back(Run& run) {
  run.backward();
  run.net->to(torch::kDouble);
  run.net->to(torch::kFloat);
}
RANK_BODY(steps_after_conversion, Run) {
  convert_there_and_back(run);
  run.engine->step();
}
RANK_BODY(saves_after_conversion, Run) {
  run.step();
  run.net->to(torch::kDouble);
  run.engine->save(::testing::TempDir() + "never");
}
RANK_BODY(releases_after_conversion, Run) {
  run.step();
  run.net->to(torch::kBFloat16);
  run.engine->release(torch::kFloat);
}

TEST_F(ShardedParametersTest, CallsAfterAConversionThrow) {
  for (const auto* body : {&steps_after_conversion, &saves_after_conversion, &releases_after_conversion})
    rejects(*body, "the data of parameter 'first.weight' was replaced", "zero2 communicator.share_weights=false");
}

const std::string kGradient =
    "the gradient of 'first.weight' belongs to the engine: read it with engine.get(\"first.weight\", "
    "zr::TensorKind::gradient), "
    "clip with train.gradient_clipping, update with engine.step(), leave zero_grad() out, and call "
    "engine.backward(loss) instead of loss.backward(); if the loss belongs to another engine (as in a GAN), call "
    "requires_grad_(false) on these "
    "parameters around its backward";

RANK_BODY(own_optimizer, Run) {
  torch::optim::SGD optimizer(run.net->parameters(), torch::optim::SGDOptions(0.1));
  run.backward();
  optimizer.step();
}

RANK_BODY(clips_itself, Run) {
  run.backward();
  torch::nn::utils::clip_grad_norm_(run.net->parameters(), 1.0);
}

RANK_BODY(plain_backward, Run) {
  run.step();
  run.net->loss(torch::randn({4, 48})).backward();
}

RANK_BODY(zeroes_gradients, Run) {
  run.step();
  run.net->zero_grad();
  run.step();
}

TEST_F(ShardedParametersTest, RejectsForeignAccessToGradients) {
  for (const std::string strategy : {"zero0", "zero3"})
    for (const auto* body : {&own_optimizer, &clips_itself, &plain_backward}) {
      const Result result = run(*body, strategy);
      EXPECT_EQ(result.code, 2) << body->name() << "\n" << result.output;
      EXPECT_THAT(result.output, HasSubstr("the gradient of '")) << body->name();
      EXPECT_THAT(result.output, HasSubstr("belongs to the engine: read it with engine.get(")) << body->name();
    }
  rejects(own_optimizer, kGradient);
  EXPECT_EQ(run(zeroes_gradients).code, 0) << "zero_grad() is accepted";
}

RANK_BODY(two_engines, Run) { const zr::Engine second(run.program, *run.net); }

RANK_BODY(one_engine_after_another, Run) {
  run.step();
  run.engine.reset();
  run.net = std::make_shared<Net>();
  run.engine = std::make_unique<zr::Engine>(run.program, *run.net);
  run.step();
}

RANK_BODY(outlives_engine, Run) {
  run.step();
  run.engine.reset();
  std::cout << run.net->in->weight.sum().item<float>();
}

TEST_F(ShardedParametersTest, RejectsASecondEngineForAModel) {
  rejects(two_engines,
          "parameter 'first.weight' belongs to another zr::Engine; call release() on that engine first, or give each "
          "engine its own model");
  EXPECT_EQ(run(one_engine_after_another).code, 0);
  rejects(outlives_engine,
          "the engine that sharded parameter 'first.weight' was destroyed, and the parameter's values are lost; call "
          "engine.release() on all ranks before the engine is destroyed, which gives the model its full weights");
}

// Rank 1 skips a layer.
RANK_BODY(other_order, Run) {
  run.step();
  const auto x = torch::randn({4, 48});
  if (run.engine->rank() == 1)
    run.engine->backward(torch::gelu(run.net->in(x)).square().mean());
  else
    run.engine->backward(run.net->loss(x));
  run.engine->step();
}

TEST_F(ShardedParametersTest, ReportsRanksThatUseDifferentParameters) {
  const Result result = run(other_order);
  EXPECT_EQ(result.code, 4) << result.output;
  EXPECT_THAT(result.output, HasSubstr("differs between ranks: "));
  EXPECT_THAT(result.output, HasSubstr("all_gather 'last.weight'"));
  EXPECT_THAT(result.output, HasSubstr("rank 1"));
}

TEST_F(ShardedParametersTest, InferenceInsideAStepChangesNothing) {
  const Result unsharded = run(infers, "zero0"), sharded = run(infers, "zero3");
  EXPECT_EQ(unsharded.code, 0) << unsharded.output;
  EXPECT_EQ(said(sharded), said(unsharded));
}

}  // namespace
