#include "plan/optimizer_description.hpp"

#include <algorithm>
#include <numeric>
#include <string_view>

#include "base/draft_abi.hpp"  // IWYU pragma: keep
#include "plan/plan.hpp"

namespace zr::host::plan {

namespace {
// The least common multiple; `limit` if it is larger.
int64_t common_multiple(int64_t a, int64_t b, int64_t limit) {
  const int64_t factor = b / std::gcd(a, b);
  return a > limit / factor ? limit : std::min(a * factor, limit);
}
}  // namespace

bool OptimizerDescription::elementwise() const {
  return granularity == ZR_ELEMENTWISE && sums.empty() &&
         std::all_of(slots.begin(), slots.end(), [](const zr_slot& slot) { return slot.shape == ZR_SLOT_LIKE_PARAM; });
}

uint32_t OptimizerDescription::most_sums() const {
  return sums.empty() ? 0 : *std::max_element(sums.begin(), sums.end());
}

int64_t OptimizerDescription::all_sums() const { return std::accumulate(sums.begin(), sums.end(), int64_t{0}); }

bool operator==(const OptimizerDescription& a, const OptimizerDescription& b) {
  const auto same_slot = [](const zr_slot& x, const zr_slot& y) {
    return std::string_view(x.name) == y.name && x.dtype == y.dtype && x.shape == y.shape && x.flags == y.flags &&
           x.block == y.block;
  };
  return a.granularity == b.granularity && a.needs == b.needs && a.sums == b.sums && a.cost == b.cost &&
         a.ignores_norm == b.ignores_norm && a.stream_types == b.stream_types &&
         std::equal(a.slots.begin(), a.slots.end(), b.slots.begin(), b.slots.end(), same_slot) &&
         std::equal(a.private_slots.begin(), a.private_slots.end(), b.private_slots.begin(), b.private_slots.end(),
                    same_slot);
}

int64_t row_elements(const Parameter& parameter) {
  return parameter.shape.empty() ? 1 : parameter.count / std::max<int64_t>(parameter.shape[0], 1);
}

int64_t cut_block(const Parameter& parameter, const OptimizerDescription& description) {
  const int64_t limit = std::max<int64_t>(parameter.count, kNormBlock);
  if (description.granularity == ZR_TENSORWISE) return limit;
  int64_t block = kNormBlock;
  if (description.granularity == ZR_ROWWISE)
    block = common_multiple(block, std::max<int64_t>(row_elements(parameter), 1), limit);
  for (const zr_slot& slot : description.slots)
    if (slot.block > 0) block = common_multiple(block, slot.block, limit);
  return block;
}

StateShape state_shape(const Parameter& parameter, const zr_slot& slot) {
  if (slot.shape == ZR_SLOT_PER_BLOCK) return {slot.block, 1};
  if (slot.shape == ZR_SLOT_PER_COLUMN) return {slot.block, row_elements(parameter)};
  return {};
}

std::vector<int64_t> StateShape::full(const Parameter& parameter) const {
  if (block == 1 && width == 1) return parameter.shape;
  const int64_t blocks = (parameter.count + block - 1) / block;
  return width == 1 ? std::vector<int64_t>{blocks} : std::vector<int64_t>{blocks, width};
}

}  // namespace zr::host::plan
