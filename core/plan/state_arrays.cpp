// Where the masters and optimizer states of a rank are in its arrays.
#include "plan/state_arrays.hpp"

#include <algorithm>

#include "base/dtype.hpp"
#include "base/error.hpp"
#include "base/round_up.hpp"

namespace zr::host::plan {

namespace {
std::size_t piece_at(const RankPlan& plan, int64_t element) {
  const std::vector<int64_t>& starts = plan.state_offset;
  const auto after = std::upper_bound(starts.begin(), starts.end(), element);
  return static_cast<std::size_t>(std::max<std::ptrdiff_t>(after - starts.begin() - 1, 0));
}

// The position in an array of an element of the state space; of the padding after a piece too.
int64_t position(const RankPlan& plan, const StateArray& array, int64_t element) {
  if (element >= plan.state_elements || array.parts.empty()) return array.elements;
  const std::size_t i = piece_at(plan, element);
  const StateArray::ArrayPiece& part = array.parts[i];
  const int64_t inside = element - plan.state_offset[i], count = plan.reduced_gradients[i].count;
  if (part.shape == StateShape{}) return part.offset + inside;
  if (inside >= round_up(count, kAlign)) return part.offset + round_up(part.shape.of(count), kAlign);
  return part.offset + part.shape.of(std::min(inside, count));
}

// Of the parameter's state in this array; its width is 0 if the parameter has no such state.
StateShape shape_in(const StateArray& array, const PlanInput& input, uint32_t param) {
  for (const zr_slot& slot : input.description(param).slots)
    if (array.name == slot.name && array.dtype == slot.dtype) return state_shape(input.parameters[param], slot);
  return {1, 0};
}
}  // namespace

std::vector<StateArray> arrays_of(const PlanInput& input, bool has_master, const RankPlan& plan) {
  std::vector<StateArray> arrays;
  if (has_master) arrays.push_back({"fp32 master weights", ZR_F32, {}, 0});
  for (const OptimizerDescription& description : input.descriptions)
    for (const zr_slot& slot : description.slots)
      if (std::none_of(arrays.begin() + (has_master ? 1 : 0), arrays.end(),
                       [&](const StateArray& a) { return a.name == slot.name && a.dtype == slot.dtype; }))
        arrays.push_back({slot.name, slot.dtype, {}, 0});
  for (std::size_t a = 0; a < arrays.size(); ++a) {
    StateArray& array = arrays[a];
    for (const Piece& piece : plan.reduced_gradients) {
      const StateShape of_master = input.dtype_of(piece.param) == ZR_F32 ? StateShape{1, 0} : StateShape{};
      const StateShape shape = has_master && a == 0 ? of_master : shape_in(array, input, piece.param);
      array.parts.push_back({array.elements, shape});
      array.elements += round_up(shape.of(piece.count), kAlign);
    }
  }
  return arrays;
}

ArrayRange MemoryPlan::array_range(std::size_t array, int64_t first, int64_t count) const {
  const StateArray& a = rank_plan.state_arrays[array];
  const int64_t begin = position(rank_plan, a, first);
  return {begin, position(rank_plan, a, first + count) - begin};
}

ArrayRange MemoryPlan::array_part(std::size_t array, int64_t first, int64_t count) const {
  if (count == 0) return {0, 0};
  const std::size_t i = piece_at(rank_plan, first);
  const StateArray::ArrayPiece& part = rank_plan.state_arrays[array].parts[i];
  const int64_t inside = first - rank_plan.state_offset[i], begin = part.shape.of(inside);
  return {part.offset + begin, part.shape.of(inside + count) - begin};
}

std::size_t MemoryPlan::array_of(uint32_t param, std::size_t slot) const {
  const zr_slot& wanted = input.description(param).slots[slot];
  for (std::size_t a = has_master ? 1 : 0; a < rank_plan.state_arrays.size(); ++a)
    if (rank_plan.state_arrays[a].name == wanted.name && rank_plan.state_arrays[a].dtype == wanted.dtype) return a;
  fail_internal(std::string("no array holds the optimizer state ") + wanted.name);
}

int64_t MemoryPlan::state_bytes(int64_t first, int64_t count) const {
  int64_t bytes = 0;
  for (std::size_t a = 0; a < rank_plan.state_arrays.size(); ++a)
    bytes += array_range(a, first, count).count * size_of(rank_plan.state_arrays[a].dtype);
  return bytes;
}

int64_t MemoryPlan::state_bytes_per_element() const {
  double most = 0;
  for (const Piece& piece : rank_plan.reduced_gradients) {
    double bytes = has_master_of(piece.param) ? 4 : 0;
    for (const zr_slot& slot : input.description(piece.param).slots) {
      const StateShape shape = state_shape(input.parameters[piece.param], slot);
      bytes += static_cast<double>(shape.width * size_of(slot.dtype)) / static_cast<double>(shape.block);
    }
    most = std::max(most, bytes);
  }
  return static_cast<int64_t>(most) + (static_cast<double>(static_cast<int64_t>(most)) < most ? 1 : 0);
}

}  // namespace zr::host::plan
