#include "plan/plan.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "base/dtype.hpp"
#include "base/error.hpp"
#include "base/round_up.hpp"
#include "base/unknown_bits.hpp"
#include "plan/state_arrays.hpp"

namespace zr::host::plan {

uint32_t PlanInput::parts() const {
  for (uint32_t param = 0; param < parameters.size(); ++param)
    if (part_of(param) == 1) return 2;
  return 1;
}

std::vector<uint32_t> PlanInput::parameters_of(uint32_t part) const {
  std::vector<uint32_t> params;
  for (uint32_t param = 0; param < parameters.size(); ++param)
    if (part_of(param) == part) params.push_back(param);
  return params;
}

bool PlanInput::elementwise() const {
  return std::all_of(descriptions.begin(), descriptions.end(),
                     [](const OptimizerDescription& description) { return description.elementwise(); });
}

std::vector<std::string> PlanInput::state_names() const {
  std::vector<std::string> names;
  for (const OptimizerDescription& description : descriptions)
    for (const zr_slot& slot : description.slots)
      if (std::find(names.begin(), names.end(), slot.name) == names.end()) names.emplace_back(slot.name);
  return names;
}

namespace {
uint32_t sharing_flag(const PlanInput& input) {
  if (!input.share_weights) return 0;
  return input.several_hosts() ? ZR_PLAN_SHARE_ON_HOSTS : ZR_PLAN_SHARE_WEIGHTS;
}
}  // namespace

PlanInputView::PlanInputView(const PlanInput& input, int rank, uint32_t part) {
  for (const uint32_t i : input.parameters_of(part)) {
    const Parameter& p = input.parameters[i];
    params_.push_back({sizeof(zr_param), p.frozen ? uint32_t{ZR_PARAM_FROZEN} : 0u, p.name.c_str(), p.shape.data(),
                       static_cast<int32_t>(p.shape.size()), p.group, p.count,
                       p.frozen ? kNormBlock : input.cut_block(i), p.frozen ? 0 : input.update_cost(i)});
  }
  for (const zr_param& p : params_) pointers_.push_back(&p);
  in_ = {sizeof(zr_plan_in),
         rank,
         input.world,
         input.part_dtype(part),
         input.part_gradient_dtype(part),
         input.reduced_grad_dtype,
         input.accumulates_locally ? 1 : input.accumulation,
         static_cast<uint32_t>(params_.size()),
         kNormBlock,
         kAlign,
         pointers_.data(),
         (input.accumulates_locally ? uint32_t{ZR_PLAN_HOLD_GRADS} : 0u) | sharing_flag(input) |
             (input.rounds_weights ? uint32_t{ZR_PLAN_ROUNDED_WEIGHTS} : 0u) |
             (input.several_hosts() ? uint32_t{ZR_PLAN_SEVERAL_HOSTS} : 0u),
         0,
         input.sharing_obstacle.empty() ? nullptr : input.sharing_obstacle.c_str()};
}

namespace {

// Collects the plan of one rank and checks each piece.
class Collector {
 public:
  Collector(const PlanInput& input, int rank) : input_(input), rank_(rank) {}

  /// The sink for a part's plan. `parameters`: those of the part, which outlive the calls.
  zr_plan_sink sink(uint32_t part, const std::vector<uint32_t>& parameters) {
    part_ = part;
    parameters_ = &parameters;
    plan_.part_buffers.resize(part + 1, 0);
    first_buffer_ = static_cast<uint32_t>(plan_.buffers.size());
    first_weight_ = plan_.weights.size();
    first_gradient_ = plan_.reduced_gradients.size();
    return {sizeof(zr_plan_sink), 0, this,
            [](void* self, const zr_buffer* b) { static_cast<Collector*>(self)->take_buffer(*b); },
            [](void* self, const zr_piece* p) { static_cast<Collector*>(self)->take_piece(*p); }};
  }

