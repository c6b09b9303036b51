// zr::load_weights(): what a job has saved, in a module that no engine trains.
#include <gmock/gmock.h>
#include <torch/script.h>

#include <atomic>
#include <thread>

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
  explicit Net(bool ties = true) {
    register_module("a", a);
    register_module("norm", norm);
    head = register_parameter("head", ties ? a->weight : torch::zeros({4, 4}));
    register_buffer("empty", torch::zeros({0, 3}));
  }
  torch::Tensor loss(const torch::Tensor& x) { return norm->forward(a->forward(x)).matmul(head).square().mean(); }
  torch::nn::Linear a{4, 4};
  torch::nn::BatchNorm1d norm{4};
  torch::Tensor head;
};

// Has a buffer of Net in another type.
struct Integers : torch::nn::Module {
  struct Norm : torch::nn::Module {
    Norm() { register_buffer("running_mean", torch::zeros({4}, torch::kLong)); }
  };
  Integers() { register_module("norm", std::make_shared<Norm>()); }
};

// Trains a Net for two steps on all ranks; returns the folder of its checkpoint.
std::string trained(Run& run, Net& net, std::unique_ptr<zr::Engine>& engine) {
  engine = std::make_unique<zr::Engine>(run.program, net);
  for (int step = 0; step < 2; ++step) do {
      engine->backward(net.loss(torch::rand({8, 4}).to(engine->dtype())).to(torch::kFloat));
    } while (!engine->step());
  return engine->save(run.program.text("job.runs") + "/saved");
}

MULTIRANK_TEST(LoadWeightsTest, GivesAPlainModuleWhatTheJobHasSaved, {2},
               zr::test::combine({zr::test::kLayouts, {"train.dtype=fp32", "train.dtype=bf16"}})) {
  Net net;
  std::unique_ptr<zr::Engine> engine;
  const std::string folder = trained(run, net, engine);
  Net fp32, bf16, fp16, fp64;
  bf16.to(torch::kBFloat16);  // the counter of batches too
  fp16.to(torch::kHalf);
  fp64.to(torch::kDouble);
  const zr::LoadReport report = zr::load_weights(fp32, run.program.text("job.runs") + "/saved");
  EXPECT_EQ(report.folder, folder) << "the newest checkpoint of the folder";
  for (Net* other : {&bf16, &fp16, &fp64}) zr::load_weights(*other, folder);
  for (const auto& item : fp32.named_parameters()) {
    const torch::Tensor trained = engine->get(item.key());  // the fp32 master
    EXPECT_TRUE(same(item.value(), trained)) << item.key();
    EXPECT_TRUE(item.value().requires_grad()) << item.key();
    for (Net* other : {&bf16, &fp16, &fp64}) {
      const torch::Tensor loaded = other->named_parameters()[item.key()];
      EXPECT_TRUE(same(loaded, trained.to(loaded.scalar_type()))) << item.key() << loaded.scalar_type();
    }
  }
  EXPECT_TRUE(fp32.head.is_same(fp32.a->weight)) << "tied parameters stay tied";
  EXPECT_TRUE(same(fp32.norm->running_var, engine->buffer("norm.running_var").to(torch::kFloat)));
  EXPECT_EQ(fp32.norm->num_batches_tracked.item<int64_t>(), engine->buffer("norm.num_batches_tracked").item<int64_t>());
  EXPECT_EQ(fp16.norm->num_batches_tracked.item<int64_t>(), fp32.norm->num_batches_tracked.item<int64_t>());
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
          ": does not fit the module; missing: weight '0.weight', weight '0.bias'; unexpected: weight 'head', "
          "weight 'a.bias', weight 'norm.weight', weight 'norm.bias', buffer 'norm.running_mean' and 2 more; pass "
          "strict = false to zr::load_weights() to load only the tensors that fit");
  EXPECT_TRUE(same(other->parameters()[0], before));
  Net wide;
  wide.a->bias.set_data(torch::zeros({5}));
  const zr::LoadReport report = zr::load_weights(wide, folder, false);
  EXPECT_EQ(report.other_shape, std::vector<std::string>{"weight 'a.bias'"});
  EXPECT_EQ(report.missing.size() + report.unexpected.size(), 0u);
  EXPECT_TRUE(same(wide.norm->weight, engine->get("norm.weight")));
  Integers integers;
  EXPECT_EQ(user_error_of([&] { zr::load_weights(integers, folder, false); }),
            folder +
                ": buffer 'norm.running_mean' is F32, but the module has it as I64; values of fp32, bf16, fp16 and "
                "integers are converted to floating-point types only");
  EXPECT_EQ(user_error_of([&] { zr::load_weights(net, folder); }),
            "zr::load_weights(): weight 'head' belongs to an engine; load it with engine.load(), or call "
            "engine.release() before");
  auto deferred = zr::deferred([] { return std::make_shared<Net>(); });
  EXPECT_EQ(user_error_of([&] { zr::load_weights(*deferred, folder); }),
            "zr::load_weights(): weight 'head' has no memory: it was made with zr::deferred or on the device meta, its "
            "engine was destroyed without engine.release(), or its storage was freed; give it memory, or load it with "
            "an engine");
  EXPECT_EQ(user_error_of([&] { zr::load_weights(*other, ""); }),
            "zr::load_weights(module, from): the file name is empty; name a checkpoint or a file of weights");
}

