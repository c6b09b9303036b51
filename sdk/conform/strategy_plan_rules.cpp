// ZR-S01 and up: descriptions and plans of strategies.
#include <functional>
#include <string>

#include "conform/rule.hpp"
#include "conform/strategy_plan.hpp"

namespace zr::conform {

namespace {

struct Planner {
  explicit Planner(Case& test) : instance(test, host), api(instance.api<zr_strategy_api>()) {}
  RankPlan plan(const PlanRequest& request, const Mode& mode = {}) const {
    return plan_rank(api, instance.self(), request, mode);
  }
  TestHost host;
  Instance instance;
  const zr_strategy_api& api;
};

void describes_itself(Case& test) {
  Planner planner(test);
  const zr_strategy_desc desc = describe(planner.instance);
  require(desc.device_types & (1u << ZR_DEVICE_CPU), "device_types is ", desc.device_types, ", without CPU memory");
}

// A parameter that needs 64-bit arithmetic. It is planned in few worlds: a strategy may need a piece per norm block.
PlanRequest huge_request() {
  PlanRequest request;
  for (const int64_t count : {int64_t{1025}, (int64_t{1} << 32) + 1025, int64_t{33}})
    request.params.push_back({concat("layers.", request.params.size(), ".weight"), {count}, count, false});
  return request;
}
constexpr int kHugeWorld = 3;

// Plans on one rank. A case that exceeds its time limit names the sizes.
RankPlan plan_with_note(Case& test, const Planner& planner, const PlanRequest& request) {
  test.note("plan() of rank ", request.rank, " of ", request.world, ", ", text_of(request.params), ", norm block ",
            kNormBlock);
  return planner.plan(request);
}

// Calls use(request) for random models, dtypes and flags; the rank is 0 and the world 1.
template <class Use>
void for_random_requests(Case& test, int number, Use&& use) {
  std::mt19937_64 random = test.random();
  for (int i = 0; i < number; ++i) {
    PlanRequest request;
    request.params = random_model(random, 12, 200000);
    request.accumulation = random() % 2 ? 1 : 4;
    request.weight_dtype = random() % 2 ? ZR_F32 : ZR_BF16;
    request.grad_dtype = random() % 2 ? ZR_F32 : ZR_BF16;
    if (request.grad_dtype == ZR_BF16 && random() % 2) request.reduced_grad_dtype = ZR_BF16;
    request.flags = static_cast<uint32_t>(random() % 4);
    use(request);
  }
}

// Random models on 1 to 9 ranks, and one with a huge parameter, without and with a cut_block.
void for_all_requests(Case& test, const std::function<void(PlanRequest&)>& check) {
  for_random_requests(test, 40, [&](PlanRequest& request) {
    for (request.world = 1; request.world <= 9; ++request.world) check(request);
  });
  PlanRequest huge = huge_request();
  huge.world = kHugeWorld;
  check(huge);
  huge.params[1].cut_block = 3000 * kNormBlock;
  check(huge);
}

void plans_are_valid(Case& test) {
  Planner planner(test);
  const auto check = [&](PlanRequest& request) {
    for (request.rank = 0; request.rank < request.world; ++request.rank) {
      const std::string problem = problem_of(plan_with_note(test, planner, request), request);
      require(problem.empty(), problem, " (on rank ", request.rank, " of ", request.world, ", ",
              text_of(request.params), ")");
    }
  };
  for_all_requests(test, check);
}

void plans_cover_the_model(Case& test) {
  Planner planner(test);
  const auto check = [&](PlanRequest& request) {
    std::vector<RankPlan> plans;
    for (request.rank = 0; request.rank < request.world; ++request.rank)
      plans.push_back(plan_with_note(test, planner, request));
    const std::string problem = coverage_problem(plans, request);
    require(problem.empty(), problem, " (", request.world, " ranks, ", text_of(request.params), ")");
  };
  for_all_requests(test, check);
}

void plans_are_pure(Case& test) {
  Planner planner(test), other(test);
  std::mt19937_64 random = test.random(1);
  std::vector<PlanRequest> requests;
  for_random_requests(test, 12, [&](PlanRequest& request) {
    for (request.world = 1; request.world <= 4; ++request.world)
      for (request.rank = 0; request.rank < request.world; ++request.rank) requests.push_back(request);
  });
  std::vector<RankPlan> plans;
  for (const PlanRequest& request : requests) plans.push_back(planner.plan(request));
  for (std::size_t i = requests.size(); i-- > 0;) {
    require(planner.plan(requests[i]) == plans[i], "plan() gives another plan when it is called again");
    require(other.plan(requests[i]) == plans[i], "plan() gives another plan in another instance");
    if (i % 10 != 0) continue;
    require(Planner(test).plan(requests[i]) == plans[i], "the first plan() of an instance gives another plan");
  }
  // The calls before it are about other models, other worlds and other ranks.
  for (std::size_t n = 0; n < requests.size(); ++n) {
    const std::size_t i = random() % requests.size();
    require(planner.plan(requests[i]) == plans[i], "plan() gives another plan after calls with other requests");
  }
}

// The number of weights in the piece's range that the plan holds.
int64_t held_weights(const RankPlan& plan, const PlannedPiece& piece) {
  int64_t held = 0;
  for (const PlannedPiece& weight : plan.pieces)
    if (weight.role != ZR_ROLE_REDUCED_GRAD && weight.param == piece.param)
      held += std::max<int64_t>(0, std::min(weight.end(), piece.end()) - std::max(weight.first, piece.first));
  return held;
}

void owners_hold_their_weights(Case& test) {
  Planner planner(test);
  const auto check = [&](const PlanRequest& request) {
    const RankPlan plan = planner.plan(request);
    for (const PlannedPiece& updated : plan.pieces) {
      if (updated.role != ZR_ROLE_REDUCED_GRAD) continue;
      const int64_t held = held_weights(plan, updated);
      require(held >= updated.count, "rank ", request.rank, " of ", request.world, " updates parameter ", updated.param,
              " [", updated.first, ", ", updated.end(), "), but holds ", held, " of these weights");
    }
  };
  for_random_requests(test, 30, [&](PlanRequest& request) {
    for (request.world = 1; request.world <= 5; ++request.world)
      for (request.rank = 0; request.rank < request.world; ++request.rank) check(request);
  });
}

void null_functions_fit_the_plan(Case& test) {
  Planner planner(test);
  if (planner.api.acquire && planner.api.release) return;
  for_random_requests(test, 30, [&](PlanRequest& request) {
    request.world = 3;
    const RankPlan plan = planner.plan(request);
    for (uint32_t p = 0; p < request.params.size(); ++p)
      require(request.params[p].count == 0 || plan.is_full_weight(request.params[p], p),
              "acquire is NULL, but a rank does not hold all weights of parameter ", p);
  });
}

constexpr Rule kRules[] = {
    {"ZR-S01", "strategy", "describe() reports CPU memory.", describes_itself},
    {"ZR-S02", "strategy", "The buffers and pieces of every rank's plan are valid, in worlds of 1 to 9 ranks.",
     plans_are_valid},
    {"ZR-S03", "strategy", "The plans of all ranks cover every trainable element and every weight.",
     plans_cover_the_model},
    {"ZR-S04", "strategy", "plan() is pure: the same request gives the same plan, at any time, in any instance.",
     plans_are_pure},
    {"ZR-S05", "strategy", "A rank holds the weights of the elements that it updates.", owners_hold_their_weights},
    {"ZR-S06", "strategy", "acquire and release are NULL only if every rank holds all weights.",
     null_functions_fit_the_plan},
};

}  // namespace

std::span<const Rule> strategy_plan_rules() { return kRules; }

}  // namespace zr::conform
