#include "plan/paging.hpp"

#include <algorithm>

#include "base/dtype.hpp"
#include "plan/plan.hpp"

namespace zr::host {

namespace {
int64_t up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

class Edges {
 public:
  Edges(const Plan& plan, Paging& paging) : plan_(plan), paging_(paging) {}

  // Something that is written by itself begins or ends at this element of a buffer.
  void add(uint32_t buffer, int64_t element) {
    const Buffer& b = plan_.mine.buffers[buffer];
    const TierFacts& place = plan_.input.places[static_cast<std::size_t>(plan_.place_of(b))];
    const int64_t at = element * size_of(b.dtype);
    if (!place.in_memory() && at % place.align != 0) paging_.edges[buffer].push_back(at / place.align);
  }
  void add(const Piece& piece) {
    add(piece.buffer, piece.offset);
    add(piece.buffer, piece.offset + piece.count);
  }
  // Of the weights that are updated with element `first` of a piece of sums.
  void add_weight(const Piece& sum, int64_t first) {
    const auto& weights = plan_.mine.weights;
    auto piece = std::lower_bound(weights.begin(), weights.end(), sum.param,
                                  [](const Piece& w, uint32_t param) { return w.param < param; });
    for (; piece != weights.end() && piece->param == sum.param; ++piece)
      if (piece->first <= sum.first && sum.first + sum.count <= piece->first + piece->count)
        return add(piece->buffer, piece->offset + first - piece->first);
  }
  // The same by element of the state space.
  void add_state(int64_t element) {
    const std::vector<int64_t>& starts = plan_.mine.state_offset;
    const auto i = std::upper_bound(starts.begin(), starts.end(), element) - starts.begin() - 1;
    if (i < 0) return;
    const Piece& sum = plan_.mine.sums[static_cast<std::size_t>(i)];
    const int64_t skip = element - starts[static_cast<std::size_t>(i)];
    if (skip <= sum.count) add_weight(sum, sum.first + skip);
  }
  void finish() {
    for (std::size_t i = 0; i < paging_.edges.size(); ++i) {
      auto& blocks = paging_.edges[i];
      std::sort(blocks.begin(), blocks.end());
      blocks.erase(std::unique(blocks.begin(), blocks.end()), blocks.end());
      const int place = plan_.place_of(plan_.mine.buffers[i]);
      paging_.edge_bytes += std::ssize(blocks) * plan_.input.places[static_cast<std::size_t>(place)].align;
    }
  }

 private:
  const Plan& plan_;
  Paging& paging_;
};

void add_edges(const Plan& plan, Paging& paging) {
  Edges edges(plan, paging);
  for (const Piece& piece : plan.mine.weights) edges.add(piece);
  for (const Piece& piece : plan.mine.sums) {
    edges.add(piece);
    edges.add_weight(piece, piece.first);
    edges.add_weight(piece, piece.first + piece.count);
  }
  for (const StateRun& run : plan.placement.states) edges.add_state(run.first);
  for (const StateTile& tile : plan.placement.tiles) {
    edges.add_state(tile.first);
    edges.add_state(tile.first + tile.count);
  }
  edges.finish();
}
}  // namespace

Paging paging_of(const Plan& plan) {
  Paging paging;
  paging.edges.resize(plan.mine.buffers.size());
  int64_t longest = 0;  // elements that are updated at a time at least
  for (const Piece& piece : plan.mine.sums) longest = std::max(longest, piece.count);
  for (std::size_t i = 0; i < plan.mine.buffers.size(); ++i) {
    const Buffer& b = plan.mine.buffers[i];
    const TierFacts& place = plan.input.places[static_cast<std::size_t>(plan.place_of(b))];
    if (place.in_memory() || b.elements == 0) continue;
    paging.any = true;
    paging.align = std::max(paging.align, place.align);
    const int64_t size = size_of(b.dtype), busy = place.io_bytes * place.io_depth;
    int64_t largest = 0;
    for (const auto* pieces : {&plan.mine.weights, &plan.mine.sums})
      for (const Piece& piece : *pieces)
        if (piece.buffer == i) largest = std::max(largest, piece.count * size);
    // A range may begin and end inside a block.
    const auto room = [&](int64_t bytes) { return up(bytes, place.align) + 2 * place.align; };
    paging.collective_bytes += std::min(room(b.elements * size), std::max(2 * room(largest), up(busy, place.align)));
    int64_t elements = longest;
    if (plan.input.wanted.elementwise)
      elements = std::min(longest, std::max(busy / kChunksUnderWay / size / kLeaf, int64_t{1}) * kLeaf);
    int64_t& chunk = b.role == ZR_ROLE_SUM ? paging.chunk_sums : paging.chunk_weights;
    chunk = std::max(chunk, room(elements * size));
  }
  for (int64_t* bytes : {&paging.collective_bytes, &paging.chunk_sums, &paging.chunk_weights})
    *bytes = up(*bytes, paging.align);
  if (paging.any) add_edges(plan, paging);
  return paging;
}

}  // namespace zr::host
