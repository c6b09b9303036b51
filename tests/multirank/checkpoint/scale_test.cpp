// The time to load, save and hash very many tensors grows linearly with their number, not quadratically.
#include <ctime>
#include <limits>

#include "checkpoint/safetensors.hpp"
#include "multirank/engine/buffers_model.hpp"
#include "support/checkpoint_test.hpp"

namespace zr::test {
namespace {

using buffers_tests::Run;

// CPU seconds to load weights from a safetensors file; the minimum of three loads.
double seconds_of_loading(buffers_tests::Job& job, const std::string& file) {
  double least = std::numeric_limits<double>::infinity();
  for (int i = 0; i < 3; ++i) {
    const std::clock_t begin = std::clock();
    const zr::LoadReport loaded = job.engine.load(file, {true, false, false, false});
    least = std::min(least, static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC);
    EXPECT_TRUE(loaded.missing.empty() && loaded.unexpected.size() > 9000)
        << "the file contains the weights and many other tensors";
  }
  return least;
}

// CHECKPOINT-few.safetensors has a tenth of the tensors of CHECKPOINT-many.safetensors.
RANK_BODY(loads_large, Run) {
  buffers_tests::Job job(run, {"train.steps=1", "job.name=loads-large"});
  const std::string folder = std::getenv("CHECKPOINT");
  const double few = seconds_of_loading(job, folder + "-few.safetensors"),
               many = seconds_of_loading(job, folder + "-many.safetensors");
  std::cout << "few " << few << " s, many " << many << " s, ratio " << many / few << std::endl;
  EXPECT_LE(many, 30 * few) << "ten times the tensors take ten times as long, or twice that if caches are shared";
}

TEST_F(CheckpointTest, SLOW_LoadsFilesOfManyTensorsInLinearTime) {
  const auto write = [&](const std::string& name, int extra) {
    host::checkpoint::TensorHeader header;
    int64_t at = 0;
    const auto add = [&](const std::string& tensor, std::vector<int64_t> shape) {
      int64_t bytes = 4;
      for (const int64_t n : shape) bytes *= n;
      header.tensors.push_back({tensor, "F32", std::move(shape), at, at + bytes});
      at += bytes;
    };
    add("in.weight", {8, 6});
    add("in.bias", {8});
    add("out.weight", {1, 8});
    add("out.bias", {1});
    for (const char* one : {"norm.weight", "norm.bias", "norm.running_mean", "norm.running_var", "level", "table"})
      add(one, {8});
    header.tensors.push_back({"norm.num_batches_tracked", "I64", {}, at, at + 8});
    at += 8;
    for (int i = 0; i < extra; ++i) add("other." + std::to_string(i) + ".weight", {1});
    const std::string bytes = host::checkpoint::write_header(header);
    scratch_.write(name, bytes + std::string(static_cast<std::size_t>(at), '\0'));
  };
  write("c-few.safetensors", 10000);
  write("c-many.safetensors", 100000);
  const Outcome done = shell("CHECKPOINT=" + scratch_.path("c") + " " + launch(1, loads_large, ""));
  EXPECT_EQ(done.code, 0) << done.output;
  std::printf("%s", done.output.c_str());
}

// CPU seconds to save, load and hash a model with `count` parameters.
double seconds_of_a_model(Run& run, int count) {
  torch::nn::Module model;
  for (int i = 0; i < count; ++i) model.register_parameter("p" + std::to_string(i), torch::full({4}, 0.5 * i));
  zr::Engine engine(zr::Program(run.arguments[0],
                                buffers_tests::Job::joined(run.arguments, {"job.name=many" + std::to_string(count)})),
                    model);
  const std::clock_t begin = std::clock();
  engine.load(engine.save(run.program.text("job.runs") + "/saved" + std::to_string(count)));
  engine.weights_hash();
  return static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
}

RANK_BODY(saves_large, Run) {
  const double few = seconds_of_a_model(run, 3000), many = seconds_of_a_model(run, 30000);
  std::cout << "few " << few << " s, many " << many << " s, ratio " << many / few << std::endl;
  EXPECT_LE(many, 30 * few) << "ten times the parameters take ten times as long, or twice that if caches are shared";
}

TEST_F(CheckpointTest, SLOW_SavesLoadsAndHashesManyParametersInLinearTime) {
  const Outcome done = shell(launch(1, saves_large, ""));
  EXPECT_EQ(done.code, 0) << done.output;
  std::printf("%s", done.output.c_str());
}

}  // namespace
}  // namespace zr::test
