// Training of a GPT over comm_mpi: every loss, and the weights, have the bits of comm_shm.
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "support/scratch.hpp"
#include "support/shell.hpp"

namespace {

using zr::testing::shell;

// What a job has left in its run folder.
struct Trained {
  std::vector<double> losses;
  std::string weights_hash;
  bool operator==(const Trained&) const = default;
};

void PrintTo(const Trained& trained, std::ostream* out) {
  for (const double loss : trained.losses) *out << loss << " ";
  *out << trained.weights_hash;
}

class CommMpiLossesTest : public testing::Test {
 protected:
  static constexpr int kSteps = 8;

  // Trains on ranks that the command `start` starts.
  Trained train(const std::string& start, const std::string& keys) {
    const auto done = shell("cd " + scratch_.folder().string() +
                            " && export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; " + start + kJob +
                            std::to_string(kSteps) + " job.name=run job.runs=runs " + keys);
    EXPECT_EQ(done.code, 0) << start << " " << keys << done.output;
    std::ifstream rows(scratch_.path("runs/run/metrics.jsonl"));
    Trained trained;
    for (std::string row; std::getline(rows, row);) trained.losses.push_back(nlohmann::json::parse(row).at("loss"));
    trained.weights_hash =
        nlohmann::json::parse(std::ifstream(scratch_.path("runs/run/summary.json"))).at("weights_hash");
    shell("rm -r " + scratch_.path("runs"));
    EXPECT_EQ(trained.losses.size(), kSteps) << start;
    return trained;
  }

 private:
  static constexpr const char* kJob =
      " " ZR_BUILD_DIR "/bin/gpt " ZR_SOURCE_DIR
      "/examples/gpt/gpt.toml model.layers=2 model.width=192 model.context=16 train.micro_batch=1 sample.length=0 "
      "eval.every=0 job.threads=1 train.steps=";
  const zr::test::Scratch scratch_;
};

TEST_F(CommMpiLossesTest, EightRanksOnTwoPretendedHostsHaveTheBitsOfOneHost) {
  const std::string keys = "strategy=zero2 train.dtype=bf16 job.ranks=8 ";
  EXPECT_EQ(train("mpirun.openmpi --bind-to none --oversubscribe -n 8 "
                  "sh -c 'ZR_HOST_ID=$((OMPI_COMM_WORLD_RANK / 4)) exec \"$@\"' sh",
                  keys + "communicator=mpi communicator.mpi.hierarchy_min_bytes=0"),
            train(ZR_BUILD_DIR "/bin/zeroth launch -n 8 --", keys));
}

}  // namespace
