#include "gather_groups.hpp"

#include <algorithm>
#include <map>
#include <string_view>

namespace zero3 {

namespace {
constexpr int64_t kSmall = int64_t{64} << 10;  // most bytes of a parameter that joins its neighbour's group

std::string_view module_of(const zr_param& param) {
  const std::string_view name(param.name);
  const auto dot = name.rfind('.');
  return dot == name.npos ? std::string_view() : name.substr(0, dot);
}
bool is_frozen(const zr_param& param) { return (param.flags & ZR_PARAM_FROZEN) != 0; }
}  // namespace

GatherGroups::GatherGroups(const zr_plan_in& in, int64_t bucket, int64_t persistent)
    : in_(&in), group_of_(in.n_params), offset_(in.n_params) {
  make_groups(bucket, persistent);
  cut_groups();
  lay_out_groups();
  make_buckets(bucket);
}

void GatherGroups::make_groups(int64_t bucket, int64_t persistent) {
  int64_t open[2] = {-1, -1}, since[2] = {0, 0};  // persistent groups that can still grow: trainable, frozen
  int64_t last = -1;                              // the sharded group of the previous parameter
  for (uint32_t p = 0; p < in_->n_params; ++p) {
    const zr_param& param = *in_->params[p];
    const bool frozen = is_frozen(param), is_persistent = param.count <= persistent;
    int64_t group_index = -1;
    if (is_persistent && since[frozen] + param.count <= bucket) {
      group_index = open[frozen];
    } else if (!is_persistent && last >= 0) {
      const GatherGroup& group = groups_[static_cast<size_t>(last)];
      const bool same = module_of(*in_->params[group.params.back()]) == module_of(param) && group.frozen == frozen;
      // No gap between the two parameters: every gathered element is used.
      const bool small = param.count * zr::bytes_of(in_->weight_dtype) <= kSmall && group.size % in_->align == 0;
      if (same && small && group.params.back() + 1 == p) group_index = last;
    }
    if (group_index < 0) {
      group_index = static_cast<int64_t>(groups_.size());
      groups_.emplace_back();
      groups_.back().frozen = frozen;
      groups_.back().persistent = is_persistent;
      if (is_persistent) since[frozen] = 0;
    }
    GatherGroup& group = groups_[static_cast<size_t>(group_index)];
    group.size = zr::round_up(group.size, in_->align);
    group.params.push_back(p);
    group.start.push_back(group.size);
    group_of_[p] = static_cast<uint32_t>(group_index);
    offset_[p] = group.size;
    group.size += param.count;
    if (is_persistent) {
      open[frozen] = group_index;
    } else {
      last = group_index;
    }
    // A full bucket of gradients between two small parameters ends their group; otherwise the gradient of the first
    // would wait for that of the last.
    if (!frozen)
      for (int64_t& elements : since) elements += param.count;
  }
}

int64_t GatherGroups::element_count(const GatherGroup& group) const {
  int64_t elements = 0;
  for (const uint32_t p : group.params) elements += in_->params[p]->count;
  return elements;
}

// The edge of a block (zr::cut_block) that is nearest to an element.
int64_t GatherGroups::edge(const GatherGroup& group, int64_t element) const {
  if (element <= 0) return 0;
  if (element >= group.size) return group.size;
  size_t i = group.start.size() - 1;
  while (group.start[i] > element) --i;
  const zr_param& param = *in_->params[group.params[i]];
  const int64_t count = param.count, block = zr::cut_block(*in_, param);
  const int64_t next = i + 1 < group.start.size() ? group.start[i + 1] : group.size;
  const int64_t below = group.start[i] + std::min(element - group.start[i], count) / block * block;
  const int64_t above = below + block < group.start[i] + count ? below + block : next;
  return element - below <= above - element ? below : above;
}

// The cost of the elements of a group before one of them.
double GatherGroups::cost_before(const GatherGroup& group, int64_t element) const {
  double cost = 0;
  pieces(group, {0, element}, [&](uint32_t param, int64_t, int64_t count, int64_t) {
    const zr_param& p = *in_->params[param];
    cost += zr::update_cost(p) * static_cast<double>(count) / static_cast<double>(p.count);
  });
  return cost;
}

// The edge of a block with the cost_before() that is nearest to `cost`.
int64_t GatherGroups::edge_at_cost(const GatherGroup& group, double cost) const {
  for (size_t i = 0; i < group.params.size(); ++i) {
    const zr_param& param = *in_->params[group.params[i]];
    const double before = cost_before(group, group.start[i]), own = zr::update_cost(param);
    if (param.count == 0 || (cost > before + own && i + 1 < group.params.size())) continue;
    const double part = std::clamp((cost - before) / own, 0.0, 1.0);
    return edge(group, group.start[i] + static_cast<int64_t>(part * static_cast<double>(param.count)));
  }
  return group.size;
}

// If parameters cannot be cut evenly, or have costs: the groups are distributed so that the ranks' costs stay even.
void GatherGroups::cut_groups_by_cost() {
  zr::CostBalance trainable(in_->world), frozen(in_->world);
  for (GatherGroup& group : groups_) {
    zr::CostBalance& balance = group.frozen ? frozen : trainable;
    group.cut.assign(1, 0);
    for (const double end : balance.ends(cost_before(group, group.size)))
      group.cut.push_back(std::max(group.cut.back(), edge_at_cost(group, end)));
    group.cut.push_back(group.size);
    for (size_t r = 0; r + 1 < group.cut.size(); ++r)
      balance.assign(r, cost_before(group, group.cut[r + 1]) - cost_before(group, group.cut[r]));
  }
}

// Groups that are too small for an even cut are distributed so that the ranks' totals stay even.
void GatherGroups::cut_groups() {
  if (!zr::CostBalance::is_even(*in_)) return cut_groups_by_cost();
  const auto world = static_cast<size_t>(in_->world);
  std::vector<int64_t> assigned(world, 0);  // elements given to ranks 0 to r so far
  int64_t total = 0;
  for (GatherGroup& group : groups_) {
    total += element_count(group);
    group.cut.assign(world + 1, group.size);
    group.cut[0] = 0;
    for (size_t r = 0; r + 1 < world; ++r) {
      const int64_t target = total / in_->world * static_cast<int64_t>(r + 1) - assigned[r];
      group.cut[r + 1] = std::max(group.cut[r], edge(group, target));
    }
    int64_t before = 0;
    for (size_t r = 0; r < world; ++r) {
      pieces(group, {group.cut[r], group.cut[r + 1]},
             [&](uint32_t, int64_t, int64_t count, int64_t) { before += count; });
      assigned[r] += before;
    }
  }
}

void GatherGroups::lay_out_groups() {
  std::vector<int64_t> use;
  for (size_t i = 0; i < groups_.size(); ++i) {
    GatherGroup& group = groups_[i];
    int64_t& total = group.persistent ? persistent_ : shard_;
    group.own_offset = total;
    total += zr::round_up(group.persistent ? group.size : group.part(in_->rank).size(), in_->align);
    if (group.persistent) continue;
    const int64_t size = zr::round_up(group.size, in_->align);
    sharded_ += size;
    const bool same = i > 0 && !groups_[i - 1].persistent && !module_of(*in_->params[group.params[0]]).empty() &&
                      module_of(*in_->params[group.params[0]]) == module_of(*in_->params[groups_[i - 1].params[0]]);
    use.push_back(size + (same && !use.empty() ? use.back() : 0));
    largest_use_ = std::max(largest_use_, use.back());
  }
}

GroupRange GatherGroups::range(const BucketPiece& piece, int32_t rank) const {
  const GatherGroup& group = groups_[piece.group];
  const GroupRange part = group.part(rank);
  const auto at = [&](int64_t i) {
    if (i <= 0) return part.begin;
    return i >= piece.n ? part.end
                        : std::clamp(edge(group, part.begin + part.size() * i / piece.n), part.begin, part.end);
  };
  return {at(piece.index), at(piece.index + 1)};
}

// If a part begins and ends at blocks well inside the first parameter, the sizes of its pieces follow from the
// size of the part alone. With many ranks that is true for nearly all parts, and a plan for thousands of ranks must not
// compute each part separately.
GatherGroups::PartSizes GatherGroups::part_sizes_of(const GatherGroup& group) const {
  PartSizes part_sizes;
  std::map<int64_t, int64_t> equal;
  const zr_param& first = *in_->params[group.params.front()];
  part_sizes.block = zr::cut_block(*in_, first);
  for (int32_t r = 0; r < in_->world; ++r) {
    const GroupRange part = group.part(r);
    if (part.end + part_sizes.block <= first.count) {
      ++equal[part.size()];
    } else {
      part_sizes.others.push_back(r);
    }
  }
  part_sizes.equal.assign(equal.begin(), equal.end());
  return part_sizes;
}

int64_t GatherGroups::size_of(const BucketPiece& piece, const PartSizes& part_sizes) const {
  const int64_t block = part_sizes.block;
  int64_t size = 0;
  for (const auto& [elements, ranks] : part_sizes.equal) {
    const auto at = [&, elements = elements](int64_t i) {  // like range(): the nearest edge, the lower one in a tie
      const int64_t x = elements * i / piece.n, below = x / block * block;
      return i >= piece.n ? elements : std::min(elements, x - below <= below + block - x ? below : below + block);
    };
    size += ranks * (at(piece.index + 1) - at(piece.index));
  }
  for (const int32_t r : part_sizes.others) size += zr::round_up(range(piece, r).size(), in_->align);
  return size;
}

void GatherGroups::make_buckets(int64_t bucket) {
  // From the end of the model. The position of a group is that of its first parameter, because backward completes the
  // group with that parameter.
  std::vector<uint32_t> order;
  for (uint32_t i = 0; i < groups_.size(); ++i)
    if (!groups_[i].frozen) order.push_back(i);
  std::sort(order.begin(), order.end(),
            [&](uint32_t a, uint32_t b) { return groups_[a].params.front() > groups_[b].params.front(); });
  int64_t free_elements = 0;
  for (const uint32_t group_index : order) {
    const GatherGroup& group = groups_[group_index];
    const int64_t n = std::max<int64_t>(1, (group.size + bucket - 1) / bucket);
    if (n > 1) free_elements = 0;
    const PartSizes part_sizes = part_sizes_of(group);
    for (int64_t i = 0; i < n; ++i) {
      const BucketPiece piece{group_index, i, n};
      const int64_t size = size_of(piece, part_sizes);
      if (size == 0) continue;  // parts of one or two norm blocks have fewer than n pieces
      if (free_elements < size) {
        buckets_.emplace_back();
        size_.push_back(0);
        free_elements = bucket;
      }
      buckets_.back().push_back(piece);
      size_.back() += size;
      free_elements -= size;
    }
  }
}

int64_t GatherGroups::part(size_t b, int32_t rank, int64_t offset,
                           std::vector<zr::GradientBucket::ParamRange>& ranges) const {
  const int64_t begin = offset;
  for (const BucketPiece& piece : buckets_[b]) {
    const GroupRange range = this->range(piece, rank);
    pieces(groups_[piece.group], range, [&](uint32_t param, int64_t first, int64_t count, int64_t in_group) {
      ranges.push_back({param, first, count, offset + in_group - range.begin});
    });
    offset += zr::round_up(range.size(), in_->align);
  }
  return offset - begin;
}

int64_t GatherGroups::before_own(size_t b) const {
  int64_t elements = 0;
  for (int32_t r = 0; r < in_->rank; ++r)
    for (const BucketPiece& piece : buckets_[b]) elements += zr::round_up(range(piece, r).size(), in_->align);
  return elements;
}

zr::GradientBucket GatherGroups::bucket(size_t b) const {
  zr::GradientBucket bucket;
  int64_t at = 0;
  for (int32_t r = 0; r < in_->world; ++r) {
    bucket.counts.push_back(part(b, r, at, bucket.ranges));
    at += bucket.counts.back();
  }
  return bucket;
}

}  // namespace zero3
