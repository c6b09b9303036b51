// zr::load_weights(): what a job has saved, in a module that no engine trains.
#include "support/engine_test.hpp"
#include "support/layouts.hpp"
#include "support/user_error.hpp"
#include "zr/parameters.hpp"
#include "zr/weights.hpp"

namespace load_weights_tests {
namespace {

using namespace engine_tests;
using zr::test::user_error_of;

class LoadWeightsTest : public EngineTest {};

// "a" is tied to "head"; a batch norm has buffers of two types; "empty" has no elements.
struct Net : torch::nn::Module {
  Net() {
    register_module("a", a);
    register_module("norm", norm);
    head = register_parameter("head", a->weight);
    register_buffer("empty", torch::zeros({0, 3}));
  }
  torch::Tensor loss(const torch::Tensor& x) { return norm->forward(a->forward(x)).matmul(head).square().mean(); }
  torch::nn::Linear a{4, 4};
  torch::nn::BatchNorm1d norm{4};
  torch::Tensor head;
};

// Trains a Net for two steps on all ranks; returns the folder of its checkpoint.
std::string trained(Run& run, Net& net, std::unique_ptr<zr::Engine>& engine) {
  engine = std::make_unique<zr::Engine>(run.program, net);
  for (int step = 0; step < 2; ++step) do {
      engine->backward(net.loss(torch::rand({8, 4})));
    } while (!engine->step());
  return engine->save(run.program.text("job.runs") + "/saved");
}

MULTIRANK_TEST(LoadWeightsTest, GivesAPlainModuleWhatTheJobHasSaved, {2},
               zr::test::combine({zr::test::kLayouts, {"train.dtype=fp32", "train.dtype=bf16"}})) {
  Net net;
  std::unique_ptr<zr::Engine> engine;
  const std::string folder = trained(run, net, engine);
  Net fp32, bf16;
  bf16.to(torch::kBFloat16);
  const zr::LoadReport report = zr::load_weights(fp32, run.program.text("job.runs") + "/saved");
  EXPECT_EQ(report.folder, folder) << "the newest checkpoint of the folder";
  zr::load_weights(bf16, folder);
  for (const auto& item : fp32.named_parameters()) {
    const torch::Tensor trained = engine->get(item.key());  // the fp32 master
    EXPECT_TRUE(same(item.value(), trained)) << item.key();
    EXPECT_TRUE(same(bf16.named_parameters()[item.key()], trained.to(torch::kBFloat16))) << item.key();
    EXPECT_TRUE(item.value().requires_grad()) << item.key();
  }
  EXPECT_TRUE(fp32.head.is_same(fp32.a->weight)) << "tied parameters stay tied";
  EXPECT_TRUE(same(fp32.norm->running_var, engine->buffer("norm.running_var").to(torch::kFloat)));
  EXPECT_EQ(fp32.norm->num_batches_tracked.item<int64_t>(), engine->buffer("norm.num_batches_tracked").item<int64_t>());
}

MULTIRANK_TEST(LoadWeightsTest, NamesWhatDoesNotFitAndChangesNothing, {1}) {
  Net net;
  std::unique_ptr<zr::Engine> engine;
  const std::string folder = trained(run, net, engine);
  torch::nn::Sequential other(torch::nn::Linear(4, 3));
  const torch::Tensor before = other->parameters()[0].clone();
  EXPECT_EQ(
      user_error_of([&] { zr::load_weights(*other, folder); }),
      folder +
          ": does not fit the module; missing: weight '0.weight', weight '0.bias'; unexpected: weight 'a.weight', "
          "weight 'a.bias', weight 'norm.weight', weight 'norm.bias', buffer 'norm.running_mean' and 2 more; pass "
          "strict = false to zr::load_weights() to load only the tensors that fit");
  EXPECT_TRUE(same(other->parameters()[0], before));
  Net wide;
  wide.a->bias = wide.a->register_parameter("bias", torch::zeros({5}));
  const zr::LoadReport report = zr::load_weights(wide, folder, false);
  EXPECT_EQ(report.other_shape, std::vector<std::string>{"weight 'a.bias'"});
  EXPECT_EQ(report.missing.size() + report.unexpected.size(), 0u);
  EXPECT_TRUE(same(wide.norm->weight, engine->get("norm.weight")));
  Net integer;
  integer.norm->weight = integer.norm->register_buffer("running_mean", torch::zeros({4}, torch::kLong));
  EXPECT_EQ(user_error_of([&] { zr::load_weights(integer, folder); }),
            folder +
                ": buffer 'norm.running_mean' is F32, but the module has it as I64; only floating-point types are "
                "converted");
  EXPECT_EQ(user_error_of([&] { zr::load_weights(net, folder); }),
            "zr::load_weights(): weight 'a.weight' belongs to an engine; load it with engine.load(), or call "
            "engine.release() before");
  auto deferred = zr::deferred([] { return std::make_shared<Net>(); });
  EXPECT_EQ(user_error_of([&] { zr::load_weights(*deferred, folder); }),
            "zr::load_weights(): weight 'a.weight' has no memory; construct the module without zr::deferred, or create "
            "an engine and call engine.load()");
  EXPECT_EQ(user_error_of([&] { zr::load_weights(*other, ""); }),
            "zr::load_weights(module, from): the file name is empty; name a checkpoint or a file of weights");
}

// A state dictionary of PyTorch, and one in which tied weights differ.
MULTIRANK_TEST(LoadWeightsTest, LoadsStateDictionaries, {1}) {
  torch::nn::Sequential model(torch::nn::Linear(4, 3), torch::nn::BatchNorm1d(3));
  const std::string file = ZR_SOURCE_DIR "/tests/multirank/engine/state_dicts/state_dict.pt";
  EXPECT_EQ(zr::load_weights(*model, file).folder, file);
  EXPECT_TRUE(same(model->named_parameters()["0.weight"], torch::arange(12).view({3, 4}) / 8.0 + 8));
  EXPECT_EQ(model->named_buffers()["1.num_batches_tracked"].item<int64_t>(), 7);
  Net net;
  c10::Dict<std::string, torch::Tensor> weights;
  for (const auto& item : net.named_parameters()) weights.insert(item.key(), item.value().detach());
  for (const auto& item : net.named_buffers()) weights.insert(item.key(), item.value());
  weights.insert("a.weight", torch::ones({4, 4}));
  weights.insert("head", torch::zeros({4, 4}));
  const std::string path = run.program.text("job.runs") + "/differs.pt";
  const std::vector<char> bytes = torch::pickle_save(c10::IValue(weights));
  std::ofstream(path, std::ios::binary).write(bytes.data(), std::ssize(bytes));
  EXPECT_EQ(user_error_of([&] { zr::load_weights(net, path); }),
            path +
                ": does not fit the module; unexpected: weight 'head', which differs from 'a.weight'; pass strict = "
                "false to zr::load_weights() to load only the tensors that fit");
  EXPECT_EQ(zr::load_weights(net, path, false).unexpected.size(), 1u);
  EXPECT_TRUE(same(net.head, torch::ones({4, 4})));
}

}  // namespace
}  // namespace load_weights_tests
