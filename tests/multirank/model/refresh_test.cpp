// engine.refresh() trains parameters that the model has gained. The parts of the model are independent, so the values
// of each part must be bit-identical to those of a model with only that part.
#include <torch/script.h>

#include <cstdlib>
#include <filesystem>

#include "multirank/model/refresh_run.hpp"

namespace model_tests {
namespace {

using torch::Tensor;

// Trains one part alone, on steps [first, 6).
History alone(Run& run, const SharingMode& how, const std::vector<std::string>& keys, const std::string& part,
              int64_t first) {
  Training one(run, how, keys);
  one.net.add(part);
  one.start();
  one.train(first, 6);
  return one.histories[part];
}

// Part 'a' trains from the start, 'b' from step 3; the checks differ in how 'b' is added.
void continues(Run& run, const std::vector<std::string>& keys) {
  for (const SharingMode& how : sharing_modes(run.program.world())) {
    const History a = alone(run, how, keys, "a", 0), b = alone(run, how, keys, "b", 3);
    const auto check = [&](const std::string& what, const std::function<void(Training&)>& before,
                           const std::function<void(Training&)>& change, const std::string& name_of_a = "a") {
      Training both(run, how, keys);
      both.net.add("a");
      before(both);
      both.start();
      both.train(0, 3);
      change(both);
      both.engine->refresh();
      both.engine->refresh();  // the model is unchanged since the first call
      both.train(3, 6);
      History of_a = both.histories["a"];
      if (name_of_a != "a") of_a.insert(of_a.end(), both.histories[name_of_a].begin(), both.histories[name_of_a].end());
      EXPECT_TRUE(equal(of_a, a)) << what + " under " + how.text(run.program.world()) +
                                         ": 'a' continues bit-identically";
      EXPECT_TRUE(equal(both.histories["b"], b))
          << what + " under " + how.text(run.program.world()) + ": 'b' starts with new states";
      EXPECT_TRUE(both.engine->step_index() == 6 && both.engine->done()) << what + ": the step count continues";
    };
    const auto nothing = [](Training&) {};
    check("added", nothing, [](Training& t) { t.net.add("b"); });
    check(
        "unfrozen",
        [](Training& t) {
          for (Tensor& p : t.net.add("b")->parameters()) p.set_requires_grad(false);
        },
        [](Training& t) {
          for (Tensor& p : t.net.parts.at("b")->parameters()) p.set_requires_grad(true);
        });
    check(
        "replaced",
        [](Training& t) {
          t.net.add("b", 7);
          for (Tensor& p : t.net.parts.at("b")->parameters()) p.set_requires_grad(false);
        },
        [](Training& t) {
          t.net.unregister_module("b");
          t.net.add("b");
        });
    check(
        "renamed", nothing,
        [](Training& t) {
          const auto a_part = t.net.parts.at("a");
          t.net.unregister_module("a");
          t.net.parts.erase("a");
          t.net.add("b");
          t.net.parts.emplace("c", t.net.register_module("c", a_part));
        },
        "c");
  }
}

const RankBodyOf<Run> refresh_continues("refresh_continues", [](Run& run) { continues(run, {}); });

const RankBodyOf<Run> refresh_continues_bf16("refresh_continues_bf16",
                                             [](Run& run) { continues(run, {"train.dtype=bf16"}); });

const RankBodyOf<Run> refresh_continues_offloaded("refresh_continues_offloaded",
                                                  [](Run& run) { continues(run, {"offload.optimizer=cpu"}); });

TEST_F(EngineModelTest, SLOW_RefreshKeepsOldStatesAndStartsNewOnes) {
  for (const int ranks : {1, 2})
    for (const auto* body : {&refresh_continues, &refresh_continues_bf16, &refresh_continues_offloaded}) {
      const engine_tests::Result result = run(ranks, *body);
      EXPECT_EQ(result.code, 0) << body->name() << " on " << ranks << "\n" << result.output;
    }
}

// Saves after refresh(). If REFRESH_TEST_RESUMES is set, any number of ranks loads the checkpoint and continues.
RANK_BODY(refresh_saves, Run) {
  const bool resumes = std::getenv("REFRESH_TEST_RESUMES") != nullptr;
  const std::string folder = run.program.text("job.runs") + "/refreshed";
  Training both(run, {"zero2", true}, {"train.global_batch=6", "train.steps=8"});
  both.net.add("a");
  if (resumes) both.net.add("b");
  both.start();
  if (!resumes) {
    both.train(0, 3);
    both.net.add("b");
    both.engine->refresh();
    both.train(3, 5);
    both.engine->save(folder);
  } else {
    both.engine->load(folder);
    EXPECT_EQ(both.engine->step_index(), 5) << "the checkpoint of step 5 is loaded";
  }
  both.train(5, 8);
  const std::string hash = both.engine->weights_hash();
  if (both.engine->rank() == 0) std::cout << "hash " << hash << std::endl;
}

TEST_F(EngineModelTest, CheckpointAfterRefreshLoadsAtAnotherWorldSize) {
  const auto hash = [](const engine_tests::Result& result) {
    EXPECT_EQ(result.code, 0) << result.output;
    std::smatch found;
    EXPECT_TRUE(std::regex_search(result.output, found, std::regex("hash ([0-9a-f]{16})"))) << result.output;
    return found.str(1);
  };
  const std::string saved = hash(run(2, refresh_saves));
  ::setenv("REFRESH_TEST_RESUMES", "yes", 1);
  EXPECT_EQ(hash(run(1, refresh_saves)), saved);
  EXPECT_EQ(hash(run(2, refresh_saves)), saved);
  ::unsetenv("REFRESH_TEST_RESUMES");
}

TEST_F(EngineModelTest, RefreshContinuesTheRunFolder) {
  ASSERT_EQ(run(2, refresh_saves).code, 0);
  const auto rows = metrics();
  ASSERT_EQ(rows.size(), 8u);
  for (std::size_t i = 0; i < rows.size(); ++i) EXPECT_EQ(rows[i]["step"], i + 1);
  EXPECT_EQ(summary()["steps"], 8);
}

RANK_BODY(refreshes_on_one_rank, Run) {
  run.build();
  run.micro_step();
  run.engine->rank() == 1 ? run.engine->refresh() : (void)run.engine->weights_hash();
}

TEST_F(EngineModelTest, RefreshOnOneRankNamesTheCallsOfBoth) {
  const engine_tests::Result result = run(2, refreshes_on_one_rank, "strategy=zero1");
  EXPECT_EQ(result.code, 4) << result.output;
  EXPECT_NE(result.output.find("rank 0 issued engine.weights_hash(), rank 1 issued engine.refresh()"),
            std::string::npos)
      << result.output;
}

// refresh() keeps the buffers of each rank; a new buffer gets the values of rank 0.
MULTIRANK_TEST(EngineModelTest, RefreshKeepsEachRanksBuffers, {2}) {
  for (const SharingMode& how : sharing_modes(run.program.world())) {
    Training both(run, how, {});
    both.net.add("a");
    Tensor own = both.net.register_buffer("own", torch::zeros({3}));
    both.start();
    own.fill_(1 + both.engine->rank());
    both.train(0, 2);
    Tensor added = both.net.register_buffer("added", torch::full({2}, 7 + both.engine->rank()));
    both.net.add("b");
    both.engine->refresh();
    EXPECT_TRUE(own.eq(1 + both.engine->rank()).all().item<bool>()) << "refresh() keeps the buffer of this rank";
    EXPECT_TRUE(added.eq(7).all().item<bool>()) << "a new buffer has the values of rank 0";
    if (both.engine->rank() == 0) {  // rank 0 deletes the checkpoint
      EXPECT_FALSE(std::filesystem::exists(both.program->text("job.runs") + "/run/refresh"))
          << "the internal checkpoint is deleted";
    }
  }
}

MULTIRANK_TEST(EngineModelTest, ARejectedRefreshLeavesTheEngineAsItWas, {2}) {
  for (const SharingMode& how : sharing_modes(run.program.world())) {
    const History whole = alone(run, how, {}, "a", 0);
    Training both(run, how, {});
    both.net.add("a");
    both.start();
    both.train(0, 3);
    both.net.register_buffer("sparse", torch::eye(4).to_sparse());
    try {
      both.engine->refresh();
      ADD_FAILURE();
    } catch (const zr::UserError& error) {
      EXPECT_STREQ(error.what(),
                   "buffer 'sparse' is Sparse, but the engine saves and broadcasts buffers as dense tensors; register "
                   "its to_dense(), or keep the tensor as a member of the module, without register_buffer()");
    }
    both.train(3, 6);
    EXPECT_TRUE(equal(both.histories["a"], whole));
  }
}

// Freezes a weight for steps 1 and 2 without refresh(): the results equal those of a plain libtorch optimizer.
MULTIRANK_TEST(EngineModelTest, TrainsAParameterFrozenLaterAsLibtorchDoes, {1, 2}) {
  const int world = run.program.world();
  for (const SharingMode& how : sharing_modes(world)) {
    const auto freeze = [](Parts& net, int64_t step) {
      net.parts.at("b")->weight.set_requires_grad(step != 1 && step != 2);
    };
    Parts plain;
    plain.add("a");
    plain.add("b");
    torch::optim::SGD sgd(plain.parameters(), torch::optim::SGDOptions(0.0625));
    for (int64_t step = 0; step < 4; ++step) {
      freeze(plain, step);
      sgd.zero_grad();
      for (int rank = 0; rank < world; ++rank) (plain.loss(step * world + rank) / world).backward();
      sgd.step();
    }
    Parts net;
    net.add("a");
    net.add("b");
    zr::Engine engine(program_of(run, how), net);
    for (int64_t step = 0; step < 4; ++step) {
      freeze(net, step);
      engine.backward(net.loss(step * world + engine.rank()));
      engine.step();
    }
    for (const auto& item : plain.named_parameters())
      EXPECT_TRUE(same(engine.get(item.key()), item.value()))
          << item.key() + " equals plain libtorch under " + how.text(world);
  }
}

// A TorchScript module: the error names the unfrozen parameter, which trains after refresh().
MULTIRANK_TEST(EngineModelTest, RefreshTrainsATorchScriptModule, {1, 2}) {
  for (const SharingMode& how : sharing_modes(run.program.world())) {
    torch::jit::Module module("Script");
    for (const char* name : {"kept", "later"}) {
      torch::manual_seed(5);
      module.register_parameter(name, torch::randn({Parts::kIn}).set_requires_grad(name[0] == 'k'), false);
    }
    module.define("def forward(self, x):\n  return (x * self.kept + self.later).square().mean()\n");
    zr::Engine engine(program_of(run, how), module);
    const auto step = [&] {
      engine.backward(module.forward({torch::ones({3, Parts::kIn})}).toTensor());
      engine.step();
    };
    step();
    module.attr("later").toTensor().set_requires_grad(true);
    const std::string error = error_of(step);
    EXPECT_NE(error.find("'later' was frozen when the engine was made, and requires a gradient now"), error.npos)
        << error;
    const Tensor before = engine.get("kept");
    engine.refresh();
    EXPECT_TRUE(same(engine.get("kept"), before)) << "the old parameter keeps its value";
    const Tensor later = engine.get("later");
    step();
    EXPECT_FALSE(same(engine.get("later"), later)) << "the unfrozen parameter trains";
  }
}

}  // namespace
}  // namespace model_tests
