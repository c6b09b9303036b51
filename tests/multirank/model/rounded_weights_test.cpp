// Weights that are rounded for forward and backward (communicator.weights): what the program stores is exact.
#include "multirank/model/sharded_parameters.hpp"
#include "support/shell.hpp"

namespace {

using namespace sharded_tests;

// With two hosts, operators read rounded weights.
RANK_BODY(writes_beside_rounding, Run) {
  const torch::Tensor& weight = run.net->in->weight;
  const auto read = [&] {
    const torch::NoGradGuard no_grad;
    return weight.clone().to(torch::kFloat);
  };
  run.step();
  const torch::Tensor before = run.engine->get("first.weight").clone();
  const auto stored = [&](const torch::Tensor& values) { return values.to(weight.scalar_type()).to(torch::kFloat); };
  EXPECT_FALSE(torch::equal(read(), stored(before))) << "operators read rounded weights";
  EXPECT_TRUE(torch::allclose(read(), before, 0, 0.01));
  {
    const torch::NoGradGuard no_grad;
    weight.view(-1).slice(0, 5, 6).fill_(0.125);
  }
  torch::Tensor expected = before.clone();
  expected.view(-1)[5] = 0.125;
  EXPECT_TRUE(torch::equal(run.engine->get("first.weight"), expected)) << "an operator's other elements are exact";
  {
    const auto scope = zr::gather(weight);
    EXPECT_TRUE(torch::equal(read(), stored(expected))) << "zr::gather";
    const torch::NoGradGuard no_grad;
    weight.view(-1).slice(0, 6, 7).fill_(0.25);
  }
  expected.view(-1)[6] = 0.25;
  EXPECT_TRUE(torch::equal(run.engine->get("first.weight"), expected)) << "a scope's other elements are exact";
  run.step();
  EXPECT_TRUE(torch::equal(run.engine->get("first.weight"), expected)) << "the learning rate is 0";
}

TEST_F(ShardedParametersTest, WritesNeverStoreRoundedWeights) {
  for (const std::string dtype : {"fp32", "bf16"}) {
    const Result result = zr::testing::shell(
        "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; mpirun.openmpi --bind-to none "
        "--oversubscribe -n 2 sh -c 'ZR_HOST_ID=$OMPI_COMM_WORLD_RANK exec \"$@\"' sh " +
        zr::test::rank_command(writes_beside_rounding.name()) +
        " " ZR_SOURCE_DIR
        "/tests/multirank/model/operators/operators.toml job.ranks=2 communicator.use=mpi "
        "communicator.mpi.hierarchy_min_bytes=0 communicator.weights=int8 train.dtype=" +
        dtype + " job.runs=\"" + folder_.string() + "\"");
    EXPECT_EQ(result.code, 0) << dtype << result.output;
  }
}

}  // namespace