// A module with one weight and one buffer, which the test replaces.
struct Pair : torch::nn::Module {
  Pair(const torch::Tensor& weight, const torch::Tensor& buffer) {
    register_parameter("weight", weight, /*requires_grad=*/false);
    register_buffer("buffer", buffer);
  }
};

// Each module is rejected before anything is loaded: also the first tensor, which alone could be loaded, stays zero.
MULTIRANK_TEST(LoadWeightsTest, RejectsTensorsThatCannotHoldTheValues, {1}) {
  const std::string path = run.program.text("job.runs") + "/pair.pt";
  c10::Dict<std::string, torch::Tensor> saved;
  saved.insert_or_assign("weight", torch::ones({2, 3}));
  saved.insert_or_assign("buffer", torch::ones({2, 3}));
  const std::vector<char> bytes = torch::pickle_save(c10::IValue(saved));
  std::ofstream(path, std::ios::binary).write(bytes.data(), std::ssize(bytes));
  const auto rejected = [&](const torch::Tensor& weight, const torch::Tensor& buffer) {
    Pair pair(weight, buffer);
    const std::string error = user_error_of([&] { zr::load_weights(pair, path); });
    EXPECT_EQ(weight.sum().item<float>(), 0) << error;
    return error;
  };
  const auto zeros = [] { return torch::zeros({2, 3}); };
  const std::string buffer = "zr::load_weights(): buffer 'buffer' ";
  const std::string no_memory = buffer + "has no memory: it was made with zr::deferred or on the device meta, its ";
  const torch::Tensor freed = zeros();
  freed.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl()->reset();
  for (const torch::Tensor& empty : {torch::empty({2, 3}, torch::kMeta), freed})
    EXPECT_THAT(rejected(zeros(), empty), ::testing::StartsWith(no_memory));
  EXPECT_EQ(rejected(zeros(), torch::zeros({1, 3}).expand({2, 3})),
            buffer + "has elements that share memory, as expand() makes them; use clone() in the module");
  torch::Tensor inference;
  {
    const c10::InferenceMode mode;
    inference = zeros();
  }
  EXPECT_EQ(rejected(zeros(), inference),
            buffer + "was made in c10::InferenceMode; call zr::load_weights() in that mode too");
  const torch::Tensor memory = torch::zeros({40});
  const auto at = [&](int64_t first, int64_t rows, int64_t columns) {
    return memory.as_strided({2, 3}, {rows, columns}, first);
  };
  const std::string share =
      "zr::load_weights(): weight 'weight' and buffer 'buffer' share a part of their memory; give "
      "each its own, or share all of it";
  EXPECT_EQ(rejected(at(0, 3, 1), at(4, 3, 1)), share);
  EXPECT_EQ(rejected(at(0, 10, 2), at(2, 10, 2)), share) << "not contiguous";
  Pair apart(at(0, 10, 2), at(1, 10, 2)), views(at(0, 3, 1), at(0, 3, 1));
  for (Pair* pair : {&apart, &views}) {
    memory.zero_();
    zr::load_weights(*pair, path);
    for (const char* name : {"weight", "buffer"})
      EXPECT_TRUE(
          same(pair == &apart ? (name[0] == 'w' ? at(0, 10, 2) : at(1, 10, 2)) : at(0, 3, 1), torch::ones({2, 3})));
  }
}

