// engine.load() of state dictionaries that PyTorch 2.11 has written with torch.save(); state_dicts/README.md has the
// program. The messages are in tests/golden/state_dict_errors.txt.
#include <sys/stat.h>

#include "support/engine_test.hpp"
#include "support/layouts.hpp"
#include "support/user_error.hpp"

namespace {

using namespace engine_tests;
using zr::test::user_error_of;

class StateDictTest : public EngineTest {};

const std::string kFolder = ZR_SOURCE_DIR "/tests/multirank/engine/state_dicts/";

torch::nn::Sequential model_of_the_files() {
  torch::manual_seed(2);
  return torch::nn::Sequential(torch::nn::Linear(4, 3), torch::nn::BatchNorm1d(3));
}

MULTIRANK_TEST(StateDictTest, LoadsParametersAndBuffers, {2},
               zr::test::combine({zr::test::kLayouts, {"train.dtype=fp32", "train.dtype=bf16"}})) {
  for (const std::string file : {"state_dict.pt", "nested.pt", "protocol5.pt"}) {
    torch::nn::Sequential model = model_of_the_files();
    zr::Engine engine(run.program, *model);
    zr::LoadOptions how;
    how.weights_only = true;
    how.convert = true;
    const zr::LoadReport report = engine.load(kFolder + file, how);
    EXPECT_EQ(report.folder, kFolder + file);
    EXPECT_TRUE(torch::equal(engine.get("0.weight"), torch::arange(12).view({3, 4}) / 8.0 + 8)) << file;
    EXPECT_TRUE(torch::equal(engine.get("1.bias"), torch::arange(3) / 8.0 + 6)) << file;
    EXPECT_TRUE(torch::equal(engine.buffer("1.running_var").to(torch::kFloat), torch::arange(3) / 8.0 + 13)) << file;
    EXPECT_EQ(engine.buffer("1.num_batches_tracked").item<int64_t>(), 7) << file;
  }
}

std::string bytes_of(const std::string& file) {
  std::ifstream in(kFolder + file, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

// Rank 0 writes a file that the ranks load; returns its path.
std::string written(const Run& run, const std::string& name, const std::string& bytes) {
  const std::string path = run.program.text("job.runs") + "/" + name;
  if (run.program.rank() == 0) std::ofstream(path, std::ios::binary) << bytes;
  return path;
}

// Loads the file on all ranks and prints the error on rank 0.
void load_and_print(Run& run, const std::string& path, const zr::LoadOptions& how = {.weights_only = true}) {
  torch::nn::Sequential model = model_of_the_files();
  zr::Engine engine(run.program, *model);
  const std::string error = user_error_of([&] { engine.load(path, how); });
  EXPECT_NE(error, "") << path;
  if (engine.rank() == 0) std::cout << error << std::endl;
}

// One bit of a value differs.
RANK_BODY(loads_flipped_values, Run) {
  std::string bytes = bytes_of("state_dict.pt");
  bytes[bytes.find(std::string("\0\0\x02\x41", 4))] ^= 0x10;  // 8.125, in 0.weight
  load_and_print(run, written(run, "flipped.pt", bytes));
}

// One bit of a name differs.
RANK_BODY(loads_flipped_names, Run) {
  std::string bytes = bytes_of("state_dict.pt");
  bytes[bytes.find("running_mean")] ^= 0x01;
  load_and_print(run, written(run, "flipped.pt", bytes));
}

RANK_BODY(loads_into_another_model, Run) {
  const std::string path = written(run, "weights.pt", bytes_of("state_dict.pt"));
  torch::nn::Sequential model(torch::nn::Linear(4, 3), torch::nn::Linear(3, 2));
  zr::Engine engine(run.program, *model);
  const std::string error = user_error_of([&] { engine.load(path, {.weights_only = true}); });
  if (engine.rank() == 0) std::cout << error << std::endl;
}

RANK_BODY(loads_half, Run) { load_and_print(run, written(run, "half.pt", bytes_of("half.pt"))); }
RANK_BODY(loads_double, Run) {
  load_and_print(run, written(run, "double.pt", bytes_of("double.pt")), {.weights_only = true, .convert = true});
}
RANK_BODY(converts_half, Run) {
  torch::nn::Sequential model = model_of_the_files();
  zr::Engine engine(run.program, *model);
  const std::string path = written(run, "half.pt", bytes_of("half.pt"));
  EXPECT_EQ(engine.load(path, {.weights_only = true, .convert = true}).folder, path);
  EXPECT_TRUE(torch::equal(engine.get("0.weight"), torch::arange(12).view({3, 4}) / 8.0 + 8));
}

RANK_BODY(loads_missing_file, Run) { load_and_print(run, run.program.text("job.runs") + "/nosuch.pt"); }
RANK_BODY(loads_missing_folder, Run) { load_and_print(run, run.program.text("job.runs") + "/nosuch"); }

RANK_BODY(starts_from_state_dict, Run) {
  const std::string path = written(run, "weights.ckpt", bytes_of("state_dict.pt"));
  torch::nn::Sequential model = model_of_the_files();
  std::vector<std::string> overrides(run.arguments.begin() + 1, run.arguments.end());
  overrides.push_back("checkpoint.init=" + path);
  const zr::Program program(run.arguments[0], overrides,
                            {{"parity.model", "everything", "unused here"},
                             {"parity.weighted", false, "unused here"},
                             {"parity.overflows", false, "unused here"}});
  const std::string error = user_error_of([&] { zr::Engine engine(program, *model); });
  if (program.rank() == 0) std::cout << error << std::endl;
}

RANK_BODY(loads_big_endian, Run) { load_and_print(run, written(run, "big.pt", bytes_of("big_endian.pt"))); }

RANK_BODY(loads_unknown_byte_order, Run) {
  std::string bytes = bytes_of("no_checksums.pt");
  bytes.replace(bytes.find("little"), 6, "middle");
  load_and_print(run, written(run, "middle.pt", bytes));
}

RANK_BODY(loads_fifo, Run) {
  const std::string path = run.program.text("job.runs") + "/fifo.pt";
  EXPECT_TRUE(run.program.rank() != 0 || ::mkfifo(path.c_str(), 0600) == 0);
  load_and_print(run, path);
}

RANK_BODY(loads_module_that_cpp_saved, Run) {
  const std::string path = run.program.text("job.runs") + "/module.pt";
  if (run.program.rank() == 0) torch::save(model_of_the_files(), path);
  load_and_print(run, path);
}

TEST_F(StateDictTest, ErrorsNameFileAndRemedy) { check_messages("state_dict_errors.txt", 13); }

// As docs/training-from-cpp.md describes.
MULTIRANK_TEST(StateDictTest, LoadsDictionariesThatCppSaved, {2}) {
  torch::nn::Sequential saved = model_of_the_files();
  {
    const torch::NoGradGuard no_grad;
    saved->parameters()[0].fill_(0.375);
    saved->buffers()[0].fill_(0.625);
  }
  c10::Dict<std::string, torch::Tensor> weights;
  for (const auto& tensor : saved->named_parameters()) weights.insert(tensor.key(), tensor.value().detach());
  for (const auto& tensor : saved->named_buffers()) weights.insert(tensor.key(), tensor.value());
  const std::vector<char> bytes = torch::pickle_save(c10::IValue(weights));
  torch::nn::Sequential model = model_of_the_files();
  zr::Engine engine(run.program, *model);
  engine.load(written(run, "cpp.pt", {bytes.begin(), bytes.end()}), {.weights_only = true});
  EXPECT_TRUE(torch::equal(engine.get("0.weight"), torch::full({3, 4}, 0.375)));
  EXPECT_TRUE(torch::equal(engine.buffer("1.running_mean"), torch::full({3}, 0.625)));
}

MULTIRANK_TEST(StateDictTest, RecognizesFilesByNameOrContents, {1}) {
  for (const std::string name : {"weights.PT", "weights.ckpt", "weights.pth", "weights.bin", "weights"}) {
    torch::nn::Sequential model = model_of_the_files();
    zr::Engine engine(run.program, *model);
    engine.load(written(run, name, bytes_of("state_dict.pt")), {.weights_only = true});
    EXPECT_TRUE(torch::equal(engine.get("0.weight"), torch::arange(12).view({3, 4}) / 8.0 + 8)) << name;
  }
}

MULTIRANK_TEST(StateDictTest, LoadsFilesWithoutChecksums, {2}) {
  torch::nn::Sequential model = model_of_the_files();
  zr::Engine engine(run.program, *model);
  engine.load(kFolder + "no_checksums.pt", {.weights_only = true});
  EXPECT_TRUE(torch::equal(engine.get("0.weight"), torch::arange(12).view({3, 4}) / 8.0 + 8));
}

MULTIRANK_TEST(StateDictTest, RejectsFilesThatAreNotStateDictionaries, {2}) {
  torch::nn::Sequential model = model_of_the_files();
  zr::Engine engine(run.program, *model);
  const torch::Tensor before = engine.get("0.weight");
  EXPECT_NE(user_error_of([&] { engine.load(kFolder + "list.pt"); })
                .find("list.pt: contains no dictionary of tensors; save it with torch.save(model.state_dict(), file) "
                      "in Python"),
            std::string::npos);
  EXPECT_NE(user_error_of([&] {
              engine.load(kFolder + "mixed.pt");
            }).find("mixed.pt: the entry 'epoch' of its dictionary is not a tensor; save it with torch.save("),
            std::string::npos);
  EXPECT_NE(user_error_of([&] {
              engine.load(kFolder + "legacy.pt");
            }).find("legacy.pt: cannot be read as a state dictionary of PyTorch: "),
            std::string::npos);
  EXPECT_TRUE(torch::equal(engine.get("0.weight"), before));
}

}  // namespace
