#include "support/checkpoint_test.hpp"

#include <fstream>
#include <nlohmann/json.hpp>

#include "support/job_command.hpp"

namespace zr::test {

Outcome CheckpointTest::shell(const std::string& words) const { return run_job_command(words, scratch_.folder()); }

std::string CheckpointTest::launch(int n, const RankBody& body, const std::string& overrides) {
  return zeroth_bin() + "launch -n " + std::to_string(n) + " -t 1 -- " + rank_command(body.name()) +
         " " ZR_SOURCE_DIR "/tests/multirank/parity/parity.toml job.threads=1 " + overrides;
}

void CheckpointTest::run(int n, const std::string& lines, const std::string& overrides) {
  const Outcome done =
      shell("TRAINS_LIST=" + scratch_.write("list", lines) + " " +
            launch(n, engine_tests::trains_list,
                   "train.steps=4 train.gradient_accumulation=" + std::to_string(24 / n) + " " + overrides));
  ASSERT_EQ(done.code, 0) << done.output;
}

Outcome CheckpointTest::run_pair(const RankBody& body, const std::string& overrides, const std::string& where) {
  return shell("CHECKPOINT=" + scratch_.path(where) + " " +
               launch(2, body, "strategy=zero2 train.steps=4 " + overrides));
}

Json CheckpointTest::summary(const std::string& name) const {
  return Json::parse(std::ifstream(scratch_.folder() / "runs" / name / "summary.json"), nullptr, false);
}

std::map<int64_t, std::string> CheckpointTest::losses(const std::string& name) const {
  std::map<int64_t, std::string> all;
  std::ifstream rows(scratch_.path("runs/" + name + "/metrics.jsonl"));
  for (std::string row; std::getline(rows, row);) {
    const Json json = Json::parse(row);
    if (json.contains("loss")) all[json["step"].get<int64_t>()] = json["loss"].dump();
  }
  return all;
}

std::vector<std::string> CheckpointTest::names_in(const std::string& folder) const {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(scratch_.path(folder))) names.push_back(entry.path().filename());
  std::sort(names.begin(), names.end());
  return names;
}

void CheckpointTest::damage(const std::string& file, std::size_t from_end) const {
  std::ifstream in(scratch_.path(file), std::ios::binary);
  std::string bytes{std::istreambuf_iterator<char>(in), {}};
  ASSERT_GT(bytes.size(), from_end) << file;
  bytes[bytes.size() - from_end] ^= 1;
  std::ofstream(scratch_.path(file), std::ios::binary) << bytes;
}

std::map<std::string, std::string> CheckpointTest::contents(const std::string& folder) {
  const host::checkpoint::Checkpoint checkpoint(folder);
  std::map<std::string, std::string> all;
  for (const host::checkpoint::SavedTensor& tensor : checkpoint.manifest().tensors) {
    if (tensor.kind.starts_with("buffer")) continue;  // batch statistics depend on how ranks split the batch
    std::string bytes(static_cast<std::size_t>(tensor.bytes()), '\0');
    checkpoint.read(tensor, 0, tensor.bytes(), bytes.data());
    all[tensor.kind + " " + tensor.name + " " + tensor.dtype] = std::move(bytes);
  }
  return all;
}

}  // namespace zr::test
