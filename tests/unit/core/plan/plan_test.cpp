// Memory plans: the plans of the strategies, and the plans that the host rejects.
#include "plan/plan.hpp"

#include <gtest/gtest.h>

#include "base/draft_abi.hpp"
#include "base/error.hpp"
#include "zr/flat_layout.hpp"

namespace {

using namespace zr::host;
using zr::Error;

std::vector<plan::Parameter> parameters(const std::vector<int64_t>& counts) {
  std::vector<plan::Parameter> list;
  for (std::size_t i = 0; i < counts.size(); ++i)
    list.push_back({"p" + std::to_string(i), {}, {counts[i]}, counts[i], false, 0});
  return list;
}

plan::PlanInput input(const std::vector<int64_t>& counts, int world, zr_dtype dtype = ZR_F32) {
  plan::PlanInput in;
  in.parameters = parameters(counts);
  in.world = world;
  in.weight_dtype = dtype;
  return in;
}

// A strategy that puts everything everywhere, but for what `spoil` does to one sum piece, and `spoil_buffer` to the
// buffer of sums.
plan::StrategyPlan everywhere(const std::function<void(zr_piece&)>& spoil = {},
                              const std::function<void(zr_buffer&)>& spoil_buffer = {}) {
  return [=](const zr_plan_in& in, const zr_plan_sink& sink) {
    int64_t elements = 0;
    for (uint32_t p = 0; p < in.n_params; ++p) elements += (in.params[p]->count + in.align - 1) / in.align * in.align;
    const zr_buffer weights{sizeof(zr_buffer), ZR_ROLE_WEIGHT, "weights", elements, in.weight_dtype, 0};
    zr_buffer sums{sizeof(zr_buffer), ZR_ROLE_REDUCED_GRAD, "sums", elements, ZR_F32, 0};
    if (spoil_buffer) spoil_buffer(sums);
    sink.buffer(sink.ctx, &weights);
    sink.buffer(sink.ctx, &sums);
    for (const uint32_t role : {ZR_ROLE_WEIGHT, ZR_ROLE_REDUCED_GRAD}) {
      int64_t offset = 0;
      for (uint32_t p = 0; p < in.n_params; ++p) {
        zr_piece piece{sizeof(zr_piece),    role,  p, role == ZR_ROLE_REDUCED_GRAD ? 1u : 0u, 0,
                       in.params[p]->count, offset};
        offset += (in.params[p]->count + in.align - 1) / in.align * in.align;
        if (role == ZR_ROLE_REDUCED_GRAD && spoil) spoil(piece);
        sink.piece(sink.ctx, &piece);
      }
    }
  };
}

std::string problem_of(const std::function<void(zr_piece&)>& spoil,
                       const std::function<void(zr_buffer&)>& spoil_buffer = {}) {
  try {
    make_plan(input({3000, 50}, 2), 0, everywhere(spoil, spoil_buffer));
  } catch (const Error& failure) {
    return failure.what();
  }
  return "";
}

TEST(MemoryPlanTest, NamesEveryRankAsOwnerOfReplicatedState) {
  const plan::MemoryPlan plan = make_plan(input({3000, 50}, 3), 1, everywhere());
  ASSERT_EQ(plan.segments.size(), 2u);
  EXPECT_EQ(plan.segments[0][0].owners, (std::vector<int>{0, 1, 2}));
  EXPECT_EQ(plan.rank_plan.state_elements, 3008 + 64) << "state of each piece starts at a multiple of 32 elements";
}

TEST(MemoryPlanTest, RejectsAPieceCutInsideANormBlock) {
  EXPECT_EQ(problem_of([](zr_piece& p) { p.count = std::min<int64_t>(p.count, 1000); }),
            "the strategy's plan for rank 0 is invalid: 'p0' [0, 1000) is cut inside a norm block of 1024 elements");
}
TEST(MemoryPlanTest, RejectsAMisalignedPiece) {
  EXPECT_EQ(problem_of([](zr_piece& p) { p.offset += p.param == 1 ? -8 : 0; }),
            "the strategy's plan for rank 0 is invalid: 'p1' [0, 50) is misaligned or outside buffer 'sums'");
}
TEST(MemoryPlanTest, RejectsAPieceOutsideItsParameter) {
  EXPECT_EQ(problem_of([](zr_piece& p) { p.first = 1024; }),
            "the strategy's plan for rank 0 is invalid: 'p0' [1024, 4024) is outside the parameter");
}
TEST(MemoryPlanTest, RejectsWeightsAsReducedGradients) {
  EXPECT_EQ(problem_of([](zr_piece& p) { p.buffer = 7; }),
            "the strategy's plan for rank 0 is invalid: 'p0' [0, 3000) is in buffer 7, which does not exist");
}
TEST(MemoryPlanTest, RejectsPiecesThatOverlapInTheirBuffer) {
  EXPECT_EQ(problem_of([](zr_piece& p) { p.offset = p.param == 1 ? 2944 : p.offset; }),
            "the strategy's plan for rank 0 is invalid: 'p0' [0, 3000) and 'p1' [0, 50) overlap in buffer 'sums'");
}
TEST(MemoryPlanTest, RejectsElementsWithoutAnOwner) {
  EXPECT_EQ(problem_of([](zr_piece& p) { p.count = std::min<int64_t>(p.count, 2048); }),
            "the strategy's plan leaves 'p0' [2048, 3000) without an owner");
}

TEST(MemoryPlanTest, RejectsAnUnknownFlagOfABuffer) {
  EXPECT_EQ(problem_of({}, [](zr_buffer& b) { b.flags = 4; }),
            "the strategy's plan for rank 0 is invalid: buffer 1: flags has bits that this zeroth does not know (0x4); "
            "install a newer zeroth, or a plug-in for this one");
}
TEST(MemoryPlanTest, RejectsStructsThatAreShorterThanInTheFirstStableVersion) {
  EXPECT_EQ(problem_of({}, [](zr_buffer& b) { b.size = 24; }),
            "the strategy's plan for rank 0 is invalid: a zr_buffer has 24 bytes, fewer than in ABI 0.9");
  EXPECT_EQ(problem_of([](zr_piece& p) { p.size = 32; }),
            "the strategy's plan for rank 0 is invalid: a zr_piece has 32 bytes, fewer than in ABI 0.9");
}
// A strategy that is built with newer headers passes longer structs.
TEST(MemoryPlanTest, AcceptsStructsThatAreLonger) {
  struct LongerBuffer {
    zr_buffer known;
    uint64_t unknown;
  };
  struct LongerPiece {
    zr_piece known;
    uint64_t unknown;
  };
  const plan::StrategyPlan longer = [](const zr_plan_in& in, const zr_plan_sink& sink) {
    zr_plan_sink longer_sink = sink;
    longer_sink.ctx = const_cast<zr_plan_sink*>(&sink);
    longer_sink.buffer = [](void* ctx, const zr_buffer* given) {
      LongerBuffer buffer{*given, 7};
      buffer.known.size = sizeof buffer;
      static_cast<zr_plan_sink*>(ctx)->buffer(static_cast<zr_plan_sink*>(ctx)->ctx, &buffer.known);
    };
    longer_sink.piece = [](void* ctx, const zr_piece* given) {
      LongerPiece piece{*given, 7};
      piece.known.size = sizeof piece;
      static_cast<zr_plan_sink*>(ctx)->piece(static_cast<zr_plan_sink*>(ctx)->ctx, &piece.known);
    };
    everywhere()(in, longer_sink);
  };
  EXPECT_EQ(make_plan(input({3000, 50}, 2), 0, longer).rank_plan.state_elements,
            make_plan(input({3000, 50}, 2), 0, everywhere()).rank_plan.state_elements);
}

TEST(MemoryPlanTest, EntersEveryByteIntoTheLedger) {
  plan::PlanInput in = input({3000, 50}, 2, ZR_BF16);
  in.descriptions[0].slots = {{"m", ZR_F32, ZR_SLOT_LIKE_PARAM, 0, 0}, {"v", ZR_BF16, ZR_SLOT_LIKE_PARAM, 0, 0}};
  const plan::MemoryPlan plan = make_plan(in, 0, everywhere());
  Ledger ledger;
  plan.add_to(ledger);
  // 3072 elements, alignment included: bf16 weights, fp32 sums, master and m, bf16 v; and the largest parameter on its
  // way from rank 0, which is larger than the norm blocks.
  EXPECT_EQ(ledger.planned(Tier::device), 3072 * (2 + 4 + 4 + 4 + 2) + 3000 * 4);
}

// ---- the flat layout that strategies share ----

TEST(FlatLayoutTest, CutsBucketsAndShardsOnlyAtNormBlockBoundaries) {
  const std::vector<int64_t> counts{1, 1023, 1024, 1025, 5000, 7, 70000, 33, 2048};
  for (int world = 1; world <= 7; ++world)
    for (const int64_t bucket : {1024, 5000, 16384, 1 << 20}) {
      const plan::PlanInput in = input(counts, world);
      const plan::PlanInputView view(in, 0);
      const zr::FlatLayout layout(view.in(), bucket);
      int64_t end = layout.trainable(), live = 0;
      for (std::size_t b = 0; b < layout.buckets().size(); ++b) {
        const auto& range = layout.buckets()[b];
        EXPECT_EQ(range.end, end) << "buckets are sent from the end, without gaps";
        end = range.begin;
        EXPECT_LE(range.size(), std::max<int64_t>(bucket, plan::kNormBlock)) << "a bucket does not exceed its size";
        live += layout.element_count(range);
        int64_t at = range.begin;
        for (int r = 0; r < world; ++r) {
          const auto part = layout.part(b, r);
          EXPECT_EQ(part.begin, at);
          at = part.end;
          EXPECT_LT(std::abs(static_cast<double>(layout.element_count(part)) -
                             static_cast<double>(layout.element_count(range)) / world),
                    plan::kNormBlock)
              << "a shard differs from the mean size by less than a norm block";
          layout.pieces(part, [&](uint32_t param, int64_t first, int64_t count, int64_t offset) {
            EXPECT_EQ(first % plan::kNormBlock, 0);
            EXPECT_TRUE((first + count) % plan::kNormBlock == 0 || first + count == counts[param]);
            EXPECT_EQ(offset % plan::kAlign, 0);
          });
        }
        EXPECT_EQ(at, range.end);
      }
      EXPECT_EQ(end, 0);
      EXPECT_EQ(live, 1 + 1023 + 1024 + 1025 + 5000 + 7 + 70000 + 33 + 2048);
    }
}

// Matrices that must stay complete, and vectors that need not; twice as many matrices as ranks.
plan::PlanInput coarse_input(int world) {
  std::vector<int64_t> counts;
  for (int i = 0; i < 2 * world; ++i) {
    counts.push_back(100000);
    counts.push_back(3000);
  }
  plan::PlanInput in = input(counts, world);
  in.descriptions.resize(2);
  in.descriptions[1].granularity = ZR_TENSORWISE;
  in.descriptions[1].cost = 1e7;
  for (std::size_t i = 0; i < counts.size(); ++i) in.description_of.push_back(i % 2 == 0);
  return in;
}

TEST(FlatLayoutTest, CutsOnlyWhereTheOptimizerPermits) {
  for (const int world : {1, 2, 3, 8})
    for (const int64_t bucket : {1024, 150000, 1 << 20}) {
      const plan::PlanInput in = coarse_input(world);
      const plan::PlanInputView view(in, 0);
      const zr::FlatLayout layout(view.in(), bucket);
      std::vector<int64_t> covered(in.parameters.size(), 0);
      for (std::size_t b = 0; b < layout.buckets().size(); ++b)
        for (int r = 0; r < world; ++r)
          layout.pieces(layout.part(b, r), [&](uint32_t param, int64_t first, int64_t count, int64_t) {
            EXPECT_EQ(first % in.cut_block(param), 0);
            EXPECT_TRUE(count % in.cut_block(param) == 0 || first + count == in.parameters[param].count);
            covered[param] += count;
          });
      for (std::size_t i = 0; i < covered.size(); ++i) EXPECT_EQ(covered[i], in.parameters[i].count);
    }
}

TEST(FlatLayoutTest, BalancesTheCostsOfRanksOverAllBuckets) {
  for (const int world : {2, 3, 8})
    for (const int64_t bucket : {1024, 150000, 1 << 20}) {
      const plan::PlanInput in = coarse_input(world);
      const plan::PlanInputView view(in, 0);
      const zr::FlatLayout layout(view.in(), bucket);
      std::vector<int> matrices(static_cast<std::size_t>(world), 0);
      for (std::size_t b = 0; b < layout.buckets().size(); ++b)
        for (int r = 0; r < world; ++r)
          layout.pieces(layout.part(b, r), [&](uint32_t param, int64_t, int64_t, int64_t) {
            matrices[static_cast<std::size_t>(r)] += param % 2 == 0;
          });
      EXPECT_EQ(matrices, std::vector<int>(static_cast<std::size_t>(world), 2)) << "bucket " << bucket;
    }
}

// The limit of the first bucket is the end of the elements of a parameter that must stay complete.
TEST(FlatLayoutTest, EndsBucketsAtTheEndOfAParameter) {
  plan::PlanInput in = input({5700, 1052}, 2);
  in.descriptions.resize(1);
  in.descriptions[0].granularity = ZR_TENSORWISE;
  in.description_of = {0, 0};
  const plan::PlanInputView view(in, 0);
  const zr::FlatLayout layout(view.in(), 5728 + 1056 - 5700);
  ASSERT_EQ(layout.buckets().size(), 2u);
  EXPECT_EQ(layout.buckets()[0].begin, 5728);
  EXPECT_EQ(layout.buckets()[0].end, 5728 + 1056);
}

TEST(FlatLayoutTest, PutsFrozenParametersAfterTrainableOnes) {
  plan::PlanInput in = input({100, 200, 300}, 2);
  in.parameters[1].frozen = true;
  const plan::PlanInputView view(in, 0);
  const zr::FlatLayout layout(view.in(), 1 << 20);
  EXPECT_EQ(layout.offset(0), 0);
  EXPECT_EQ(layout.offset(2), 128);
  EXPECT_EQ(layout.offset(1), 128 + 320);
  EXPECT_EQ(layout.trainable(), 128 + 320);
  EXPECT_EQ(layout.total(), 128 + 320 + 224);
}

TEST(FlatLayoutTest, HasNoBucketsWithoutTrainableParameters) {
  plan::PlanInput in = input({100}, 2);
  in.parameters[0].frozen = true;
  const plan::PlanInputView view(in, 0);
  EXPECT_TRUE(zr::FlatLayout(view.in(), 1024).buckets().empty());
}

TEST(FlatLayoutTest, GivesEmptyShardsWhenRanksExceedNormBlocks) {
  const plan::PlanInput in = input({10}, 4);
  const plan::PlanInputView view(in, 0);
  const zr::FlatLayout layout(view.in(), 1024);
  int64_t sum = 0, empty = 0;
  for (int r = 0; r < 4; ++r) {
    sum += layout.element_count(layout.part(0, r));
    empty += layout.part(0, r).size() == 0;
  }
  EXPECT_EQ(sum, 10);
  EXPECT_EQ(empty, 3);
}

// A strategy that splits each parameter's reduced gradient at a norm-block boundary between two halves of the ranks
// and replicates the weights.
plan::StrategyPlan halved() {
  return [](const zr_plan_in& in, const zr_plan_sink& sink) {
    int64_t elements = 0;
    for (uint32_t p = 0; p < in.n_params; ++p) elements += (in.params[p]->count + in.align - 1) / in.align * in.align;
    const zr_buffer weights{sizeof(zr_buffer), ZR_ROLE_WEIGHT, "weights", elements, in.weight_dtype, 0};
    const zr_buffer sums{sizeof(zr_buffer), ZR_ROLE_REDUCED_GRAD, "sums", elements, in.reduced_grad_dtype, 0};
    sink.buffer(sink.ctx, &weights);
    sink.buffer(sink.ctx, &sums);
    for (const uint32_t role : {ZR_ROLE_WEIGHT, ZR_ROLE_REDUCED_GRAD}) {
      int64_t offset = 0;
      for (uint32_t p = 0; p < in.n_params; ++p) {
        const int64_t count = in.params[p]->count, cut = count / 2 / in.norm_block * in.norm_block;
        const bool whole = role == ZR_ROLE_WEIGHT, low = in.rank == 0;
        const zr_piece piece{sizeof(zr_piece),
                             role,
                             p,
                             whole ? 0u : 1u,
                             whole || low ? 0 : cut,
                             whole          ? count
                             : low          ? cut
                             : in.rank == 1 ? count - cut
                                            : 0,
                             offset};
        offset += (count + in.align - 1) / in.align * in.align;
        if (piece.count > 0) sink.piece(sink.ctx, &piece);
      }
    }
  };
}

TEST(MemoryPlanTest, HasTheSameBytesForOneRankAsTheFullPlan) {
  for (const auto& strategy : {everywhere(), halved()})
    for (const int rank : {0, 1}) {
      plan::PlanInput in = input({30000, 5000, 70}, 2, ZR_BF16);
      in.communicated_grad_dtype = ZR_BF16;
      in.descriptions[0].slots = {{"m", ZR_F32, ZR_SLOT_LIKE_PARAM, 0, 0}};
      const plan::MemoryPlan whole = make_plan(in, rank, strategy), alone = plan_of_rank(in, rank, strategy);
      EXPECT_EQ(alone.bytes_by_kind(), whole.bytes_by_kind());
      EXPECT_EQ(alone.norm_blocks.total, whole.norm_blocks.total);
      EXPECT_EQ(alone.norm_blocks.replicated, whole.norm_blocks.replicated);
      EXPECT_EQ(alone.communication().bytes(), whole.communication().bytes());
      EXPECT_GE(whole.max_bytes, whole.bytes());
    }
}

TEST(MemoryPlanTest, FindsTheRankThatHoldsMost) {
  plan::PlanInput in = input({3072}, 2);
  in.descriptions[0].slots = {{"m", ZR_F32, ZR_SLOT_LIKE_PARAM, 0, 0}};
  const plan::MemoryPlan first = make_plan(in, 0, halved()), second = make_plan(in, 1, halved());
  EXPECT_NE(first.bytes(), second.bytes());
  EXPECT_EQ(first.max_bytes, std::max(first.bytes(), second.bytes()));
  EXPECT_EQ(second.max_bytes, first.max_bytes);
}

TEST(MemoryPlanTest, ShowsTheLargestShareOfTheUpdate) {
  plan::PlanInput in = input({4096, 4096}, 2);
  in.description_of = {0, 1};
  in.descriptions.resize(2);
  const plan::StrategyPlan by_parameter = [](const zr_plan_in& of, const zr_plan_sink& sink) {
    for (const uint32_t role : {ZR_ROLE_WEIGHT, ZR_ROLE_REDUCED_GRAD}) {
      const zr_buffer buffer{sizeof(zr_buffer), role, "b", 8192, ZR_F32, 0};
      sink.buffer(sink.ctx, &buffer);
    }
    for (const uint32_t role : {ZR_ROLE_WEIGHT, ZR_ROLE_REDUCED_GRAD})
      for (uint32_t p = 0; p < 2; ++p) {
        if (role == ZR_ROLE_REDUCED_GRAD && static_cast<int>(p) != of.rank) continue;
        const zr_piece piece{sizeof(zr_piece), role, p, role == ZR_ROLE_REDUCED_GRAD, 0, 4096, p * 4096};
        sink.piece(sink.ctx, &piece);
      }
  };
  EXPECT_EQ(make_plan(in, 0, by_parameter).text("plan", {}).find("share"), std::string::npos) << "equal costs";
  in.descriptions[1].cost = 3 * 4096;
  const plan::MemoryPlan plan = make_plan(in, 0, by_parameter);
  EXPECT_EQ(plan.update_share(), 0.25);
  EXPECT_EQ(plan.largest_update_share, 0.75);
  EXPECT_NE(plan.text("plan", {})
                .find("  update         largest share of a rank                       50 % if even"
                      "         75 %\n"),
            std::string::npos)
      << plan.text("plan", {});
}

TEST(MemoryPlanTest, DerivesCommunicationFromOwnership) {
  plan::PlanInput in = input({30000, 5000}, 3, ZR_BF16);
  in.communicated_grad_dtype = ZR_BF16;
  in.accumulation = 4;
  const int64_t P = 35000;
  const plan::StepCommunication replicated = plan_of_rank(in, 0, everywhere()).communication();
  EXPECT_EQ(replicated.gradients.bytes(), 4 * P * 2 * 2);
  EXPECT_EQ(replicated.reduced_gradients.bytes(), P * 4 * 2) << "fp32 sums to everyone";
  EXPECT_EQ(replicated.weights.bytes() + replicated.gathers.bytes(), 0);
  in.world = 2;
  in.accumulates_locally = true;
  in.communicated_grad_dtype = ZR_F32;
  const plan::StepCommunication sharded = plan_of_rank(in, 0, halved()).communication();
  EXPECT_EQ(sharded.gradients.bytes(), P * 4) << "accumulated gradients are sent once";
  EXPECT_EQ(sharded.weights.bytes(), P * 2);
  EXPECT_EQ(sharded.reduced_gradients.bytes(), 0);
  in.world = 1;
  EXPECT_EQ(plan_of_rank(in, 0, everywhere()).communication().bytes(), 0);
}

TEST(MemoryPlanTest, PrintsTheArithmeticAndUnknownActivations) {
  plan::PlanInput in = input({30000}, 2, ZR_BF16);
  in.communicated_grad_dtype = ZR_BF16;
  const plan::MemoryPlan plan = plan_of_rank(in, 0, everywhere());
  const std::string text = plan.text("plan: x + y", {});
  for (const char* line : {"plan: x + y: 30000 parameters, bf16, 2 ranks, bytes of rank 0\n", "30016 x 2 ",
                           "  activations    unknown until measured by a run\n", "1 x 30000 x 2 x 1 "})
    EXPECT_NE(text.find(line), text.npos) << line << "\n" << text;
  const std::string known = plan.text("plan: x + y", {1 << 20, "runs/a", 3 << 20, ""});
  for (const char* line :
       {"  activations    measured: runs/a ", "1.00 MiB\n", "  host memory    communicator ", "3.00 MiB\n"})
    EXPECT_NE(known.find(line), known.npos) << line << "\n" << known;
}

}  // namespace
