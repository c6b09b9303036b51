// zr::Engine's collectives over tensors of the program.
#include "support/engine_test.hpp"
#include "support/user_error.hpp"

namespace {

using namespace engine_tests;
using zr::test::user_error_of;

class EngineCollectivesTest : public EngineTest {};

// The addends of the ranks, so that every rank can compute the expected result.
torch::Tensor addend(int rank, torch::ScalarType type, at::IntArrayRef shape) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(rank) + 1);
  return (torch::randn(shape, generator) * 100).to(type);
}

MULTIRANK_TEST(EngineCollectivesTest, SumAddsInRankOrder, {1, 2, 3}) {
  run.build();
  const int world = run.engine->world(), rank = run.engine->rank();
  const std::vector<std::vector<int64_t>> shapes{{}, {1}, {3, 5}, {0, 4}, {700, 1100}};  // the last: several pieces
  for (const auto& shape : shapes)
    for (const auto type : {torch::kFloat, torch::kDouble, torch::kLong, torch::kInt, torch::kByte}) {
      torch::Tensor expected = addend(0, type, shape);
      for (int other = 1; other < world; ++other) expected = expected + addend(other, type, shape);
      const torch::Tensor mine = addend(rank, type, shape), before = mine.clone();
      const torch::Tensor sum = run.engine->sum(mine);
      EXPECT_TRUE(torch::equal(sum, expected)) << c10::toString(type) << " " << c10::IntArrayRef(shape);
      EXPECT_EQ(sum.scalar_type(), type);
      EXPECT_TRUE(torch::equal(mine, before));
    }
  for (const auto type : {torch::kBFloat16, torch::kHalf}) {
    torch::Tensor expected = addend(0, type, {33}).to(torch::kFloat);
    for (int other = 1; other < world; ++other) expected += addend(other, type, {33}).to(torch::kFloat);
    EXPECT_TRUE(torch::equal(run.engine->sum(addend(rank, type, {33})), expected.to(type))) << c10::toString(type);
  }
  const torch::Tensor columns = addend(rank, torch::kFloat, {6, 4}).t();  // not contiguous
  EXPECT_TRUE(torch::equal(run.engine->sum(columns), run.engine->sum(columns.contiguous())));
}

MULTIRANK_TEST(EngineCollectivesTest, AllGatherStacksTheTensorsOfAllRanks, {1, 3}) {
  run.build();
  for (const auto type : {torch::kFloat, torch::kBool, torch::kHalf, torch::kLong, torch::kComplexFloat}) {
    const torch::Tensor all = run.engine->all_gather(addend(run.engine->rank(), type, {2, 3}));
    ASSERT_EQ(all.sizes(), (c10::IntArrayRef{run.engine->world(), 2, 3}));
    for (int rank = 0; rank < run.engine->world(); ++rank)
      EXPECT_TRUE(torch::equal(all[rank], addend(rank, type, {2, 3}))) << c10::toString(type);
  }
  const torch::Tensor complex = torch::complex(torch::ones({2}), torch::full({2}, float(run.engine->rank() + 1)));
  const torch::Tensor conjugated = run.engine->all_gather(complex.conj());  // a lazy view of the same memory
  EXPECT_EQ(conjugated[0][0].item<c10::complex<float>>().imag(), -1.0f);
  EXPECT_EQ(run.engine->all_gather(torch::tensor(5)).sizes(), (c10::IntArrayRef{run.engine->world()}));
}

MULTIRANK_TEST(EngineCollectivesTest, BroadcastCopiesTheTensorOfTheRoot, {1, 3}) {
  run.build();
  for (int root = 0; root < run.engine->world(); ++root) {
    const torch::Tensor mine = addend(run.engine->rank(), torch::kDouble, {1000, 1000});
    EXPECT_TRUE(torch::equal(run.engine->broadcast(mine, root), addend(root, torch::kDouble, {1000, 1000})));
  }
  EXPECT_EQ(
      user_error_of([&] { run.engine->broadcast(torch::ones({2}), 9); }),
      "engine.broadcast(Float [2], 9): the root must be a rank from 0 to " + std::to_string(run.engine->world() - 1));
}

MULTIRANK_TEST(EngineCollectivesTest, MayBeCalledBetweenMicroSteps, {2}, {"train.gradient_accumulation=2"}) {
  run.build();
  run.engine->barrier();
  run.engine->backward(run.model->loss(0, run.engine->micro_index()));
  EXPECT_EQ(run.engine->sum(torch::tensor(1)).item<int64_t>(), 2);
  run.engine->step();
  run.engine->barrier();
  run.micro_step();
  EXPECT_EQ(run.engine->step_index(), 1);
}

MULTIRANK_TEST(EngineCollectivesTest, RejectsTensorsThatItCannotSend, {2}) {
  run.build();
  EXPECT_EQ(user_error_of([&] { run.engine->sum(torch::Tensor()); }),
            "engine.sum(undefined tensor): pass a tensor with values");
  EXPECT_EQ(user_error_of([&] { run.engine->sum(torch::ones({2}, torch::kBool)); }),
            "engine.sum(Bool [2]): booleans cannot be added; convert the tensor to an integer dtype");
  EXPECT_EQ(user_error_of([&] { run.engine->sum(torch::ones({2}).to_sparse()); }),
            "engine.sum(Float [2], not dense or on another device): the tensor must be a dense tensor in CPU memory or "
            "on engine.device()");
}

MULTIRANK_TEST(EngineCollectivesTest, SumRejectsTypesThatCannotBeAdded, {1, 2}) {
  run.build();
  const std::string cannot = "libtorch cannot add values of this dtype; convert the tensor to another one, such as ";
  for (const auto& [type, name, other] : {std::tuple{torch::kUInt16, "UInt16", "torch::kLong"},
                                          {torch::kUInt32, "UInt32", "torch::kLong"},
                                          {torch::kUInt64, "UInt64", "torch::kLong"},
                                          {torch::kFloat8_e5m2, "Float8_e5m2", "torch::kFloat"},
                                          {torch::kFloat8_e4m3fn, "Float8_e4m3fn", "torch::kFloat"}})
    EXPECT_EQ(user_error_of([&, t = type] { run.engine->sum(torch::zeros({2}).to(t)); }),
              std::string("engine.sum(") + name + " [2]): " + cannot + other);
  EXPECT_EQ(user_error_of([&] { run.engine->sum(torch::ones({2}, torch::kBool)); }),
            "engine.sum(Bool [2]): booleans cannot be added; convert the tensor to an integer dtype");
  EXPECT_TRUE(torch::equal(run.engine->sum(torch::ones({2}, torch::kShort)),
                           torch::full({2}, run.engine->world(), torch::kShort)));
}

RANK_BODY(sums_different_shapes, Run) {
  run.build();
  run.engine->sum(torch::ones({run.engine->rank() + 1}));
}

TEST_F(EngineCollectivesTest, NamesTheTensorsOfRanksThatPassDifferentOnes) {
  const Result result = run(2, sums_different_shapes, "");
  EXPECT_EQ(result.code, 4) << result.output;
  EXPECT_NE(result.output.find("engine.sum(Float [1])"), std::string::npos) << result.output;
  EXPECT_NE(result.output.find("engine.sum(Float [2])"), std::string::npos) << result.output;
}

}  // namespace
