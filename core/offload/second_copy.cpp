#include "offload/second_copy.hpp"

#include "base/dtype.hpp"
#include "base/round_up.hpp"

namespace zr::host::offload {

namespace {
constexpr int64_t kCacheLine = 64;

TrackedMemory allocate(int64_t bytes, Ledger& ledger, const char* tag) {
  if (bytes == 0) return {};
  return {bytes, kCacheLine, ledger, Tier::host, MemoryKind::staging, tag};
}
}  // namespace

SecondCopy::SecondCopy(const plan::MemoryPlan& plan, Ledger& ledger)
    : plan_(plan),
      weights_{allocate(plan.second_copy().weights, ledger, "new weights")},
      states_{allocate(plan.second_copy().states, ledger, "states before the update")} {}

zr_view SecondCopy::CopyMemory::take(int64_t count, zr_dtype dtype) {
  const zr_view view{memory.data() + used, count, dtype, 0, {1, 0}};
  used += count * size_of(dtype);
  return view;
}

void SecondCopy::place(update::UpdateSlice& slice) {
  if (!plan_.placement.speculates || slice.tier == 0) return;
  slice.new_weight = part_of(weights_.take(round_up(slice.count, plan::kAlign), slice.weight.dtype), 0, slice.count);
  if (!plan_.input.tiers[static_cast<std::size_t>(slice.tier)].in_memory()) return;
  if (slice.master.count) slice.undo.push_back(states_.take(slice.master.count, ZR_F32));
  for (const zr_view& slot : slice.slots) slice.undo.push_back(states_.take(slot.count, slot.dtype));
}

}  // namespace zr::host::offload