  RankPlan finish() {
    // Plug-ins call the sinks through C; their first problem is thrown here.
    check_overlap();
    if (!problem_.empty())
      fail_internal(fmt::format("the strategy's plan for rank {} is invalid: {}", rank_, problem_));
    for (std::vector<Piece>* list : {&plan_.weights, &plan_.reduced_gradients})  // of all parts: in the model's order
      std::stable_sort(list->begin(), list->end(), [](const Piece& a, const Piece& b) { return a.param < b.param; });
    for (const Piece& p : plan_.reduced_gradients) {
      plan_.state_offset.push_back(plan_.state_elements);
      plan_.state_elements += round_up(p.count, kAlign);
    }
    plan_.state_arrays = arrays_of(input_, input_.weight_dtype != ZR_F32, plan_);
    return std::move(plan_);
  }

 private:
  void set_problem(const std::string& text) {
    if (problem_.empty()) problem_ = text;
  }

  // Each element of a buffer belongs to one piece.
  void check_overlap() {
    std::vector<const Piece*> pieces;
    for (const std::vector<Piece>* list : {&plan_.weights, &plan_.reduced_gradients})
      for (const Piece& piece : *list) pieces.push_back(&piece);
    std::sort(pieces.begin(), pieces.end(), [](const Piece* a, const Piece* b) {
      return std::pair(a->buffer, a->offset) < std::pair(b->buffer, b->offset);
    });
    for (std::size_t i = 1; i < pieces.size(); ++i) {
      const Piece &before = *pieces[i - 1], &piece = *pieces[i];
      if (before.buffer != piece.buffer || before.offset + before.count <= piece.offset) continue;
      const auto name = [&](const Piece& p) {
        return fmt::format("'{}' [{}, {})", input_.parameters[p.param].name, p.first, p.first + p.count);
      };
      return set_problem(
          fmt::format("{} and {} overlap in buffer '{}'", name(before), name(piece), plan_.buffers[piece.buffer].tag));
    }
  }

  // The plug-in may be built with newer or older headers.
  void take_buffer(const zr_buffer& given) {
    if (given.size < ZR_SIZE_0_9(zr_buffer)) return set_problem(too_short("zr_buffer", given.size));
    zr_buffer b;
    ZR_TAKE(&b, &given);
    buffer(b);
  }
  void take_piece(const zr_piece& given) {
    if (given.size < ZR_SIZE_0_9(zr_piece)) return set_problem(too_short("zr_piece", given.size));
    zr_piece p;
    ZR_TAKE(&p, &given);
    piece(p);
  }
  static std::string too_short(const char* type, uint32_t size) {
    return fmt::format("a {} has {} bytes, fewer than in ABI 0.9", type, size);
  }

  void buffer(const zr_buffer& b) {
    if (std::string problem = unknown_bits_problem("flags", b.flags, ZR_BUFFER_SHARED); !problem.empty())
      set_problem(fmt::format("buffer {}: {}", plan_.buffers.size(), problem));
    if (b.elements < 0 || size_of(b.dtype) == 0 || b.role < ZR_ROLE_WEIGHT || b.role > ZR_ROLE_WEIGHT_SHARD)
      set_problem(fmt::format("buffer {} has a negative size, or an unknown dtype or role", plan_.buffers.size()));
    const bool shared = b.flags & ZR_BUFFER_SHARED;
    if (shared && (!input_.share_weights || b.role != ZR_ROLE_WEIGHT))
      set_problem(fmt::format(
          "buffer {} is shared by the ranks of a host, but {}", plan_.buffers.size(),
          input_.share_weights ? "only unsharded weights can be shared" : "this job does not share weights"));
    const std::string tag = fmt::format("{}{}", b.tag ? b.tag : "", part_ == 0 ? "" : ", fp32");
    plan_.buffers.push_back({b.role, tag, b.elements, b.dtype, shared});
    ++plan_.part_buffers[part_];
  }

