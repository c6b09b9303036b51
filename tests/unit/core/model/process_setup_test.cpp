// What the engine installs for the process leaves to another user of libtorch what is theirs: here an autograd engine
// of their own, with hooks for saved tensors, as Python has one.
#include "model/process_setup.hpp"

#include <gtest/gtest.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>
#include <torch/torch.h>

#include "model/saved_tensor_offload.hpp"
#include "zr/recompute.hpp"

namespace zr::host {
namespace {

using torch::autograd::Engine;

// Counts what it is used for, and keeps saved tensors twice as large.
class OtherEngine final : public Engine {
 public:
  struct Hooks final : torch::autograd::SavedVariableHooks {
    explicit Hooks(OtherEngine& engine) : engine(engine) {}
    void call_pack_hook(const at::Tensor& tensor) override {
      ++engine.packed;
      kept = tensor.detach() * 2;
    }
    at::Tensor call_unpack_hook() override {
      ++engine.unpacked;
      return kept / 2;
    }
    std::optional<std::pair<c10::SafePyObject, c10::SafePyObject>> retrieve_unpack_hook_data() const override {
      return {};
    }
    OtherEngine& engine;
    at::Tensor kept;
  };

  torch::autograd::variable_list execute(const torch::autograd::edge_list& roots,
                                         const torch::autograd::variable_list& inputs, bool keep_graph,
                                         bool create_graph, bool accumulate_grad,
                                         const torch::autograd::edge_list& outputs) override {
    ++executed;
    return Engine::execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
  }
  std::unique_ptr<torch::autograd::AnomalyMetadata> make_anomaly_metadata() override {
    ++described;
    return Engine::make_anomaly_metadata();
  }
  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    return has_hooks ? std::make_unique<Hooks>(*this) : nullptr;
  }
  /// Makes it libtorch's default. `Number` tells two of them apart.
  template <int Number>
  static OtherEngine& install() {
    torch::autograd::set_default_engine_stub([]() -> Engine& { return instance<Number>(); });
    return instance<Number>();
  }

  bool has_hooks = false;
  int executed = 0, described = 0, packed = 0, unpacked = 0;

 private:
  template <int Number>
  static OtherEngine& instance() {
    static auto* engine = new OtherEngine;  // never destroyed, as libtorch's
    return *engine;
  }
};

// The gradient of a function that saves tensors.
torch::Tensor gradient_of(const std::function<torch::Tensor(const torch::Tensor&)>& loss) {
  const torch::Tensor x = torch::arange(6, torch::kFloat).requires_grad_();
  loss(x).sum().backward();
  return x.grad();
}
torch::Tensor sine(const torch::Tensor& x) { return x.sin(); }  // saves x
torch::Tensor sine_in_block(const torch::Tensor& x) { return checkpoint(sine, x); }
torch::Tensor expected() { return torch::arange(6, torch::kFloat).cos(); }

// Offloads saved tensors of all sizes to memory.
struct Offload {
  int puts = 0;
  std::vector<std::string> records;
  model::SavedTensorOffload offload{
      {1,
       [this](const void* data, int64_t n) {
         ++puts;
         records.emplace_back(static_cast<const char*>(data), n);
         return static_cast<uint64_t>(records.size());
       },
       [this](uint64_t record, void* to) { std::memcpy(to, records[record - 1].data(), records[record - 1].size()); },
       [](const std::vector<uint64_t>&) {}, [](uint64_t) {}},
      {}};
};

// A backward within a backward, `depth` times.
struct Nested : torch::autograd::Function<Nested> {
  static torch::Tensor forward(torch::autograd::AutogradContext* context, const torch::Tensor& x, int64_t depth) {
    context->saved_data["depth"] = depth;
    return x * 2;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    if (const int64_t depth = context->saved_data["depth"].toInt(); depth > 0) {
      const at::AutoGradMode grad(true);
      Nested::apply(torch::ones({1}).requires_grad_(), depth - 1).sum().backward();
    }
    return {gradients[0] * 2, {}};
  }
};

// libtorch counts to 60, then continues on threads, which it starts with the first backward of the process.
TEST(ProcessSetupTest, BackwardsNestDeeplyThoughTheFirstOneRanBefore) {
  torch::autograd::set_default_engine_stub(&Engine::get_base_engine);
  EXPECT_TRUE(at::equal(gradient_of(sine), expected()));
  EXPECT_TRUE(at::equal(gradient_of(sine_in_block), expected()));
  EXPECT_NE(&Engine::get_default_engine(), &Engine::get_base_engine());
  const torch::Tensor x = torch::ones({1}).requires_grad_();
  Nested::apply(x, 150).sum().backward();
  EXPECT_EQ(x.grad().item<float>(), 2);
}

TEST(ProcessSetupTest, AnotherAutogradEngineRunsBackwardAndHasItsHooks) {
  OtherEngine& other = OtherEngine::install<1>();
  model::ProcessSetup::begin_backward_here();
  model::ProcessSetup::begin_backward_here();
  EXPECT_NE(&Engine::get_default_engine(), &other);
  EXPECT_TRUE(at::equal(gradient_of(sine), expected()));
  EXPECT_EQ(other.executed, 1);
  {
    const torch::autograd::DetectAnomalyGuard anomaly(false);
    EXPECT_TRUE(at::equal(gradient_of(sine), expected()));
    EXPECT_GT(other.described, 0);
  }
  other.has_hooks = true;
  EXPECT_TRUE(at::equal(gradient_of(sine), expected()));
  EXPECT_EQ(other.packed, 1);
  EXPECT_EQ(other.unpacked, 1);
}

TEST(ProcessSetupTest, ItsHooksComeBeforeOffloadingAndAfterBlocks) {
  OtherEngine& other = OtherEngine::install<2>();
  model::ProcessSetup::count_cpu_memory();  // other memory is not offloaded
  {
    Offload offload;
    EXPECT_TRUE(at::equal(gradient_of([](const torch::Tensor& x) { return (x * 1).sin(); }), expected()));
    EXPECT_EQ(offload.puts, 1);
    other.has_hooks = true;
    EXPECT_TRUE(at::equal(gradient_of([](const torch::Tensor& x) { return (x * 1).sin(); }), expected()));
    EXPECT_EQ(offload.puts, 1);
    EXPECT_EQ(other.packed, 1);
  }
  other.packed = 0;
  EXPECT_TRUE(at::equal(gradient_of(sine_in_block), expected()));
  EXPECT_EQ(other.packed, 0) << "the block drops the tensors that its operators save";
  EXPECT_EQ(other.executed, 3);
}

TEST(ProcessSetupTest, AnEngineThatBecomesTheDefaultLaterIsUsedToo) {
  OtherEngine& first = OtherEngine::install<3>();
  EXPECT_TRUE(at::equal(gradient_of(sine_in_block), expected()));
  EXPECT_EQ(first.executed, 1);
  OtherEngine& second = OtherEngine::install<4>();
  EXPECT_TRUE(at::equal(gradient_of(sine_in_block), expected()));
  EXPECT_EQ(first.executed, 1);
  EXPECT_EQ(second.executed, 1);
  EXPECT_NE(&Engine::get_default_engine(), &second) << "the block has put Zeroth's on top of it";
}

}  // namespace
}  // namespace zr::host