// As PyTorch's state dictionaries, which list a tied weight under each of its names.
MULTIRANK_TEST(LoadWeightsTest, LoadsTiedWeightsIntoAModuleThatDoesNotTieThem, {1}) {
  Net net;
  std::unique_ptr<zr::Engine> engine;
  const std::string folder = trained(run, net, engine);
  Net untied(false);
  const zr::LoadReport report = zr::load_weights(untied, folder);
  EXPECT_EQ(report.missing.size() + report.unexpected.size(), 0u);
  for (const char* name : {"head", "a.weight"})
    EXPECT_TRUE(same(untied.named_parameters()[name], engine->get("head"))) << name;
}

// The job keeps one checkpoint, and may remove that which is being read.
MULTIRANK_TEST(LoadWeightsTest, ReadsTheNewestCheckpointOfARunningJob, {1}) {
  const std::string folder = run.program.text("job.runs") + "/checkpoints";
  std::vector<std::string> overrides(run.arguments.begin() + 1, run.arguments.end());
  overrides.insert(overrides.end(), {"job.name=kept", "checkpoint.dir=" + folder, "checkpoint.every=1",
                                     "checkpoint.keep=1", "train.steps=100"});
  const Run job(run.arguments[0], overrides);
  Net net, reader;
  zr::Engine engine(job.program, net);
  std::atomic<bool> is_done = false;
  std::thread loader;
  int loads = 0;
  std::string failure;
  while (!engine.done()) {
    engine.backward(net.loss(torch::rand({8, 4})));
    engine.step();
    if (engine.step_index() != 1) continue;
    loader = std::thread([&] {
      try {
        for (; !is_done || loads == 0; ++loads) zr::load_weights(reader, folder);
      } catch (const std::exception& error) {
        failure = error.what();
      }
    });
  }
  is_done = true;
  loader.join();
  EXPECT_EQ(failure, "");
  EXPECT_GT(loads, 0);
}

// Files of other programs, and tied weights that differ in them.
MULTIRANK_TEST(LoadWeightsTest, LoadsFilesOfOtherPrograms, {1}) {
  torch::nn::Sequential model(torch::nn::Linear(4, 3), torch::nn::BatchNorm1d(3));
  const std::string file = ZR_SOURCE_DIR "/tests/multirank/engine/state_dicts/state_dict.pt";
  EXPECT_EQ(zr::load_weights(*model, file).folder, file);
  EXPECT_TRUE(same(model->named_parameters()["0.weight"], torch::arange(12).view({3, 4}) / 8.0 + 8));
  EXPECT_EQ(model->named_buffers()["1.num_batches_tracked"].item<int64_t>(), 7);
  torch::jit::Module script("script"), norm("norm");
  norm.register_buffer("num_batches_tracked", torch::zeros({}, torch::kLong));
  script.register_module("1", norm);
  zr::load_weights(script, file, false);
  EXPECT_EQ(norm.buffers().size(), 1u);
  EXPECT_EQ((*norm.buffers().begin()).item<int64_t>(), 7);
  Net net;
  c10::Dict<std::string, torch::Tensor> weights;
  for (const auto& item : net.named_parameters()) weights.insert_or_assign(item.key(), item.value().detach());
  for (const auto& item : net.named_buffers()) weights.insert_or_assign(item.key(), item.value());
  const std::string path = run.program.text("job.runs") + "/differs.pt";
  for (const torch::Tensor& other : {torch::ones({4, 4}), torch::ones({8, 4})}) {
    weights.insert_or_assign("a.weight", other);
    weights.insert_or_assign("head", torch::zeros({4, 4}));
    const std::vector<char> bytes = torch::pickle_save(c10::IValue(weights));
    std::ofstream(path, std::ios::binary).write(bytes.data(), std::ssize(bytes));
    EXPECT_EQ(user_error_of([&] { zr::load_weights(net, path); }),
              path +
                  ": does not fit the module; unexpected: weight 'a.weight', which differs from 'head'; pass strict = "
                  "false to zr::load_weights() to load only the tensors that fit");
    EXPECT_EQ(zr::load_weights(net, path, false).unexpected.size(), 1u);
    EXPECT_TRUE(same(net.a->weight, torch::zeros({4, 4})));
  }
}

}  // namespace
}  // namespace load_weights_tests
