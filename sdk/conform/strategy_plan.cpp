#include "conform/strategy_plan.hpp"

#include <algorithm>
#include <map>

#include "zr/names.hpp"

namespace zr::conform {

const zr_plan_in* plan_in_of(ArgumentMemory& arguments, const PlanRequest& request) {
  std::vector<const zr_param*> params;
  for (const ModelParameter& p : request.params) {
    zr_param param{};
    param.flags = p.frozen ? uint32_t{ZR_PARAM_FROZEN} : 0;
    param.name = arguments.text(p.name);
    param.shape = arguments.list(p.shape);
    param.ndim = static_cast<int32_t>(p.shape.size());
    param.count = p.count;
    param.cut_block = p.cut_block;
    param.update_cost = p.update_cost;
    params.push_back(arguments.sized(param));
  }
  zr_plan_in in{};
  in.rank = request.rank;
  in.world = request.world;
  in.weight_dtype = request.weight_dtype;
  in.grad_dtype = request.grad_dtype;
  in.reduced_grad_dtype = request.reduced_grad_dtype;
  in.accumulation = request.holds() ? 1 : request.accumulation;
  in.n_params = static_cast<uint32_t>(params.size());
  in.norm_block = kNormBlock;
  in.align = kAlign;
  in.params = arguments.list(params);
  in.flags = request.flags;
  return arguments.sized(in);
}

bool RankPlan::is_full_weight(const ModelParameter& parameter, uint32_t param) const {
  return std::any_of(pieces.begin(), pieces.end(), [&](const PlannedPiece& piece) {
    return piece.role == ZR_ROLE_WEIGHT && piece.param == param && piece.count == parameter.count;
  });
}

namespace {

void take_buffer(void* ctx, const zr_buffer* given) {
  auto& plan = *static_cast<RankPlan*>(ctx);
  if (given->size < ZR_SIZE_0_9(zr_buffer)) plan.problem = "a zr_buffer is shorter than in ABI 0.9";
  zr_buffer buffer;
  ZR_TAKE(&buffer, given);
  if (!plan.pieces.empty()) plan.problem = "a buffer follows a piece; all buffers come first";
  plan.buffers.push_back({buffer.role, buffer.flags, buffer.tag ? buffer.tag : "", buffer.elements, buffer.dtype});
}
void take_piece(void* ctx, const zr_piece* given) {
  auto& plan = *static_cast<RankPlan*>(ctx);
  if (given->size < ZR_SIZE_0_9(zr_piece)) plan.problem = "a zr_piece is shorter than in ABI 0.9";
  zr_piece piece;
  ZR_TAKE(&piece, given);
  plan.pieces.push_back({piece.role, piece.param, piece.buffer, piece.first, piece.count, piece.offset});
}

std::string buffer_problem(const PlannedBuffer& buffer, const PlanRequest& request) {
  if (buffer.elements < 0 || size_of(buffer.dtype) == 0) return "it has a negative size or an unknown dtype";
  if (buffer.role < ZR_ROLE_WEIGHT || buffer.role > ZR_ROLE_WEIGHT_SHARD) return concat("its role is ", buffer.role);
  if (buffer.flags & ~uint32_t{ZR_BUFFER_SHARED}) return concat("flags is ", buffer.flags, ", with unknown bits");
  const uint32_t sharing = uint32_t{ZR_PLAN_SHARE_WEIGHTS} | ZR_PLAN_SHARE_ON_HOSTS;
  if ((buffer.flags & ZR_BUFFER_SHARED) && (buffer.role != ZR_ROLE_WEIGHT || !(request.flags & sharing)))
    return "it is shared, but only full weights can be, with ZR_PLAN_SHARE_WEIGHTS or ZR_PLAN_SHARE_ON_HOSTS";
  return "";
}

std::string piece_problem(const PlannedPiece& piece, const RankPlan& plan, const PlanRequest& request) {
  if (piece.role != ZR_ROLE_WEIGHT && piece.role != ZR_ROLE_WEIGHT_SHARD && piece.role != ZR_ROLE_REDUCED_GRAD)
    return concat("its role is ", piece.role);
  if (piece.param >= request.params.size()) return "its parameter does not exist";
  const ModelParameter& parameter = request.params[piece.param];
  if (piece.first < 0 || piece.count < 1 || piece.end() > parameter.count)
    return "it is empty or outside its parameter";
  const auto cuts = [&](int64_t block) {
    return piece.first % block != 0 || (piece.end() % block != 0 && piece.end() != parameter.count);
  };
  if (cuts(kNormBlock)) return "it is cut inside a norm block";
  if (cuts(std::max(kNormBlock, parameter.cut_block)))
    return concat("it is cut inside a block of the optimizer (zr_param.cut_block is ", parameter.cut_block, ")");
  if (piece.role == ZR_ROLE_WEIGHT && piece.count != parameter.count) return "a WEIGHT piece is not a full parameter";
  if (piece.role == ZR_ROLE_REDUCED_GRAD && parameter.frozen) return "a frozen parameter has no REDUCED_GRAD piece";
  if (piece.buffer >= plan.buffers.size()) return "its buffer does not exist";
  const PlannedBuffer& buffer = plan.buffers[piece.buffer];
  if (piece.offset < 0 || piece.offset % kAlign != 0) return "its offset is not a multiple of `align`";
  if (piece.offset + piece.count > buffer.elements) return "it exceeds its buffer";
  const zr_dtype dtype = piece.role == ZR_ROLE_REDUCED_GRAD ? request.reduced_grad_dtype : request.weight_dtype;
  return buffer.dtype == dtype ? "" : "its buffer has another dtype";
}

std::string text_of(const PlannedPiece& piece) {
  return concat("piece of parameter ", piece.param, " [", piece.first, ", ", piece.end(), ") with role ", piece.role);
}

// Pieces of a role ascend, and no element of a buffer belongs to two pieces.
std::string order_problem(const RankPlan& plan) {
  std::map<uint32_t, const PlannedPiece*> last;
  for (const PlannedPiece& piece : plan.pieces) {
    const uint32_t kind = piece.role == ZR_ROLE_REDUCED_GRAD ? 1 : 0;  // weights are one sequence
    const PlannedPiece*& before = last[kind];
    if (before && (before->param > piece.param || (before->param == piece.param && before->end() > piece.first)))
      return text_of(piece) + " is out of order, or overlaps the one before";
    before = &piece;
  }
  std::vector<PlannedPiece> pieces = plan.pieces;
  std::sort(pieces.begin(), pieces.end(), [](const PlannedPiece& a, const PlannedPiece& b) {
    return std::pair(a.buffer, a.offset) < std::pair(b.buffer, b.offset);
  });
  for (std::size_t i = 1; i < pieces.size(); ++i)
    if (pieces[i - 1].buffer == pieces[i].buffer && pieces[i - 1].offset + pieces[i - 1].count > pieces[i].offset)
      return text_of(pieces[i]) + " overlaps another piece in its buffer";
  return "";
}

// The first element that no range covers, or -1.
int64_t first_gap(std::vector<std::pair<int64_t, int64_t>> ranges, int64_t count) {
  std::sort(ranges.begin(), ranges.end());
  int64_t covered = 0;
  for (const auto& [first, end] : ranges) {
    if (first > covered) return covered;
    covered = std::max(covered, end);
  }
  return covered < count ? covered : -1;
}

}  // namespace

zr_strategy_desc describe(const Instance& instance) {
  struct {
    zr_strategy_desc desc{};
    char space[64];  // how much is written is the subject of another rule
  } out;
  out.desc.size = sizeof out.desc;
  must("describe()",
       [&](zr_error* error) { return instance.api<zr_strategy_api>().describe(instance.self(), &out.desc, error); });
  return out.desc;
}

RankPlan plan_rank(const zr_strategy_api& api, void* self, const PlanRequest& request, const Mode& mode) {
  RankPlan plan;
  ArgumentMemory arguments(mode);
  const zr_plan_in* in = plan_in_of(arguments, request);
  const zr_plan_sink* sink = arguments.sized(zr_plan_sink{sizeof(zr_plan_sink), 0, &plan, take_buffer, take_piece});
  must("plan()", [&](zr_error* error) { return api.plan(self, in, sink, error); });
  return plan;
}

std::string problem_of(const RankPlan& plan, const PlanRequest& request) {
  if (!plan.problem.empty()) return plan.problem;
  for (std::size_t i = 0; i < plan.buffers.size(); ++i)
    if (std::string problem = buffer_problem(plan.buffers[i], request); !problem.empty())
      return concat("buffer ", i, " '", plan.buffers[i].tag, "': ", problem);
  for (const PlannedPiece& piece : plan.pieces)
    if (std::string problem = piece_problem(piece, plan, request); !problem.empty())
      return text_of(piece) + ": " + problem;
  return order_problem(plan);
}

std::string coverage_problem(const std::vector<RankPlan>& plans, const PlanRequest& request) {
  for (uint32_t p = 0; p < request.params.size(); ++p) {
    const ModelParameter& parameter = request.params[p];
    std::vector<std::pair<int64_t, int64_t>> updated, held;
    bool full_everywhere = true;
    for (const RankPlan& plan : plans) {
      full_everywhere &= plan.is_full_weight(parameter, p);
      for (const PlannedPiece& piece : plan.pieces)
        if (piece.param == p)
          (piece.role == ZR_ROLE_REDUCED_GRAD ? updated : held).emplace_back(piece.first, piece.end());
    }
    if (const int64_t gap = first_gap(updated, parameter.count); !parameter.frozen && gap >= 0)
      return concat("no rank updates element ", gap, " of parameter ", p, " (", parameter.count, " elements)");
    if (const int64_t gap = first_gap(held, parameter.count); !full_everywhere && gap >= 0)
      return concat("no rank holds weight ", gap, " of parameter ", p, " (", parameter.count, " elements)");
  }
  return "";
}

namespace {
// What an optimizer reports about a trainable parameter: its granularity, and the cost of an update.
void describe(std::mt19937_64& random, ModelParameter& p) {
  static constexpr double kCosts[] = {1, 1, 0.5, 3, 40};  // per element
  const auto blocks = static_cast<int64_t>(1 + random() % 5);
  p.cut_block = random() % 3 == 0 ? std::max(p.count + blocks - 1, kNormBlock)  // a complete parameter
                : random() % 2    ? kNormBlock
                                  : blocks * kNormBlock;
  p.update_cost = kCosts[random() % std::size(kCosts)] * static_cast<double>(p.count);
}
}  // namespace

std::vector<ModelParameter> random_model(std::mt19937_64& random, std::size_t largest, int64_t largest_count) {
  static constexpr int64_t kCounts[] = {0, 1, 31, 32, 33, 768, 1023, 1024, 1025, 2048, 5000, 10000};
  std::vector<ModelParameter> model(1 + random() % largest);
  const bool described = random() % 4 != 0;
  for (std::size_t i = 0; i < model.size(); ++i) {
    ModelParameter& p = model[i];
    p.name = concat("layers.", i, ".weight");
    p.count = random() % 4 == 0 ? static_cast<int64_t>(random() % static_cast<uint64_t>(largest_count))
                                : std::min(kCounts[random() % std::size(kCounts)], largest_count);
    p.shape = p.count % 2 == 0 && random() % 2 ? std::vector<int64_t>{2, p.count / 2} : std::vector<int64_t>{p.count};
    p.frozen = random() % 5 == 0;
    if (p.frozen && described) p.cut_block = kNormBlock;
    if (!p.frozen && described) describe(random, p);
  }
  return model;
}

std::string text_of(const std::vector<ModelParameter>& model) {
  std::string text;
  for (const ModelParameter& p : model)
    text += concat(text.empty() ? "" : ", ", p.count, p.frozen ? " (frozen)" : "",
                   p.cut_block > kNormBlock ? concat(" (blocks of ", p.cut_block, ")") : "");
  return "parameters of " + text + " elements";
}

}  // namespace zr::conform
