#include "cells.hpp"

#include <algorithm>
#include <map>
#include <string_view>

namespace zero3 {

namespace {
constexpr int64_t kSmall = int64_t{64} << 10;  // bytes of a parameter that travels with its neighbour

std::string_view module_of(const zr_param& param) {
  const std::string_view name(param.name);
  const auto dot = name.rfind('.');
  return dot == name.npos ? std::string_view() : name.substr(0, dot);
}
bool is_frozen(const zr_param& param) { return (param.flags & ZR_PARAM_FROZEN) != 0; }
}  // namespace

Cells::Cells(const zr_plan_in& in, int64_t bucket, int64_t persistent)
    : in_(&in), cell_of_(in.n_params), offset_(in.n_params) {
  make_cells(bucket, persistent);
  cut_cells();
  place_cells();
  make_buckets(bucket);
}

void Cells::make_cells(int64_t bucket, int64_t persistent) {
  int64_t open[2] = {-1, -1}, since[2] = {0, 0};  // persistent cells that still take in: trainable, frozen
  int64_t last = -1;                              // the sharded cell of the parameter before
  for (uint32_t p = 0; p < in_->n_params; ++p) {
    const zr_param& param = *in_->params[p];
    const bool frozen = is_frozen(param), stays = param.count <= persistent;
    int64_t c = -1;
    if (stays && since[frozen] + param.count <= bucket) {
      c = open[frozen];
    } else if (!stays && last >= 0) {
      const Cell& cell = cells_[static_cast<size_t>(last)];
      const bool same = module_of(*in_->params[cell.params.back()]) == module_of(param) && cell.frozen == frozen;
      // No gap between the two: what is gathered is what is used.
      const bool small = param.count * zr::bytes_of(in_->weight_dtype) <= kSmall && cell.size % in_->align == 0;
      if (same && small && cell.params.back() + 1 == p) c = last;
    }
    if (c < 0) {
      c = static_cast<int64_t>(cells_.size());
      cells_.emplace_back();
      cells_.back().frozen = frozen;
      cells_.back().persistent = stays;
      if (stays) since[frozen] = 0;
    }
    Cell& cell = cells_[static_cast<size_t>(c)];
    cell.size = zr::round_up(cell.size, in_->align);
    cell.params.push_back(p);
    cell.start.push_back(cell.size);
    cell_of_[p] = static_cast<uint32_t>(c);
    offset_[p] = cell.size;
    cell.size += param.count;
    if (stays) {
      open[frozen] = c;
    } else {
      last = c;
    }
    // A bucket of gradients between two small parameters closes their cell: it would otherwise leave with the last.
    if (!frozen)
      for (int64_t& elements : since) elements += param.count;
  }
}

int64_t Cells::live(const Cell& cell) const {
  int64_t elements = 0;
  for (const uint32_t p : cell.params) elements += in_->params[p]->count;
  return elements;
}

// The edge of a leaf nearest to an element.
int64_t Cells::edge(const Cell& cell, int64_t element) const {
  if (element <= 0) return 0;
  if (element >= cell.size) return cell.size;
  size_t i = cell.start.size() - 1;
  while (cell.start[i] > element) --i;
  const int64_t count = in_->params[cell.params[i]]->count;
  const int64_t next = i + 1 < cell.start.size() ? cell.start[i + 1] : cell.size;
  const int64_t below = cell.start[i] + std::min(element - cell.start[i], count) / in_->leaf * in_->leaf;
  const int64_t above = below + in_->leaf < cell.start[i] + count ? below + in_->leaf : next;
  return element - below <= above - element ? below : above;
}

// Cells that are too small for an even cut are dealt out so that the ranks' totals stay even.
void Cells::cut_cells() {
  const auto world = static_cast<size_t>(in_->world);
  std::vector<int64_t> dealt(world, 0);  // elements of ranks 0 to r
  int64_t total = 0;
  for (Cell& cell : cells_) {
    total += live(cell);
    cell.cut.assign(world + 1, cell.size);
    cell.cut[0] = 0;
    for (size_t r = 0; r + 1 < world; ++r) {
      const int64_t wanted = total / in_->world * static_cast<int64_t>(r + 1) - dealt[r];
      cell.cut[r + 1] = std::max(cell.cut[r], edge(cell, wanted));
    }
    int64_t before = 0;
    for (size_t r = 0; r < world; ++r) {
      pieces(cell, {cell.cut[r], cell.cut[r + 1]}, [&](uint32_t, int64_t, int64_t count, int64_t) { before += count; });
      dealt[r] += before;
    }
  }
}

void Cells::place_cells() {
  std::vector<int64_t> use;
  for (size_t c = 0; c < cells_.size(); ++c) {
    Cell& cell = cells_[c];
    int64_t& place = cell.persistent ? persistent_ : shard_;
    cell.own = place;
    place += zr::round_up(cell.persistent ? cell.size : cell.part(in_->rank).size(), in_->align);
    if (cell.persistent) continue;
    const int64_t size = zr::round_up(cell.size, in_->align);
    sharded_ += size;
    const bool same = c > 0 && !cells_[c - 1].persistent && !module_of(*in_->params[cell.params[0]]).empty() &&
                      module_of(*in_->params[cell.params[0]]) == module_of(*in_->params[cells_[c - 1].params[0]]);
    use.push_back(size + (same && !use.empty() ? use.back() : 0));
    largest_use_ = std::max(largest_use_, use.back());
  }
}

Range Cells::range(const Chunk& chunk, int32_t rank) const {
  const Cell& cell = cells_[chunk.cell];
  const Range part = cell.part(rank);
  const auto at = [&](int64_t i) {
    if (i <= 0) return part.begin;
    return i >= chunk.n ? part.end
                        : std::clamp(edge(cell, part.begin + part.size() * i / chunk.n), part.begin, part.end);
  };
  return {at(chunk.index), at(chunk.index + 1)};
}

// Parts that begin and end at leaves well inside the first parameter have pieces whose sizes follow from the part's
// alone. That are nearly all where there are many ranks, and a plan for thousands of ranks must not ask each.
Cells::Parts Cells::parts_of(const Cell& cell) const {
  Parts parts;
  std::map<int64_t, int64_t> alike;
  const int64_t first = in_->params[cell.params.front()]->count;
  for (int32_t r = 0; r < in_->world; ++r) {
    const Range part = cell.part(r);
    if (part.end + in_->leaf <= first) {
      ++alike[part.size()];
    } else {
      parts.others.push_back(r);
    }
  }
  parts.alike.assign(alike.begin(), alike.end());
  return parts;
}

int64_t Cells::size_of(const Chunk& chunk, const Parts& parts) const {
  const int64_t leaf = in_->leaf;
  int64_t size = 0;
  for (const auto& [elements, ranks] : parts.alike) {
    const auto at = [&, elements = elements](int64_t i) {  // as range() has it: the nearest edge, the lower of two
      const int64_t x = elements * i / chunk.n, below = x / leaf * leaf;
      return i >= chunk.n ? elements : std::min(elements, x - below <= below + leaf - x ? below : below + leaf);
    };
    size += ranks * (at(chunk.index + 1) - at(chunk.index));
  }
  for (const int32_t r : parts.others) size += zr::round_up(range(chunk, r).size(), in_->align);
  return size;
}

void Cells::make_buckets(int64_t bucket) {
  // From the end; a cell stands where its first parameter does, for it is complete when that one is.
  std::vector<uint32_t> order;
  for (uint32_t c = 0; c < cells_.size(); ++c)
    if (!cells_[c].frozen) order.push_back(c);
  std::sort(order.begin(), order.end(),
            [&](uint32_t a, uint32_t b) { return cells_[a].params.front() > cells_[b].params.front(); });
  int64_t room = 0;
  for (const uint32_t c : order) {
    const Cell& cell = cells_[c];
    const int64_t n = std::max<int64_t>(1, (cell.size + bucket - 1) / bucket);
    if (n > 1) room = 0;
    const Parts parts = parts_of(cell);
    for (int64_t i = 0; i < n; ++i) {
      const Chunk piece{c, i, n};
      const int64_t size = size_of(piece, parts);
      if (size == 0) continue;  // parts of a leaf or two have fewer pieces than that
      if (room < size) {
        buckets_.emplace_back();
        size_.push_back(0);
        room = bucket;
      }
      buckets_.back().push_back(piece);
      size_.back() += size;
      room -= size;
    }
  }
}

int64_t Cells::part(size_t b, int32_t rank, int64_t offset, std::vector<zr::GradientBucket::Run>& runs) const {
  const int64_t begin = offset;
  for (const Chunk& chunk : buckets_[b]) {
    const Range range = this->range(chunk, rank);
    pieces(cells_[chunk.cell], range, [&](uint32_t param, int64_t first, int64_t count, int64_t in_cell) {
      runs.push_back({param, first, count, offset + in_cell - range.begin});
    });
    offset += zr::round_up(range.size(), in_->align);
  }
  return offset - begin;
}

int64_t Cells::before_own(size_t b) const {
  int64_t elements = 0;
  for (int32_t r = 0; r < in_->rank; ++r)
    for (const Chunk& chunk : buckets_[b]) elements += zr::round_up(range(chunk, r).size(), in_->align);
  return elements;
}

zr::GradientBucket Cells::bucket(size_t b) const {
  zr::GradientBucket bucket;
  int64_t at = 0;
  for (int32_t r = 0; r < in_->world; ++r) {
    bucket.counts.push_back(part(b, r, at, bucket.runs));
    at += bucket.counts.back();
  }
  return bucket;
}

}  // namespace zero3