  void piece(const zr_piece& p) {
    if (p.param >= parameters_->size())
      return set_problem(fmt::format("a piece of parameter {}, which does not exist", p.param));
    const uint32_t param = (*parameters_)[p.param], number = first_buffer_ + p.buffer;
    const Parameter& parameter = input_.parameters[param];
    const std::string where = fmt::format("'{}' [{}, {})", parameter.name, p.first, p.first + p.count);
    if (p.role != ZR_ROLE_WEIGHT && p.role != ZR_ROLE_WEIGHT_SHARD && p.role != ZR_ROLE_REDUCED_GRAD)
      return set_problem(where + ": the role of a piece must be weight, weight shard or reduced gradient");
    if (p.first < 0 || p.count <= 0 || p.first + p.count > parameter.count)
      return set_problem(where + " is outside the parameter");
    if (p.first % kNormBlock || ((p.first + p.count) % kNormBlock && p.first + p.count != parameter.count))
      return set_problem(fmt::format("{} is cut inside a norm block of {} elements", where, kNormBlock));
    if (number >= plan_.buffers.size())
      return set_problem(fmt::format("{} is in buffer {}, which does not exist", where, p.buffer));
    const Buffer& buffer = plan_.buffers[number];
    if (p.offset < 0 || p.offset % kAlign || p.offset + p.count > buffer.elements)
      return set_problem(fmt::format("{} is misaligned or outside buffer '{}'", where, buffer.tag));
    const bool weight = p.role != ZR_ROLE_REDUCED_GRAD;
    if (buffer.dtype != (weight ? input_.part_dtype(part_) : input_.reduced_grad_dtype))
      return set_problem(where + " is in a buffer of another dtype");
    if (!weight && parameter.frozen) return set_problem(where + ": a frozen parameter has no gradient");
    std::vector<Piece>& list = weight ? plan_.weights : plan_.reduced_gradients;
    if (list.size() > (weight ? first_weight_ : first_gradient_)) {
      const Piece& last = list.back();
      if (last.param > param || (last.param == param && last.first + last.count > p.first))
        return set_problem(where +
                           ": pieces of a role must be in ascending order of parameter and element, without overlap");
    }
    list.push_back({param, number, p.first, p.count, p.offset, p.role == ZR_ROLE_WEIGHT_SHARD});
  }

