// Parameters that an engine does not train because the model changed: the engine reports them by name, and trains them
// after engine.refresh(). The parts of the model are independent, so the values of each part must be bit-identical to
// those of a model with only that part.
#include <torch/script.h>

#include <filesystem>

#include "multirank/refresh_run.hpp"
#include "zr/parameters.hpp"

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
      require(equal(of_a, a), what + " under " + how.text(run.program.world()) + ": 'a' continues bit-identically");
      require(equal(both.histories["b"], b),
              what + " under " + how.text(run.program.world()) + ": 'b' starts with new states");
      require(both.engine->step_index() == 6 && both.engine->done(), what + ": the step count continues");
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

// Saves after refresh(). If MODEL_CASE_RESUMES is set, any number of ranks loads the checkpoint and continues.
void saves(Run& run) {
  const bool resumes = std::getenv("MODEL_CASE_RESUMES") != nullptr;
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
    require(both.engine->step_index() == 5, "the checkpoint of step 5 is loaded");
  }
  both.train(5, 8);
  const std::string hash = both.engine->weights_hash();
  if (both.engine->rank() == 0) std::cout << "hash " << hash << std::endl;
}

// refresh() keeps the buffers of each rank; a new buffer gets the values of rank 0.
void keeps_buffers(Run& run) {
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
    require(own.eq(1 + both.engine->rank()).all().item<bool>(), "refresh() keeps the buffer of this rank");
    require(added.eq(7).all().item<bool>(), "a new buffer has the values of rank 0");
    if (both.engine->rank() == 0)  // rank 0 deletes the checkpoint
      require(!std::filesystem::exists(both.program->text("job.runs") + "/run/refresh"),
              "the internal checkpoint is deleted");
  }
}

// Freezes a weight for steps 1 and 2 without refresh(): the results equal those of a plain libtorch optimizer.
void freezes_again(Run& run) {
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
      require(same(engine.get(item.key()), item.value()),
              item.key() + " equals plain libtorch under " + how.text(world));
  }
}

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

// A TorchScript module: the error names the unfrozen parameter, which trains after refresh().
void script(Run& run) {
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
    require(error.find("'later' was frozen when the engine was made, and requires a gradient now") != error.npos,
            error);
    const Tensor before = engine.get("kept");
    engine.refresh();
    require(same(engine.get("kept"), before), "the old parameter keeps its value");
    const Tensor later = engine.get("later");
    step();
    require(!same(engine.get("later"), later), "the unfrozen parameter trains");
  }
}

// The errors of get(), set() and save() for a parameter that was replaced.
void uses_replaced(Run& run) {
  Outcomes outcomes(run);
  for (const SharingMode& how : sharing_modes(run.program.world())) {
    Training both(run, how, {});
    both.net.add("a");
    both.net.add("b");
    both.start();
    both.net.unregister_module("b");
    both.net.add("b");
    require(both.engine->get("a.weight").defined(), "the other parameters can be read");
    const std::string read = error_of([&] { both.engine->get("b.weight"); });
    require(error_of([&] {
              both.engine->set("b.weight", zr::TensorKind::value, torch::zeros({10, Parts::kIn}));
            }) == read,
            "set() and get() throw the same error");
    const std::string saved = error_of([&] { both.engine->save(run.program.text("job.runs") + "/none"); });
    require(saved.find("'b.bias' was replaced") != saved.npos, "save() names all replaced parameters: " + saved);
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
    require(equal(train(true), train(false)), "nothing was changed under " + how.text(run.program.world()));
  }
}

void add_linear(Parts& net) { net.register_module("b", torch::nn::Linear(3, 4)); }
// Makes an engine for a model with ordinary parameters and a buffer built by zr::deferred.
void begins_with_deferred_buffer(Run& run) {
  Outcomes outcomes(run);
  for (const SharingMode& how : sharing_modes(run.program.world())) {
    Training one(run, how, {});
    one.net.add("a");
    zr::deferred([&] { one.net.register_buffer("table", torch::ones({3})); });
    outcomes.add(how, error_of([&] { one.start(); }));
  }
}

void nothing(Training&) {}
void next(Training& t) { t.train(1, 2); }

