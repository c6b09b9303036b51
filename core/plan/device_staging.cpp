#include "plan/device_staging.hpp"

#include <bit>
#include <numeric>
#include <tuple>

#include "base/round_up.hpp"
#include "plan/plan.hpp"

namespace zr::host::plan {

namespace {
// A part of a piece of reduced gradients whose states are on a tier: elements of its buffer.
struct StagedRange {
  uint32_t buffer;
  int64_t begin, end;
  int64_t param_first;  // the parameter's element at `begin`
  int64_t cut;          // the parameter may be cut at multiples of this
};

std::vector<StagedRange> parts_of(const MemoryPlan& plan) {
  std::vector<StagedRange> parts;
  const RankPlan& rank_plan = plan.rank_plan;
  for (std::size_t i = 0; i < rank_plan.reduced_gradients.size(); ++i) {
    const Piece& piece = rank_plan.reduced_gradients[i];
    const int64_t first = rank_plan.state_offset[i];
    for (const StateRange& range : plan.placement.states) {
      const int64_t begin = std::max(first, range.first),
                    end = std::min(first + piece.count, range.first + range.count);
      if (range.tier == 0 || begin >= end) continue;
      const int64_t at = piece.offset + begin - first;
      parts.push_back(
          {piece.buffer, at, at + end - begin, piece.first + begin - first, plan.input.cut_block(piece.param)});
    }
  }
  std::ranges::sort(parts, {}, [](const StagedRange& part) { return std::tuple(part.buffer, part.begin); });
  return parts;
}

// Where a block from element `begin` on ends that contains `part` from `at` on; `at`: no place to cut fits.
int64_t end_of_block(const StagedRange& part, int64_t at, int64_t begin) {
  const int64_t end = std::min(part.end, begin + kDeviceBlock);
  if (end == part.end) return end;
  return std::max(at, end - (part.param_first + end - part.begin) % part.cut);
}

// The first place after `at` where the part may be cut.
int64_t next_cut(const StagedRange& part, int64_t at) {
  return std::min(part.end, at + part.cut - (part.param_first + at - part.begin) % part.cut);
}

// Blocks that follow each other share an allocation of up to kDeviceBlock elements.
void assign_memory(DeviceStaging& staging) {
  constexpr int64_t kAlign = 16;  // elements: 64 bytes
  int64_t used = 0;               // elements of the last allocation
  const auto close = [&] {
    if (used > 0) staging.allocations.push_back(static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(used * 4))));
    used = 0;
  };
  for (DeviceStaging::Block& block : staging.blocks) {
    if (round_up(used, kAlign) + block.count > kDeviceBlock) close();
    block.allocation = staging.allocations.size();
    block.offset = round_up(used, kAlign);
    used = block.offset + block.count;
  }
  close();
}
}  // namespace

int64_t DeviceStaging::bytes() const {
  return std::accumulate(allocations.begin(), allocations.end(), slots() * slot_bytes());
}

int64_t DeviceStaging::slot_bytes() const {
  return static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(largest * (copies_early ? 4 : 8))));
}

DeviceStaging plan_device_staging(const MemoryPlan& plan, bool copies_early) {
  DeviceStaging staging;
  staging.copies_early = copies_early;
  std::vector<DeviceStaging::Block>& blocks = staging.blocks;
  for (const StagedRange& part : parts_of(plan))
    for (int64_t at = part.begin; at < part.end;) {
      // A block continues in the next part if at most padding is between them.
      if (!blocks.empty() && blocks.back().buffer == part.buffer &&
          at - (blocks.back().first + blocks.back().count) < kNormBlock) {
        DeviceStaging::Block& block = blocks.back();
        if (const int64_t end = end_of_block(part, at, block.first); end > at) {
          block.count = end - block.first;
          at = end;
          continue;
        }
      }
      int64_t end = end_of_block(part, at, at);
      if (end == at) end = next_cut(part, at);
      blocks.push_back({part.buffer, at, end - at});
      at = end;
    }
  for (const DeviceStaging::Block& block : blocks) staging.largest = std::max(staging.largest, block.count);
  if (copies_early) assign_memory(staging);
  return staging;
}

}  // namespace zr::host::plan