  const PlanInput& input_;
  int rank_;
  uint32_t part_ = 0;                                  // whose plan is collected now
  const std::vector<uint32_t>* parameters_ = nullptr;  // those of the part
  uint32_t first_buffer_ = 0;                          // of the part, in plan_
  std::size_t first_weight_ = 0, first_gradient_ = 0;  // the same for pieces
  RankPlan plan_;
  std::string problem_;
};

// Cuts one parameter into ranges, each with the set of ranks that hold it.
std::vector<Segment> cut_by_owner(const Parameter& parameter, const std::vector<std::pair<int, const Piece*>>& held) {
  std::vector<int64_t> edges{0, parameter.count};
  for (const auto& [rank, piece] : held) {
    edges.push_back(piece->first);
    edges.push_back(piece->first + piece->count);
  }
  std::sort(edges.begin(), edges.end());
  edges.erase(std::unique(edges.begin(), edges.end()), edges.end());
  std::vector<Segment> segments;
  for (std::size_t i = 0; i + 1 < edges.size(); ++i) {
    Segment segment{edges[i], edges[i + 1] - edges[i], {}};
    for (const auto& [rank, piece] : held)
      if (piece->first <= segment.first && segment.first < piece->first + piece->count) segment.owners.push_back(rank);
    if (segment.owners.empty())
      fail_internal(fmt::format("the strategy's plan leaves '{}' [{}, {}) without an owner", parameter.name,
                                segment.first, segment.first + segment.count));
    segments.push_back(std::move(segment));
  }
  return segments;
}

MemoryPlan::NormBlockCounts norm_blocks_of_all_ranks(const MemoryPlan& plan) {
  MemoryPlan::NormBlockCounts norm_blocks;
  norm_blocks.blocks_per_rank.assign(static_cast<std::size_t>(plan.input.world), 0);
  for (std::size_t i = 0; i < plan.input.parameters.size(); ++i) {
    if (plan.input.parameters[i].frozen) continue;
    for (const Segment& segment : plan.segments[i]) {
      norm_blocks.blocks_per_rank[static_cast<std::size_t>(segment.owners.front())] += norm_blocks_of(segment.count);
      norm_blocks.replicated &= segment.owners.size() == static_cast<std::size_t>(plan.input.world);
    }
    norm_blocks.total += norm_blocks_of(plan.input.parameters[i].count);
  }
  return norm_blocks;
}

MemoryPlan::NormBlockCounts norm_blocks_of_rank(const MemoryPlan& plan) {
  MemoryPlan::NormBlockCounts norm_blocks;
  norm_blocks.blocks_per_rank.assign(static_cast<std::size_t>(plan.input.world), 0);
  int64_t& own = norm_blocks.blocks_per_rank[static_cast<std::size_t>(plan.rank)];
  for (const Piece& piece : plan.rank_plan.reduced_gradients) own += norm_blocks_of(piece.count);
  for (const Parameter& p : plan.input.parameters) norm_blocks.total += p.frozen ? 0 : norm_blocks_of(p.count);
  norm_blocks.replicated = own == norm_blocks.total;
  return norm_blocks;
}

RankPlan collect_plan(const PlanInput& input, int rank, const StrategyPlan& strategy) {
  Collector collector(input, rank);
  for (uint32_t part = 0; part < input.parts(); ++part) {
    const PlanInputView view(input, rank, part);
    const std::vector<uint32_t> parameters = input.parameters_of(part);
    strategy(view.in(), collector.sink(part, parameters));
  }
  return collector.finish();
}

MemoryPlan empty_plan(const PlanInput& input, int rank) {
  MemoryPlan plan;
  plan.input = input;
  plan.rank = rank;
  plan.has_master = input.weight_dtype != ZR_F32;  // even if all parameters keep fp32: then the masters are empty
  return plan;
}

}  // namespace

MemoryPlan make_plan(const PlanInput& input, int rank, const StrategyPlan& strategy) {
  std::vector<RankPlan> ranks;
  for (int r = 0; r < input.world; ++r) ranks.push_back(collect_plan(input, r, strategy));
  std::vector<std::vector<std::pair<int, const Piece*>>> held(input.parameters.size());
  for (int r = 0; r < input.world; ++r) {
    const RankPlan& plan = ranks[static_cast<std::size_t>(r)];
    for (const Piece& piece : plan.reduced_gradients) held[piece.param].emplace_back(r, &piece);
    for (const Piece& piece : plan.weights)
      if (input.parameters[piece.param].frozen) held[piece.param].emplace_back(r, &piece);
  }
  MemoryPlan plan = empty_plan(input, rank);
  for (std::size_t i = 0; i < held.size(); ++i) plan.segments.push_back(cut_by_owner(input.parameters[i], held[i]));
  plan.norm_blocks = norm_blocks_of_all_ranks(plan);
  for (plan.rank = 0; plan.rank < input.world; ++plan.rank) {
    plan.rank_plan = std::move(ranks[static_cast<std::size_t>(plan.rank)]);
    assign_tiers(plan);
    plan.max_host_bytes += plan.bytes(Tier::host);
    plan.max_bytes = std::max(plan.max_bytes, plan.bytes());
    plan.largest_update_share = std::max(plan.largest_update_share, plan.update_share());
    ranks[static_cast<std::size_t>(plan.rank)] = std::move(plan.rank_plan);
  }
  plan.knows_all_shares = true;
  plan.rank = rank;
  plan.rank_plan = std::move(ranks[static_cast<std::size_t>(rank)]);
  assign_tiers(plan);
  return plan;
}

PlanInput::RankLocation PlanInput::location_of(int rank) const {
  if (!several_hosts()) return {0, rank, world};
  for (int host = 0; const int ranks : hosts) {
    if (rank < ranks) return {host, rank, ranks};
    rank -= ranks;
    ++host;
  }
  fail_internal("a rank is on no host");
}

int64_t PlanInput::RankLocation::share_of(int64_t elements) const {
  const auto elements_before = [&](int64_t r) { return elements / ranks * r + elements % ranks * r / ranks; };
  return elements_before(index + 1) - elements_before(index);
}

int64_t Buffer::bytes(const PlanInput::RankLocation& rank) const {
  return (shared ? rank.share_of(elements) : elements) * size_of(dtype);
}

MemoryPlan plan_of_rank(const PlanInput& input, int rank, const StrategyPlan& strategy) {
  MemoryPlan plan = empty_plan(input, rank);
  plan.rank_plan = collect_plan(input, rank, strategy);
  plan.norm_blocks = norm_blocks_of_rank(plan);
  assign_tiers(plan);
  plan.largest_update_share = plan.update_share();
  plan.max_bytes = plan.bytes();
  plan.max_host_bytes = plan.bytes(Tier::host) * input.world;
  return plan;
}

}  // namespace zr::host::plan