void reaches_nothing(Run& run) {
  rejects(run, nothing, [](Training& t) {
    const Tensor other = torch::ones({3}, torch::requires_grad());
    t.engine->backward(other.sum());
    const std::string error = error_of([&] { t.engine->step(); });
    t.engine->backward(t.net.loss(t.engine->micro_index()));
    t.engine->step();
    require(t.engine->step_index() == 2, "after the error, another loss completes the step");
    throw std::runtime_error(error);
  });
}

// Only the loss of the last rank depends on the model: training works.
void reaches_on_one_rank(Run& run) {
  rejects(run, nothing, [&](Training& t) {
    const Tensor other = torch::ones({3}, torch::requires_grad());
    const bool mine = t.engine->rank() == t.world - 1;
    const Tensor loss = t.net.loss(0);  // zero3 gathers weights on all ranks
    t.engine->backward(mine ? loss : other.sum() + loss.detach());
    t.engine->step();
  });
}

}  // namespace

const engine_tests::Cases& refresh_cases() {
  static const engine_tests::Cases cases{
      {"refresh_continues", [](Run& run) { continues(run, {}); }},
      {"refresh_continues_bf16", [](Run& run) { continues(run, {"train.dtype=bf16"}); }},
      {"refresh_continues_offloaded", [](Run& run) { continues(run, {"offload.optimizer=cpu"}); }},
      {"refresh_saves", saves},
      {"refresh_keeps_buffers", keeps_buffers},
      {"freezes_again", freezes_again},
      {"refresh_script", script},
      {"untrained_used", uses_replaced},
      {"untrained_added",
       [](Run& run) {
         rejects(run, nothing, [](Training& t) {
           t.net.add("b");
           next(t);
         });
       }},
      {"untrained_replaced",
       [](Run& run) {
         rejects(
             run, [](Training& t) { t.net.add("b"); },
             [](Training& t) {
               t.net.unregister_module("b");
               t.net.add("b");
               next(t);
             });
       }},
      {"untrained_unfrozen",
       [](Run& run) {
         rejects(
             run,
             [](Training& t) {
               for (Tensor& p : t.net.add("b")->parameters()) p.set_requires_grad(false);
             },
             [](Training& t) {
               t.net.parts.at("b")->weight.set_requires_grad(true);
               next(t);
             });
       }},
      {"untrained_many",
       [](Run& run) {
         rejects(run, nothing, [](Training& t) {
           for (const char* name : {"b", "c", "d"}) t.net.add(name);
           next(t);
         });
       }},
      {"reaches_nothing", reaches_nothing},
      {"reaches_on_one_rank", reaches_on_one_rank},
      {"refresh_inside_step",
       [](Run& run) {
         rejects(run, nothing,
                 [](Training& t) {
                   t.engine->backward(t.net.loss(t.engine->micro_index()));
                   t.engine->step();
                   t.net.add("b");
                   t.engine->refresh();
                 },
                 {"train.global_batch=" + std::to_string(6 * run.program.world())});
       }},
      {"refresh_inside_evaluation",
       [](Run& run) {
         rejects(run, nothing, [](Training& t) {
           const zr::Engine::Evaluation evaluation(*t.engine);
           t.net.add("b");
           t.engine->refresh();
         });
       }},
      {"refresh_inside_scope",
       [](Run& run) {
         rejects(run, nothing, [](Training& t) {
           const auto scope = zr::gather(t.net.parameters());
           t.engine->refresh();
         });
       }},
      {"refresh_differs",
       [](Run& run) {
         rejects(run, nothing, [](Training& t) {
           t.net.add(t.engine->rank() == 0 ? "b" : "c");
           t.engine->refresh();
         });
       }},
      {"refresh_deferred", [](Run& run) { adds_deferred(run, 0, add_linear); }},
      {"refresh_deferred_on_one_rank", [](Run& run) { adds_deferred(run, 1, add_linear); }},
      {"begins_with_deferred_buffer", begins_with_deferred_buffer},
      {"refresh_deferred_buffer",
       [](Run& run) {
         adds_deferred(run, 0, [](Parts& net) {
           net.register_module("b", torch::nn::BatchNorm1d(torch::nn::BatchNorm1dOptions(3).affine(false)));
         });
       }},
      {"refresh_overlap", [](Run& run) {
         rejects(run, nothing, [](Training& t) {
           t.net.register_parameter("view", t.net.parts.at("a")->weight.detach()[0]);
           t.engine->refresh();
         });
       }}};
  return cases;
}

}  // namespace model_tests
