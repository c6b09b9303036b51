// How engine.load() converts a state dictionary of PyTorch: which values it reads, and what it leaves in TMPDIR. The
// messages are in tests/golden/state_dict_file_errors.txt.
#include <ATen/record_function.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/resource.h>

#include <csignal>

#include "support/engine_test.hpp"
#include "support/layouts.hpp"
#include "support/user_error.hpp"
#include "zr/error.hpp"

namespace state_dict_file_tests {
namespace {

using namespace engine_tests;
using zr::test::user_error_of;
using Weights = c10::Dict<std::string, torch::Tensor>;

class StateDictFileTest : public EngineTest {};

const std::string kFolder = ZR_SOURCE_DIR "/tests/multirank/engine/state_dicts/";

// The weight of `a` has a second name, and the buffer has no elements.
struct Tied : torch::nn::Module {
  Tied() {
    register_module("a", a);
    tied = register_parameter("tied", a->weight);
    register_buffer("empty", torch::zeros({0, 3}));
  }
  torch::nn::Linear a{4, 3};
  torch::Tensor tied;
};

torch::Tensor weight() { return torch::arange(12, torch::kFloat).view({3, 4}); }

Weights weights_of_tied() {
  Weights weights;
  weights.insert("a.weight", weight());
  weights.insert("a.bias", torch::zeros({3}));
  return weights;
}

// Rank 0 writes the bytes, and all ranks use an empty folder of the run for temporary files; returns the path.
std::string written(const Run& run, const std::string& name, const std::string& bytes) {
  const std::string runs = run.program.text("job.runs"), path = runs + "/" + name;
  if (run.program.rank() == 0) {
    fs::create_directories(runs + "/temporary");
    std::ofstream(path, std::ios::binary) << bytes;
  }
  ::setenv("TMPDIR", (runs + "/temporary").c_str(), 1);
  return path;
}

std::string saved(const Run& run, const Weights& weights) {
  const std::vector<char> bytes = torch::pickle_save(c10::IValue(weights));
  return written(run, "weights.pt", {bytes.begin(), bytes.end()});
}

// A safetensors file with fp32 tensors.
std::string safetensors(const std::vector<std::pair<std::string, torch::Tensor>>& tensors) {
  Json header;
  std::string data;
  for (const auto& [name, tensor] : tensors) {
    const torch::Tensor values = tensor.contiguous();
    header[name] = {{"dtype", "F32"},
                    {"shape", values.sizes().vec()},
                    {"data_offsets", {data.size(), data.size() + values.nbytes()}}};
    data.append(static_cast<const char*>(values.data_ptr()), values.nbytes());
  }
  const std::string text = header.dump();
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes.push_back(static_cast<char>(text.size() >> (8 * i)));
  return bytes + text + data;
}

bool has_nothing(const fs::path& folder) { return fs::directory_iterator(folder) == fs::directory_iterator(); }

MULTIRANK_TEST(StateDictFileTest, NegatesViewsWithTheNegativeBit, {1, 2}) {
  torch::nn::Sequential model(torch::nn::Linear(2, 3));
  zr::Engine engine(run.program, *model);
  Weights weights;
  const torch::Tensor negative = torch::imag(torch::view_as_complex(torch::ones({3, 2, 2})).conj());
  ASSERT_TRUE(negative.is_neg());
  weights.insert("0.weight", negative);
  weights.insert("0.bias", torch::_neg_view(torch::arange(3, torch::kFloat)));
  engine.load(saved(run, weights), {.weights_only = true});
  EXPECT_TRUE(torch::equal(engine.get("0.weight"), torch::full({3, 2}, -1.0)));
  EXPECT_TRUE(torch::equal(engine.get("0.bias"), -torch::arange(3, torch::kFloat)));
}

MULTIRANK_TEST(StateDictFileTest, LoadsTiedWeightsWithBothNames, {2},
               zr::test::combine({zr::test::kLayouts, {"train.dtype=fp32", "train.dtype=bf16"}})) {
  Weights shared = weights_of_tied(), copied = weights_of_tied();
  shared.insert("tied", shared.at("a.weight"));
  copied.insert("tied", weight());
  for (const Weights& weights : {shared, copied}) {
    Tied model;
    zr::Engine engine(run.program, model);
    const zr::LoadReport report = engine.load(saved(run, weights), {.weights_only = true, .convert = true});
    EXPECT_TRUE(report.unexpected.empty());
    EXPECT_TRUE(torch::equal(engine.get("a.weight"), weight()));
    EXPECT_TRUE(torch::equal(engine.get("tied"), weight()));
  }
}

MULTIRANK_TEST(StateDictFileTest, LoadsTiedWeightsOfSafetensorsWithBothNames, {2}) {
  Tied model;
  zr::Engine engine(run.program, model);
  const std::string bytes = safetensors(
      {{"a.weight", weight()}, {"a.bias", torch::zeros({3})}, {"empty", torch::zeros({0, 3})}, {"tied", weight()}});
  const zr::LoadReport report = engine.load(written(run, "weights.safetensors", bytes));
  EXPECT_TRUE(report.unexpected.empty());
  EXPECT_TRUE(torch::equal(engine.get("tied"), weight()));
}

MULTIRANK_TEST(StateDictFileTest, ReportsTheOtherNameIfTiedWeightsDiffer, {2}) {
  Tied model;
  zr::Engine engine(run.program, model);
  Weights weights = weights_of_tied();
  weights.insert("tied", weight() + 1);
  const zr::LoadReport report = engine.load(saved(run, weights), {.weights_only = true, .strict = false});
  EXPECT_EQ(report.unexpected, std::vector<std::string>{"weight 'a.weight'"});
  EXPECT_TRUE(torch::equal(engine.get("tied"), weight() + 1)) << "the model lists 'tied' first";
}

MULTIRANK_TEST(StateDictFileTest, LoadsEmptyBuffers, {2}) {
  Tied model;
  zr::Engine engine(run.program, model);
  Weights weights = weights_of_tied();
  weights.insert("empty", torch::zeros({0, 3}));
  const zr::LoadReport report = engine.load(saved(run, weights), {.weights_only = true});
  EXPECT_TRUE(report.unexpected.empty());
  EXPECT_TRUE(torch::equal(engine.get("a.weight"), weight()));
}

MULTIRANK_TEST(StateDictFileTest, MapsNamesButNotThoseOfCheckpoints, {1, 2},
               {"\"checkpoint.rename={'*.*'='model.*/*'}\""}) {
  Tied model;
  zr::Engine engine(run.program, model);
  Weights weights;
  weights.insert("model.a/weight", weight());
  weights.insert("model.a/bias", torch::ones({3}));
  engine.load(saved(run, weights), {.weights_only = true});
  EXPECT_TRUE(torch::equal(engine.get("a.weight"), weight()));
  EXPECT_TRUE(torch::equal(engine.get("a.bias"), torch::ones({3})));
  const std::string folder = run.program.text("job.runs") + "/saved";
  engine.save(folder);
  engine.set("a.bias", zr::TensorKind::value, torch::zeros({3}));
  engine.load(folder);
  EXPECT_TRUE(torch::equal(engine.get("a.bias"), torch::ones({3})));
}

// The tensor that the model does not have would need 64 GiB.
MULTIRANK_TEST(StateDictFileTest, DoesNotConvertTensorsThatTheModelDoesNotHave, {2}) {
  Tied model;
  zr::Engine engine(run.program, model);
  Weights weights = weights_of_tied();
  weights.insert("large", torch::ones({1}).expand({1 << 20, 1 << 14}));
  weights.insert("wide", torch::empty({0, int64_t{1} << 50}));
  const zr::LoadReport report = engine.load(saved(run, weights), {.weights_only = true, .strict = false});
  EXPECT_EQ(report.unexpected, (std::vector<std::string>{"weight 'large'", "weight 'wide'"}));
  EXPECT_TRUE(torch::equal(engine.get("a.weight"), weight()));
}

MULTIRANK_TEST(StateDictFileTest, LeavesNoTemporaryFile, {2}) {
  Tied model;
  zr::Engine engine(run.program, model);
  Weights weights = weights_of_tied();
  const fs::path folder = fs::path(saved(run, weights)).parent_path() / "temporary";
  engine.load(saved(run, weights), {.weights_only = true});
  EXPECT_TRUE(has_nothing(folder));
  weights.insert("other", weight());
  EXPECT_NE(user_error_of([&] { engine.load(saved(run, weights), {.weights_only = true}); }), "");
  EXPECT_TRUE(engine.rank() != 0 || has_nothing(folder));  // other ranks do not wait for rank 0 after an error
}

// Calls `fn` when the values of the first tensor are about to be converted on rank 0.
void at_conversion(const std::function<void()>& fn) {
  static std::function<void()> callback;
  callback = fn;
  at::addThreadLocalCallback(
      at::RecordFunctionCallback([](const at::RecordFunction& operation) -> std::unique_ptr<at::ObserverContext> {
        if (std::string(operation.name()) == "aten::as_strided") callback();
        return nullptr;
      }));
}

RANK_BODY(is_killed_in_conversion, Run) {
  Tied model;
  zr::Engine engine(run.program, model);
  const std::string path = saved(run, weights_of_tied());
  if (run.program.rank() == 0) at_conversion([] { ::raise(SIGKILL); });
  engine.load(path, {.weights_only = true});
}

TEST_F(StateDictFileTest, LeavesNoTemporaryFileIfKilled) {
  const Result result = run(2, is_killed_in_conversion);
  EXPECT_NE(result.code, 0);
  const char* const report = zr::test::jobs_run_on_hosts() ? "is lost" : "killed";  // no launcher sees the signal
  EXPECT_NE(result.output.find(report), std::string::npos) << result.output;
  EXPECT_TRUE(has_nothing(folder_ / "temporary"));
}

// Rank 1 sees the boot id of another machine.
MULTIRANK_TEST(StateDictFileTest, LoadsOnSeveralMachines, {2}) {
  Tied model;
  zr::Engine engine(run.program, model);
  const std::string path = saved(run, weights_of_tied()), boot = path + ".boot";
  bool other = true;
  if (run.program.rank() == 1) {
    std::ofstream(boot) << "another machine\n";
    other = ::unshare(CLONE_NEWNS) == 0 && ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
            ::mount(boot.c_str(), "/proc/sys/kernel/random/boot_id", nullptr, MS_BIND, nullptr) == 0;
  }
  if (engine.mean(other) < 1) GTEST_SKIP() << "needs root, which can create a mount namespace";
  const fs::path folder = fs::path(path).parent_path() / "temporary";
  bool visible = false;  // ranks on other machines open the file after its values are written
  if (run.program.rank() == 0) at_conversion([&] { visible = visible || !has_nothing(folder); });
  engine.load(path, {.weights_only = true});
  EXPECT_TRUE(torch::equal(engine.get("a.weight"), weight()));
  if (run.program.rank() == 0) {
    EXPECT_TRUE(visible);
    at::clearThreadLocalCallbacks();
    EXPECT_TRUE(has_nothing(folder));
  }
}

// Loads the weights and prints the error.
void load_and_print(
    Run& run, const std::string& path, const std::function<void()>& before = [] {},
    const std::function<void()>& after = [] {}) {
  Tied model;
  zr::Engine engine(run.program, model);
  before();
  try {
    engine.load(path, {.weights_only = true});
    ADD_FAILURE() << path << " was loaded";
  } catch (const zr::Error& error) {
    after();
    if (engine.rank() == 0) std::cout << "exit code " << error.exit_code() << ": " << error.what() << std::endl;
  }
}

RANK_BODY(loads_conjugate, Run) {
  std::ifstream in(kFolder + "conj.pt", std::ios::binary);
  load_and_print(run, written(run, "conj.pt", {std::istreambuf_iterator<char>(in), {}}));
}
RANK_BODY(loads_tied_that_differ, Run) {
  Weights weights = weights_of_tied();
  weights.insert("tied", weight() + 1);
  load_and_print(run, saved(run, weights));
}
RANK_BODY(loads_empty_with_values, Run) {
  Weights weights = weights_of_tied();
  weights.insert("empty", torch::zeros({5, 3}));
  load_and_print(run, saved(run, weights));
}
RANK_BODY(loads_expanded, Run) {
  Weights weights = weights_of_tied();
  weights.insert_or_assign("a.weight", torch::ones({1}).expand({1 << 20, 1 << 14}));
  load_and_print(run, saved(run, weights));
}
RANK_BODY(loads_too_large_for_files, Run) {
  Weights weights = weights_of_tied();
  weights.insert_or_assign("a.weight", torch::ones({1}).expand({1 << 20, 1 << 25}));
  load_and_print(run, saved(run, weights));
}
RANK_BODY(loads_reserved_name, Run) {
  Weights weights = weights_of_tied();
  weights.insert("__metadata__", weight());
  load_and_print(run, saved(run, weights));
}
RANK_BODY(loads_without_temporary_folder, Run) {
  load_and_print(run, saved(run, weights_of_tied()), [] { ::setenv("TMPDIR", "/nonexistent", 1); });
}
// Sets the maximal size of the files that rank 0 writes.
void limit_files(const Run& run, rlim_t bytes) {
  const rlimit limit{bytes, RLIM_INFINITY};
  EXPECT_TRUE(run.program.rank() != 0 || ::setrlimit(RLIMIT_FSIZE, &limit) == 0);
}
RANK_BODY(loads_with_full_temporary_folder, Run) {
  ::signal(SIGXFSZ, SIG_IGN);
  const std::string path = saved(run, weights_of_tied());
  load_and_print(
      run, path, [&] { limit_files(run, 64); }, [&] { limit_files(run, RLIM_INFINITY); });
}

TEST_F(StateDictFileTest, ErrorsNameFileAndRemedy) { check_messages("state_dict_file_errors.txt", 8); }

}  // namespace
}  // namespace state_dict_file_tests
