// Parameters that an engine does not train because the model changed: the engine reports them by name. Calls of
// engine.refresh() that fail change nothing.
#include "multirank/model/refresh_run.hpp"
#include "zr/parameters.hpp"

namespace model_tests {
namespace {

using torch::Tensor;

// Prints the error that `act` throws, and the strategies that throw it.
void rejects(Run& run, const std::function<void(Training&)>& before, const std::function<void(Training&)>& act,
             const std::vector<std::string>& keys = {}) {
  Outcomes outcomes(run);
  for (const SharingMode& how : sharing_modes(run.program.world())) {
    Training both(run, how, keys);
    both.net.add("a");
    before(both);
    both.start();
    both.train(0, 1);
    const std::string error = error_of([&] { act(both); });
    outcomes.add(how, error.empty() ? "no error" : error);
    // Removes the added parts again.
    for (auto& [name, part] : std::map(both.net.parts))
      if (name != "a") {
        both.net.unregister_module(name);
        both.net.parts.erase(name);
      }
  }
}

// The errors of get(), set() and save() for a parameter that was replaced.
RANK_BODY(untrained_used, Run) {
  Outcomes outcomes(run);
  for (const SharingMode& how : sharing_modes(run.program.world())) {
    Training both(run, how, {});
    both.net.add("a");
    both.net.add("b");
    both.start();
    both.net.unregister_module("b");
    both.net.add("b");
    EXPECT_TRUE(both.engine->get("a.weight").defined()) << "the other parameters can be read";
    const std::string read = error_of([&] { both.engine->get("b.weight"); });
    EXPECT_EQ(error_of([&] {
                both.engine->set("b.weight", zr::TensorKind::value, torch::zeros({10, Parts::kIn}));
              }),
              read)
        << "set() and get() throw the same error";
    const std::string saved = error_of([&] { both.engine->save(run.program.text("job.runs") + "/none"); });
    EXPECT_NE(saved.find("'b.bias' was replaced"), saved.npos) << "save() names all replaced parameters: " + saved;
    outcomes.add(how, read);
  }
}

// Adds a module, built by zr::deferred on ranks >= `first`: refresh() throws on all ranks; after the module is removed,
// training continues as if it had not been added.
void adds_deferred(Run& run, int first, const std::function<void(Parts&)>& add) {
  Outcomes outcomes(run);
  for (const SharingMode& how : sharing_modes(run.program.world())) {
    const auto train = [&](bool adds) {
      Training one(run, how, {});
      one.net.add("a");
      one.start();
      one.train(0, 2);
      if (adds) {
        one.engine->rank() >= first ? zr::deferred([&] { add(one.net); }) : add(one.net);
        const std::string error = error_of([&] { one.engine->refresh(); });
        outcomes.add(how, error.empty() ? "no error" : error);
        one.net.unregister_module("b");
        one.net.parts.erase("b");
      }
      one.train(2, 4);
      return one.histories["a"];
    };
    EXPECT_TRUE(equal(train(true), train(false))) << "nothing was changed under " + how.text(run.program.world());
  }
}

void add_linear(Parts& net) { net.register_module("b", torch::nn::Linear(3, 4)); }

// Makes an engine for a model with ordinary parameters and a buffer built by zr::deferred.
RANK_BODY(begins_with_deferred_buffer, Run) {
  Outcomes outcomes(run);
  for (const SharingMode& how : sharing_modes(run.program.world())) {
    Training one(run, how, {});
    one.net.add("a");
    zr::deferred([&] { one.net.register_buffer("table", torch::ones({3})); });
    const std::string error = error_of([&] { one.start(); });
    outcomes.add(how, error.empty() ? "no error" : error);
    EXPECT_TRUE(torch::equal(one.net.named_buffers()["table"], torch::ones({3})));
  }
}

void nothing(Training&) {}

void next(Training& t) { t.train(1, 2); }

RANK_BODY(reaches_nothing, Run) {
  rejects(run, nothing, [](Training& t) {
    const Tensor other = torch::ones({3}, torch::requires_grad());
    t.engine->backward(other.sum());
    const std::string error = error_of([&] { t.engine->step(); });
    t.engine->backward(t.net.loss(t.engine->micro_index()));
    t.engine->step();
    EXPECT_EQ(t.engine->step_index(), 2) << "after the error, another loss completes the step";
    throw std::runtime_error(error);
  });
}

// Only the loss of the last rank depends on the model: training works.
RANK_BODY(reaches_on_one_rank, Run) {
  rejects(run, nothing, [&](Training& t) {
    const Tensor other = torch::ones({3}, torch::requires_grad());
    const bool mine = t.engine->rank() == t.world - 1;
    const Tensor loss = t.net.loss(0);  // zero3 gathers weights on all ranks
    t.engine->backward(mine ? loss : other.sum() + loss.detach());
    t.engine->step();
  });
}

RANK_BODY(untrained_added, Run) {
  rejects(run, nothing, [](Training& t) {
    t.net.add("b");
    next(t);
  });
}

RANK_BODY(untrained_replaced, Run) {
  rejects(
      run, [](Training& t) { t.net.add("b"); },
      [](Training& t) {
        t.net.unregister_module("b");
        t.net.add("b");
        next(t);
      });
}

RANK_BODY(untrained_unfrozen, Run) {
  rejects(
      run,
      [](Training& t) {
        for (Tensor& p : t.net.add("b")->parameters()) p.set_requires_grad(false);
      },
      [](Training& t) {
        t.net.parts.at("b")->weight.set_requires_grad(true);
        next(t);
      });
}

RANK_BODY(untrained_many, Run) {
  rejects(run, nothing, [](Training& t) {
    for (const char* name : {"b", "c", "d"}) t.net.add(name);
    next(t);
  });
}

RANK_BODY(refresh_inside_step, Run) {
  rejects(run, nothing,
          [](Training& t) {
            t.engine->backward(t.net.loss(t.engine->micro_index()));
            t.engine->step();
            t.net.add("b");
            t.engine->refresh();
          },
          {"train.global_batch=" + std::to_string(6 * run.program.world())});
}

RANK_BODY(refresh_inside_evaluation, Run) {
  rejects(run, nothing, [](Training& t) {
    const zr::Engine::Evaluation evaluation(*t.engine);
    t.net.add("b");
    t.engine->refresh();
  });
}

RANK_BODY(refresh_inside_scope, Run) {
  rejects(run, nothing, [](Training& t) {
    const auto scope = zr::gather(t.net.parameters());
    t.engine->refresh();
  });
}

RANK_BODY(refresh_differs, Run) {
  rejects(run, nothing, [](Training& t) {
    t.net.add(t.engine->rank() == 0 ? "b" : "c");
    t.engine->refresh();
  });
}

RANK_BODY(refresh_deferred, Run) { adds_deferred(run, 0, add_linear); }

RANK_BODY(refresh_deferred_on_one_rank, Run) { adds_deferred(run, 1, add_linear); }

RANK_BODY(refresh_deferred_buffer, Run) {
  adds_deferred(run, 0, [](Parts& net) {
    net.register_module("b", torch::nn::BatchNorm1d(torch::nn::BatchNorm1dOptions(3).affine(false)));
  });
}

RANK_BODY(refresh_overlap, Run) {
  rejects(run, nothing, [](Training& t) {
    t.net.register_parameter("view", t.net.parts.at("a")->weight.detach()[0]);
    t.engine->refresh();
  });
}

// model_refresh.txt names the bodies above.
TEST_F(EngineModelTest, ReportsParametersThatItDoesNotTrain) { check_outcomes("model_refresh.txt", 21); }

}  // namespace
}  // namespace model_tests
