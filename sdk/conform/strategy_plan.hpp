// What a strategy plans for one rank, and the models of the checks.
#pragma once

#include <random>
#include <string>
#include <vector>

#include "conform/library.hpp"
#include "zr/abi/strategy.h"

namespace zr::conform {

struct ModelParameter {
  std::string name;
  std::vector<int64_t> shape;
  int64_t count = 0;
  bool frozen = false;
  int64_t cut_block = 0;   // elements; 0: not described yet
  double update_cost = 0;  // of zr_param
};

struct PlanRequest {
  std::vector<ModelParameter> params{};
  int rank = 0, world = 1, accumulation = 1;
  zr_dtype weight_dtype = ZR_F32, grad_dtype = ZR_F32, reduced_grad_dtype = ZR_F32;
  uint32_t flags = 0;  // ZR_PLAN_*
  bool holds() const { return flags & ZR_PLAN_HOLD_GRADS; }
};
/// The request as the strategy gets it.
const zr_plan_in* plan_in_of(ArgumentMemory& arguments, const PlanRequest& request);

struct PlannedBuffer {
  uint32_t role, flags;
  std::string tag;
  int64_t elements;
  zr_dtype dtype;
  bool operator==(const PlannedBuffer&) const = default;
};
struct PlannedPiece {
  uint32_t role, param, buffer;
  int64_t first, count, offset;
  bool operator==(const PlannedPiece&) const = default;
  int64_t end() const { return first + count; }
};
struct RankPlan {
  std::vector<PlannedBuffer> buffers;
  std::vector<PlannedPiece> pieces;
  std::string problem;  // of the calls of the sink
  bool operator==(const RankPlan&) const = default;
  /// True if this rank holds all weights of the parameter in one piece.
  bool is_full_weight(const ModelParameter& parameter, uint32_t param) const;
};

inline constexpr int64_t kNormBlock = 1024, kAlign = 32;

/// Calls describe(); fails if the call fails.
zr_strategy_desc describe(const Instance& instance);
/// Calls plan(); fails if the call fails.
RankPlan plan_rank(const zr_strategy_api& api, void* self, const PlanRequest& request, const Mode& mode);
/// Why the plan of one rank is invalid; "" if it is valid.
std::string problem_of(const RankPlan& plan, const PlanRequest& request);
/// Why the plans of all ranks do not cover the model; "" if they do.
std::string coverage_problem(const std::vector<RankPlan>& plans, const PlanRequest& request);

/// A model of up to `largest` parameters: frozen ones, empty ones, and sizes around multiples of a norm block; in most
/// models, an optimizer has described the trainable ones.
std::vector<ModelParameter> random_model(std::mt19937_64& random, std::size_t largest, int64_t largest_count);
std::string text_of(const std::vector<ModelParameter>& model);

}  // namespace zr::conform
