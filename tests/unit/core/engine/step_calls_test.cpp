// The calls of a step to a strategy: the engine makes those of conform::StrategyStep (job/simulated_step.hpp).
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "engine/session.hpp"
#include "job/offline_plan.hpp"
#include "job/simulated_step.hpp"
#include "unit/core/one_rank.hpp"
#include "zr/strategy.hpp"

namespace {

// Gathers each parameter into memory of its own, takes gradients in parts of at most 1000 elements, of which it has
// memory for one at a time, and logs its calls.
class Logged : public zr::Strategy<Logged> {
 public:
  explicit Logged(const zr::Host&) {}
  void plan(const zr_plan_in& in, zr::PlanBuilder& plan) const {
    int64_t all = 0;
    for (uint32_t p = 0; p < in.n_params; ++p) all += zr::round_up(in.params[p]->count, in.align);
    const uint32_t shards = plan.buffer(ZR_ROLE_WEIGHT_SHARD, "shards", all, in.weight_dtype);
    plan.buffer(ZR_ROLE_GRAD, "gradients", all, in.grad_dtype);
    const uint32_t sums = plan.buffer(ZR_ROLE_REDUCED_GRAD, "sums", all, in.reduced_grad_dtype);
    int64_t at = 0;
    for (uint32_t p = 0; p < in.n_params; at += zr::round_up(in.params[p++]->count, in.align)) {
      plan.piece(ZR_ROLE_WEIGHT_SHARD, p, shards, 0, in.params[p]->count, at);
      plan.piece(ZR_ROLE_REDUCED_GRAD, p, sums, 0, in.params[p]->count, at);
    }
  }
  void bind(const zr_plan_in& in, const zr::Binding& bound) {
    int64_t at = 0;
    for (uint32_t p = 0; p < in.n_params; at += zr::round_up(in.params[p++]->count, in.align)) {
      weights_.push_back(zr::part(bound.buffers[0], at, in.params[p]->count));
      gradients_.push_back(zr::part(bound.buffers[1], at, in.params[p]->count));
    }
  }
  zr_view grad_destination(uint32_t param, int64_t& first, const zr_use& use) {
    log("grad_destination " + text(param, first), use);
    return zr::part(gradients_[param], first, std::min<int64_t>(1000, gradients_[param].count - first));
  }
  void grad_ready(uint32_t param, int64_t first, int64_t count, const zr_use& use) {
    log("grad_ready " + text(param, first) + " " + std::to_string(count), use);
  }
  void event(uint32_t kind, const zr_use& use) { log("event " + std::to_string(kind), use); }
  void grads_finish(const zr_use& use) { log("grads_finish", use); }
  void updated(const zr_use& use) { log("updated", use); }
  void acquire(const uint32_t* params, uint32_t n, const zr_use& use, zr_view* full) {
    log("acquire " + text(params[0], n), use);
    for (uint32_t i = 0; i < n; ++i) full[i] = weights_[params[i]];
  }
  void release(const uint32_t* params, uint32_t n, const zr_use& use) { log("release " + text(params[0], n), use); }

  static inline std::string calls;

 private:
  static std::string text(uint32_t param, int64_t value) { return std::to_string(param) + " " + std::to_string(value); }
  static void log(const std::string& call, const zr_use& use) {
    calls += call + ", phase " + std::to_string(use.phase) + ", micro-step " + std::to_string(use.micro) + ", flags " +
             std::to_string(use.flags) + "\n";
  }
  std::vector<zr_view> weights_, gradients_;  // by parameter
};

constexpr zr_component kLogged = zr::component<Logged>("zero3", "1");

}  // namespace

namespace zr::testing {
namespace {

using namespace host;

class StepCallsTest : public ::testing::TestWithParam<std::string> {
 protected:
  job::Setup setup() const {
    job::Setup all =
        one_rank_setup(scratch_.folder().string(),
                       {"strategy=zero3", "train.gradient_accumulation=2", "gradients.reduce=" + GetParam()},
                       std::make_shared<OneRankControl>());
    all.strategy.table = &kLogged;
    return all;
  }
  // What `work` makes the strategy log.
  template <class Work>
  static std::string calls_of(const Work& work) {
    Logged::calls.clear();
    work();
    return Logged::calls;
  }

 private:
  const test::Scratch scratch_;
};

TEST_P(StepCallsTest, AreThoseOfTheSimulatedStep) {
  FakeModel model{{{"a", 1500}, {"b", 40}}};
  std::string engine, simulated;
  {
    engine::Session session(setup(), model);
    const auto use = [&](uint32_t param, uint32_t phase) {
      const bool written = false;
      model.uses.begin(&param, 1, phase);
      model.uses.end(&param, &written, 1);
    };
    const auto step = [&] {
      for (int micro = 0; micro < 2; ++micro) {
        for (const uint32_t param : {0u, 1u}) use(param, ZR_FORWARD);
        session.begin_backward(0.5, 1);
        for (const uint32_t param : {1u, 0u}) use(param, ZR_BACKWARD);
        for (const uint32_t param : {1u, 0u}) model.give_gradient(param, 1);
        session.end_backward();
        session.step();
      }
    };
    step();
    engine = calls_of(step);
  }
  const job::Setup job = setup();
  const job::OfflinePlan offline(job, model.parameters(), 1);
  Ledger ledger;
  ThreadPool pool(1);
  job::EngineHost host(ledger, pool);
  const std::string all = calls_of([&] {
    job::simulate_step(host, job, offline.plan(0), job::SimulatedStep::reduced_gradients, [](const zr_coll&) {});
  });
  simulated = all.substr(all.find("acquire", all.find("event 3")));  // after ZR_STEP_END of the first step
  EXPECT_EQ(engine, simulated);
  EXPECT_NE(engine.find("grad_ready 0 1000 500, phase 2, micro-step"), std::string::npos) << engine;
}

INSTANTIATE_TEST_SUITE_P(Reduce, StepCallsTest, ::testing::Values("each_micro_step", "last_micro_step"),
                         [](const auto& test) { return test.param; });

}  // namespace
}  // namespace zr::testing
