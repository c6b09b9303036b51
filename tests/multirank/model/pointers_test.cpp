// Every way in libtorch to access the memory of a parameter without the dispatcher, and torch::load().
#include <torch/torch.h>

#include <cstring>
#include <sstream>

#include "multirank/model/model_run.hpp"
#include "zr/parameters.hpp"

namespace model_tests {
namespace {

struct Path {
  const char* name;
  std::function<const void*(const torch::Tensor&)> pointer;
  bool writable;
};

const std::vector<Path>& paths() {
  using T = torch::Tensor;
  static const std::vector<Path> all{
      {"data_ptr()", [](const T& t) { return t.data_ptr(); }, true},
      {"data_ptr<float>()", [](const T& t) { return t.data_ptr<float>(); }, true},
      {"mutable_data_ptr()", [](const T& t) { return t.mutable_data_ptr(); }, true},
      {"mutable_data_ptr<float>()", [](const T& t) { return t.mutable_data_ptr<float>(); }, true},
      {"const_data_ptr()", [](const T& t) { return t.const_data_ptr(); }, false},
      {"const_data_ptr<float>()", [](const T& t) { return t.const_data_ptr<float>(); }, false},
      {"accessor", [](const T& t) { return t.accessor<float, 2>().data(); }, true},
      {"packed_accessor32", [](const T& t) { return t.packed_accessor32<float, 2>().data(); }, true},
      {"packed_accessor64", [](const T& t) { return t.packed_accessor64<float, 2>().data(); }, true},
      {"storage().data()", [](const T& t) { return t.storage().data(); }, false},
      {"storage().mutable_data()", [](const T& t) { return t.storage().mutable_data(); }, true},
      {"storage().data_ptr()", [](const T& t) { return t.storage().data_ptr().get(); }, false},
      {"storage().mutable_data_ptr()", [](const T& t) { return t.storage().mutable_data_ptr().mutable_get(); }, true},
      {"detach().data_ptr()", [](const T& t) { return t.detach().data_ptr(); }, true},
      {"view().data_ptr()", [](const T& t) { return t.view(-1).data_ptr(); }, true},
      {"variable_data().data_ptr()", [](const T& t) { return t.variable_data().data_ptr(); }, true},
      {"TensorImpl::data()", [](const T& t) { return t.unsafeGetTensorImpl()->data(); }, false},
      {"TensorImpl::mutable_data()", [](const T& t) { return t.unsafeGetTensorImpl()->mutable_data(); }, true}};
  return all;
}

// Tries every path outside and inside a zr::gather scope, before and after operators; writes through writable pointers.
RANK_BODY(pointers, Run) {
  const int world = run.program.world();
  Outcomes all(run);
  for (const SharingMode& how : sharing_modes(world)) {
    torch::manual_seed(3);
    torch::nn::Linear net(16, 16);
    zr::Engine engine(program_of(run, how), *net);
    const auto try_all = [&](const std::string& where) {
      std::map<std::string, std::string> outcomes;  // paths by outcome
      for (const Path& path : paths()) {
        std::string outcome = error_of([&] {
          const void* pointer = path.pointer(net->weight);
          if (path.writable) static_cast<float*>(const_cast<void*>(pointer))[0] = 0.5f;
          EXPECT_NE(static_cast<const float*>(pointer)[1], 0) << "the memory holds values";
        });
        if (outcome.empty()) outcome = "memory";
        outcomes[outcome] += (outcomes[outcome].empty() ? "" : ", ") + std::string(path.name);
      }
      for (const auto& [outcome, names] : outcomes)
        all.add(how, where + ", " + (outcomes.size() == 1 ? std::to_string(paths().size()) + " ways" : names) + ": " +
                         outcome);
    };
    const auto backward = [&] { engine.backward(net(torch::ones({2, 16})).square().mean()); };
    try_all("at first");
    backward();
    try_all("after backward");
    engine.step();
    {
      const auto scope = zr::gather(net->weight);
      try_all("within zr::gather");
    }
    try_all("after zr::gather");
    EXPECT_EQ(engine.get("weight").view(-1)[0].item<float>(), 0.5f) << "the weight has the written value";
    backward();
    engine.step();
  }
}

// Loads a file of torch::save() into a model in training, inside a scope.
torch::nn::Sequential small(int64_t out, uint64_t seed) {
  torch::manual_seed(seed);
  return torch::nn::Sequential(torch::nn::Linear(16, 16), torch::nn::BatchNorm1d(16), torch::nn::Linear(16, out));
}

void load(torch::nn::Sequential& net, int64_t out) {
  std::stringstream file;
  torch::save(small(out, 99), file);
  torch::load(net, file);
}

RANK_BODY(loads_in_scope, Run) {
  Outcomes outcomes(run);
  for (const SharingMode& how : sharing_modes(run.program.world())) {
    auto net = small(4, 3);
    const auto expected = small(4, 99);
    zr::Engine engine(program_of(run, how), *net);
    const auto step = [&] {
      engine.backward(net->forward(torch::arange(32, torch::kFloat).sin().view({2, 16})).square().mean());
      engine.step();
    };
    step();
    {
      const auto scope = zr::gather(net->parameters());
      load(net, 4);
    }
    for (const auto& item : expected->named_parameters()) {
      EXPECT_TRUE(same(engine.get(item.key()), item.value())) << item.key() + " has the value in the file";
      EXPECT_TRUE(same(net->named_parameters()[item.key()] + 0, item.value()))
          << "the model computes with " + item.key();
    }
    step();
    EXPECT_FALSE(same(engine.get("0.weight"), expected->named_parameters()["0.weight"]))
        << "training continues from it";
    outcomes.add(how, "loaded");
  }
}

// Loads a file in other ways: outside a scope, with a weight of another shape, into a deferred model.
void loads(Run& run, const std::function<void(torch::nn::Sequential&, const zr::Program&)>& act) {
  Outcomes outcomes(run);
  for (const SharingMode& how : sharing_modes(run.program.world())) {
    auto net = small(4, 3);
    outcomes.add(how, error_of([&] { act(net, program_of(run, how)); }));
  }
}

// --- Writes to weights that the version counter of the parameter does not count ---

// Each write changes `weight` after a step. `early` is a weight.data() that the program took earlier.
struct Write {
  const char* name;
  std::function<void(const torch::Tensor& weight, const torch::Tensor& early)> write;
  std::function<void(const torch::Tensor& weight)> counted;  // the same write, counted by libtorch
};

const std::vector<Write>& writes() {
  using T = torch::Tensor;
  const auto mask = [] { return torch::arange(256).remainder(3).ne(0).view({16, 16}); };
  const auto mul = [mask](const T& w) { w.mul_(mask().to(w.scalar_type())); };
  static const std::vector<Write> all{
      {"weight.data().mul_(mask)", [mul](const T& w, const T&) { mul(w.data()); }, mul},
      {"weight.variable_data().mul_(mask)", [mul](const T& w, const T&) { mul(w.variable_data()); }, mul},
      {"weight.tensor_data().mul_(mask)", [mul](const T& w, const T&) { mul(w.tensor_data()); }, mul},
      {"weight.detach().mul_(mask)", [mul](const T& w, const T&) { mul(w.detach()); }, mul},
      {"weight.t().data().mul_(mask)", [mul](const T& w, const T&) { mul(w.data().t().data().t()); }, mul},
      {"weight.data()[3][5] = 1", [](const T& w, const T&) { w.data()[3][5] = 1; }, [](const T& w) { w[3][5] = 1; }},
      {"a kept weight.data()", [mul](const T&, const T& early) { mul(early); }, mul},
      {"a row of a kept weight.data()", [](const T&, const T& early) { early[7].zero_(); },
       [](const T& w) { w[7].zero_(); }},
      {"weight.zero_() undone by copy_()",  // the fp32 master is unchanged
       [](const T& w, const T&) {
         const T own = w.clone();
         w.zero_();
         w.copy_(own);
       },
       [](const T&) {}},
      {"weight.zero_() undone in another zr::gather scope",
       [](const T& w, const T&) {
         T own;
         {
           const auto scope = zr::gather(w);
           own = w.clone();
           w.zero_();
         }
         const auto scope = zr::gather(w);
         w.copy_(own);
       },
       [](const T&) {}},
      {"all elements by data_ptr()", [](const T& w, const T&) { std::memset(w.data_ptr(), 0, w.nbytes()); },
       [](const T& w) { w.zero_(); }}};
  return all;
}

struct Variant {
  const char* dtype;
  bool before;  // `early` is taken before the engine is made, from a model of that dtype
};

// Trains steps, each but one followed by the write, and sets `result` to the weights; returns the error or "".
std::string after_writes(const Run& run, const SharingMode& how, const Variant& variant, const Write& one, bool counted,
                         torch::Tensor& result) {
  return error_of([&] {
    torch::manual_seed(3);
    torch::nn::Linear net(16, 16);
    const zr::Program program = program_of(run, how, {std::string("train.dtype=") + variant.dtype, "train.steps=5"});
    torch::Tensor early;
    if (variant.before) {
      if (variant.dtype == std::string("bf16")) net->to(torch::kBFloat16);
      early = net->weight.data();
    }
    zr::Engine engine(program, *net);
    if (!variant.before) early = net->weight.data();
    for (int i = 0; i < 5; ++i) {
      const torch::Tensor x = torch::arange(32, torch::kFloat).add(i).sin().view({2, 16}).to(engine.dtype());
      engine.backward(net(x).square().mean());
      engine.step();
      if (i == 3) continue;
      const torch::NoGradGuard no_grad;
      counted ? one.counted(net->weight) : one.write(net->weight, early);
    }
    result = engine.get("weight");
  });
}

RANK_BODY(writes_uncounted, Run) {
  Outcomes outcomes(run);
  for (const SharingMode& how : sharing_modes(run.program.world()))
    for (const Write& one : writes()) {
      std::map<std::string, std::string> all;  // variants by outcome
      for (const Variant& variant : {Variant{"fp32", false}, {"bf16", false}, {"fp32", true}, {"bf16", true}}) {
        torch::Tensor expected, result;
        EXPECT_TRUE(after_writes(run, how, variant, one, true, expected).empty()) << "counted writes work";
        std::string outcome = after_writes(run, how, variant, one, false, result);
        if (outcome.empty()) outcome = same(expected, result) ? "taken over" : "LOST";
        std::string& of = all[outcome];
        of += (of.empty() ? "" : " and ") + std::string(variant.dtype) + (variant.before ? " from before" : "");
      }
      for (const auto& [outcome, variants] : all)
        outcomes.add(how, std::string(one.name) + (all.size() == 1 ? "" : ", " + variants) + ": " + outcome);
    }
}

RANK_BODY(loads_outside, Run) {
  loads(run, [](torch::nn::Sequential& net, const zr::Program& program) {
    zr::Engine engine(program, *net);
    load(net, 4);
    engine.backward(net->forward(torch::ones({2, 16})).square().mean());
  });
}

RANK_BODY(loads_other_shape, Run) {
  loads(run, [](torch::nn::Sequential& net, const zr::Program& program) {
    zr::Engine engine(program, *net);
    const auto scope = zr::gather(net->parameters());
    load(net, 5);
  });
}

RANK_BODY(loads_deferred, Run) {
  loads(run, [](torch::nn::Sequential&, const zr::Program&) {
    auto net = zr::deferred([] { return small(4, 3); });
    load(net, 4);
  });
}

// model_pointers.txt names the bodies above.
TEST_F(EngineModelTest, SLOW_ReturnsWritablePointersOrThrows) { check_outcomes("model_pointers.txt", 10); }

}  // namespace
}  // namespace model_tests
