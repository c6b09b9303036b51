// A plan whose blocks of 1024 elements belong to random ranks, for tests of sums over parameters.
#pragma once

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "plan/plan.hpp"

namespace zr::testing {

using namespace host;

inline const std::vector<int64_t> kCounts{1, 5000, 1024, 100, 40000, 3072};

// Assigns runs of norm blocks to the ranks at random; parameter 3 is frozen. `replicated`: every rank has all blocks.
inline plan::StrategyPlan round_robin(bool replicated) {
  return [replicated](const zr_plan_in& in, const zr_plan_sink& sink) {
    int64_t elements = 0;
    for (const int64_t count : kCounts) elements += (count + in.align - 1) / in.align * in.align;
    for (const uint32_t role : {ZR_ROLE_WEIGHT, ZR_ROLE_REDUCED_GRAD}) {
      const zr_buffer buffer{sizeof(zr_buffer), role, role == ZR_ROLE_WEIGHT ? "weights" : "sums", elements, ZR_F32, 0};
      sink.buffer(sink.ctx, &buffer);
    }
    std::mt19937 random(11);  // the same assignment on every rank
    for (const uint32_t role : {ZR_ROLE_WEIGHT, ZR_ROLE_REDUCED_GRAD}) {
      int64_t offset = 0;
      for (uint32_t p = 0; p < in.n_params; ++p) {
        const int64_t count = in.params[p]->count;
        for (int64_t first = 0; first < count;) {
          const bool full = role == ZR_ROLE_WEIGHT || replicated;
          const int64_t n = full ? count : std::min<int64_t>(count - first, (1 + random() % 7) * in.norm_block);
          const bool mine = full || static_cast<int32_t>(random() % static_cast<uint32_t>(in.world)) == in.rank;
          const zr_piece piece{sizeof(zr_piece), role, p, role == ZR_ROLE_WEIGHT ? 0u : 1u, first, n, offset + first};
          if (mine && !(role == ZR_ROLE_REDUCED_GRAD && (in.params[p]->flags & ZR_PARAM_FROZEN)))
            sink.piece(sink.ctx, &piece);
          first += n;
        }
        offset += (count + in.align - 1) / in.align * in.align;
      }
    }
  };
}

inline plan::PlanInput input(int world) {
  plan::PlanInput in;
  in.world = world;
  for (std::size_t i = 0; i < kCounts.size(); ++i)
    in.parameters.push_back({"p" + std::to_string(i), {}, {kCounts[i]}, kCounts[i], i == 3, 0});
  return in;
}

// Element i of a parameter, the same on every rank.
inline float value(uint32_t param, int64_t i) { return std::sin(static_cast<float>(param * 100000 + i)) * 3; }

}  // namespace zr::testing
