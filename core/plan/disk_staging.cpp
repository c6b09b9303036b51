#include "plan/disk_staging.hpp"

#include <algorithm>

#include "base/dtype.hpp"
#include "base/round_up.hpp"
#include "plan/plan.hpp"

namespace zr::host::plan {

namespace {

class Edges {
 public:
  Edges(const MemoryPlan& plan, DiskStaging& staging) : plan_(plan), disk_staging_(staging) {}

  // Separately written data begins or ends at this element of a buffer.
  void add(uint32_t buffer, int64_t element) {
    const Buffer& b = plan_.rank_plan.buffers[buffer];
    const TierInfo& tier = plan_.input.tiers[static_cast<std::size_t>(plan_.tier_of(b))];
    const int64_t at = element * size_of(b.dtype);
    if (!tier.in_memory() && at % tier.align != 0) disk_staging_.resident_blocks[buffer].push_back(at / tier.align);
  }
  void add(const Piece& piece) {
    add(piece.buffer, piece.offset);
    add(piece.buffer, piece.offset + piece.count);
  }
  // The same for the weight that is updated with element `first` of a reduced-gradient piece.
  void add_weight(const Piece& gradient, int64_t first) {
    const auto& weights = plan_.rank_plan.weights;
    auto piece = std::lower_bound(weights.begin(), weights.end(), gradient.param,
                                  [](const Piece& w, uint32_t param) { return w.param < param; });
    for (; piece != weights.end() && piece->param == gradient.param; ++piece)
      if (piece->first <= gradient.first && gradient.first + gradient.count <= piece->first + piece->count)
        return add(piece->buffer, piece->offset + first - piece->first);
  }
  // The same for an element of the state space.
  void add_state(int64_t element) {
    const std::vector<int64_t>& starts = plan_.rank_plan.state_offset;
    const auto i = std::upper_bound(starts.begin(), starts.end(), element) - starts.begin() - 1;
    if (i < 0) return;
    const Piece& gradient = plan_.rank_plan.reduced_gradients[static_cast<std::size_t>(i)];
    const int64_t skip = element - starts[static_cast<std::size_t>(i)];
    if (skip <= gradient.count) add_weight(gradient, gradient.first + skip);
  }
  void finish() {
    for (std::size_t i = 0; i < disk_staging_.resident_blocks.size(); ++i) {
      auto& blocks = disk_staging_.resident_blocks[i];
      std::sort(blocks.begin(), blocks.end());
      blocks.erase(std::unique(blocks.begin(), blocks.end()), blocks.end());
      const int tier = plan_.tier_of(plan_.rank_plan.buffers[i]);
      disk_staging_.resident_bytes += std::ssize(blocks) * plan_.input.tiers[static_cast<std::size_t>(tier)].align;
    }
  }

 private:
  const MemoryPlan& plan_;
  DiskStaging& disk_staging_;
};

void add_edges(const MemoryPlan& plan, DiskStaging& staging) {
  Edges edges(plan, staging);
  for (const Piece& piece : plan.rank_plan.weights) edges.add(piece);
  for (const Piece& piece : plan.rank_plan.reduced_gradients) {
    edges.add(piece);
    edges.add_weight(piece, piece.first);
    edges.add_weight(piece, piece.first + piece.count);
  }
  for (const StateRange& range : plan.placement.states) edges.add_state(range.first);
  for (const StateTile& tile : plan.placement.tiles) {
    edges.add_state(tile.first);
    edges.add_state(tile.first + tile.count);
  }
  edges.finish();
}
}  // namespace

DiskStaging plan_disk_staging(const MemoryPlan& plan) {
  DiskStaging staging;
  staging.resident_blocks.resize(plan.rank_plan.buffers.size());
  int64_t longest = 0;  // elements of the longest piece: the least that is updated at a time
  for (const Piece& piece : plan.rank_plan.reduced_gradients) longest = std::max(longest, piece.count);
  for (std::size_t i = 0; i < plan.rank_plan.buffers.size(); ++i) {
    const Buffer& b = plan.rank_plan.buffers[i];
    const TierInfo& tier = plan.input.tiers[static_cast<std::size_t>(plan.tier_of(b))];
    if (tier.in_memory() || b.elements == 0) continue;
    staging.any = true;
    staging.align = std::max(staging.align, tier.align);
    const int64_t size = size_of(b.dtype), busy = tier.io_bytes * tier.io_depth;
    int64_t largest = 0;
    for (const auto* pieces : {&plan.rank_plan.weights, &plan.rank_plan.reduced_gradients})
      for (const Piece& piece : *pieces)
        if (piece.buffer == i) largest = std::max(largest, piece.count * size);
    // A range may begin and end inside a block.
    const auto padded = [&](int64_t bytes) { return round_up(bytes, tier.align) + 2 * tier.align; };
    staging.collective_bytes +=
        std::min(padded(b.elements * size), std::max(2 * padded(largest), round_up(busy, tier.align)));
    int64_t elements = longest;
    if (plan.input.elementwise())
      elements = std::min(longest, std::max(busy / kChunksInFlight / size / kNormBlock, int64_t{1}) * kNormBlock);
    int64_t& chunk = b.role == ZR_ROLE_REDUCED_GRAD ? staging.chunk_gradients : staging.chunk_weights;
    chunk = std::max(chunk, padded(elements * size));
  }
  for (int64_t* bytes : {&staging.collective_bytes, &staging.chunk_gradients, &staging.chunk_weights})
    *bytes = round_up(*bytes, staging.align);
  if (staging.any) add_edges(plan, staging);
  return staging;
}

}  // namespace zr::host::plan
