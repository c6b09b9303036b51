// Construction: which records are kept, and what recording does at once.
#include "model/deferred.hpp"

#include <gmock/gmock.h>
#include <torch/torch.h>

#include <stdexcept>
#include <thread>

#include "base/error.hpp"

namespace {

using zr::host::model::Construction;
using Scope = Construction::RecordingScope;

TEST(ConstructionTest, FreesRecordsOfModelsThatWereDropped) {
  const std::size_t before = Construction::pending();
  {
    torch::Tensor kept;
    {
      const Scope scope;
      kept = torch::randn({4});
      torch::randn({4}).mul_(kept);
    }
    EXPECT_EQ(Construction::pending(), before + 1);
  }
  EXPECT_EQ(Construction::pending(), before) << "no tensor of the model exists";
  try {
    const Scope scope;
    const torch::Tensor weight = torch::randn({4});
    throw std::runtime_error("the constructor fails");
  } catch (const std::runtime_error&) {
  }
  EXPECT_EQ(Construction::pending(), before);
}

TEST(ConstructionTest, ScopeWithinAnotherOneRecordsForIt) {
  const Scope outer;
  torch::Tensor first = torch::randn({4}), second;
  {
    const Scope inner;
    second = torch::randn({4}) + first;
  }
  EXPECT_EQ(Construction::of(first), Construction::of(second));
  EXPECT_NO_THROW(second.mul_(2)) << "the outer scope records";
}

TEST(ConstructionTest, RecordsOnlyItsThread) {
  const Scope scope;
  torch::Tensor elsewhere, deferred;
  std::thread([&] { elsewhere = torch::ones({2}); }).join();
  std::thread([&] {
    const Scope own;
    deferred = torch::ones({2});
  }).join();
  EXPECT_EQ(Construction::of(elsewhere), nullptr);
  EXPECT_NE(Construction::of(deferred), Construction::of(torch::ones({2})));
}

TEST(ConstructionTest, RejectsWhatAnOrdinaryConstructionRejects) {
  const Scope scope;
  const auto message = [](const auto& call) -> std::string {
    try {
      call();
    } catch (const c10::Error& error) {
      return error.what_without_backtrace();
    }
    return "";
  };
  torch::Tensor weight = torch::randn({4, 4}).requires_grad_();
  EXPECT_EQ(message([&] { weight.mul_(2); }),
            "a leaf Variable that requires grad is being used in an in-place operation.");
  EXPECT_EQ(message([&] { weight[0].zero_(); }),
            "a view of a leaf Variable that requires grad is being used in an in-place operation.");
  EXPECT_THAT(message([&] {
                torch::mm(weight, torch::ones({3, 3}));
              }),
              testing::HasSubstr("mat1 and mat2 shapes cannot be multiplied (4x4 and 3x3)"));
}

TEST(ConstructionTest, RejectsRandomNumbersWhoseCountDependsOnValues) {
  const Scope scope;
  const torch::Tensor rate = torch::rand({4});
  try {
    torch::poisson(rate);
    ADD_FAILURE() << "was recorded";
  } catch (const zr::UserError& error) {
    EXPECT_STREQ(error.what(),
                 "zr::deferred: aten::poisson needs values, which a deferred model has only after the engine is made; "
                 "call it after that, or build the model without zr::deferred");
  }
}

TEST(ConstructionTest, ShapesNeedNoRandomNumbers) {
  const torch::Tensor state = at::globalContext().defaultGenerator(at::kCPU).get_state();
  {
    const Scope scope(Construction::Purpose::shapes);
    EXPECT_EQ(torch::randn({300, 400}).t().contiguous().sizes(), torch::IntArrayRef({400, 300}));
  }
  EXPECT_TRUE(torch::equal(at::globalContext().defaultGenerator(at::kCPU).get_state(), state));
}

}  // namespace
