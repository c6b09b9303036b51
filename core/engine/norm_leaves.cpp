#include "engine/norm_leaves.hpp"

#include <algorithm>
#include <cmath>

#include "base/dtype.hpp"
#include "base/failure.hpp"

namespace zr::host {

namespace {
constexpr const char* kTag = "norm leaves";
}  // namespace

NormLeaves::NormLeaves(Communicator& comm, Pool& pool, const Plan& plan, const std::vector<Unit>& units, Ledger& ledger,
                       Pages* pages, int64_t window)
    : comm_(comm), pool_(pool), plan_(plan), ledger_(ledger), pages_(pages), leaves_(plan.leaves), window_(window) {
  provides_.resize(leaves_.provided.size());
  int64_t first = 0;
  std::size_t unit = 0;
  for (uint32_t i = 0; i < plan.input.parameters.size(); ++i) {
    first_leaf_.push_back(first);
    const Parameter& parameter = plan.input.parameters[i];
    if (parameter.frozen) continue;
    for (const Segment& segment : plan.segments[i]) {
      const int provider = leaves_.everywhere ? plan.rank : segment.owners.front();
      provides_[static_cast<std::size_t>(provider)].push_back(
          {first + segment.first / kLeaf, leaves_of(segment.count)});
      if (provider == plan.rank) provide(i, segment, units, unit);
    }
    first += leaves_of(parameter.count);
  }
  int64_t mine = 0;
  for (const LeafRun& run : own_) mine += leaves_of(run.values.count);
  mine_ = static_cast<double*>(comm_.allocate(std::max<int64_t>(mine, 1) * 8, 64, Tier::device, Kind::other, kTag));
  double* out = mine_;
  for (LeafRun& run : own_) {
    run.out = out;
    out += leaves_of(run.values.count);
  }
  for (std::size_t i = 0; i < own_.size(); ++i) places_.emplace_back(bytes_of(own_[i].values), i);
  std::sort(places_.begin(), places_.end());
  ready_.assign(static_cast<std::size_t>(mine), 0);
  if (leaves_.everywhere) return;
  const int64_t held = std::min(window_, leaves_.total);
  received_ = static_cast<double*>(comm_.allocate(std::max<int64_t>(held, 1) * 8, 64, Tier::device, Kind::other, kTag));
  ordered_.resize(static_cast<std::size_t>(held));
  ledger_.add(Tier::device, Kind::other, kTag, held * 8);
}

NormLeaves::~NormLeaves() {
  comm_.free(mine_);
  comm_.free(received_);
  ledger_.add(Tier::device, Kind::other, kTag, -static_cast<int64_t>(ordered_.size()) * 8);
}

// A segment lies within units of its owner, which ascend as segments do, and meet at a leaf's edge.
void NormLeaves::provide(uint32_t param, const Segment& segment, const std::vector<Unit>& units, std::size_t& unit) {
  const auto holds = [&](int64_t element) {
    const Unit& one = units[unit];
    return one.param == param && one.first <= element && element < one.first + one.count;
  };
  for (int64_t at = segment.first, end = at + segment.count; at < end;) {
    while (unit < units.size() && !holds(at)) ++unit;
    if (unit == units.size())
      fail_bug("rank " + std::to_string(plan_.rank) + " has no sums of '" + plan_.input.parameters[param].name +
               "' where its plan says so");
    const Unit& one = units[unit];
    const int64_t count = std::min(end, one.first + one.count) - at;
    own_.push_back({part_of(one.sum, at - one.first, count), nullptr});
    at += count;
  }
}

void NormLeaves::expect() {
  expects_ = true;
  std::fill(ready_.begin(), ready_.end(), 0);
}

void NormLeaves::arrived(const zr_view& sums, const void* values) {
  if (!expects_ || sums.count == 0 || places_.empty() || sums.dtype != own_.front().values.dtype) return;
  const int64_t size = size_of(sums.dtype);
  const char *begin = bytes_of(sums), *end = begin + sums.count * size;
  auto at = std::upper_bound(places_.begin(), places_.end(), begin,
                             [](const char* address, const auto& place) { return address < place.first; });
  if (at != places_.begin()) --at;
  for (; at != places_.end() && at->first < end; ++at) {
    const LeafRun& run = own_[at->second];
    const char* from = at->first;
    // Whole leaves that lie within what arrived.
    const int64_t first = begin <= from ? 0 : ((begin - from) / size + kLeaf - 1) / kLeaf;
    const int64_t reach = std::min<int64_t>((end - from) / size, run.values.count);
    const int64_t last = reach == run.values.count ? leaves_of(reach) : reach / kLeaf;
    if (first >= last) continue;
    zr_view leaves = part_of(run.values, first * kLeaf, std::min(last * kLeaf, run.values.count) - first * kLeaf);
    leaves.data = static_cast<char*>(const_cast<void*>(values)) + (bytes_of(leaves) - begin);
    leaf_sums(leaves, run.out + first);
    std::fill(ready_.begin() + (run.out - mine_) + first, ready_.begin() + (run.out - mine_) + last, 1);
  }
}

int64_t NormLeaves::sum() {
  early_ = std::count(ready_.begin(), ready_.end(), 1);
  std::vector<LeafRun> missing;
  for (const LeafRun& run : own_) {
    const char* ready = ready_.data() + (run.out - mine_);
    for (int64_t leaf = 0, all = leaves_of(run.values.count); leaf < all;) {
      int64_t next = leaf;
      while (next < all && !ready[next]) ++next;
      if (next > leaf)
        missing.push_back({part_of(run.values, leaf * kLeaf, std::min(next * kLeaf, run.values.count) - leaf * kLeaf),
                           run.out + leaf});
      leaf = next + 1;
    }
  }
  std::erase_if(missing, [&](const LeafRun& run) {
    if (!pages_ || !pages_->holds(run.values.data)) return false;
    pages_->visit(run.values, States::Use::read, "gradient sums", [&](void* memory, int64_t first, int64_t count) {
      leaf_sums(pool_, {{{memory, count, run.values.dtype, 0, {1, 0}}, run.out + first / kLeaf}});
    });
    return true;
  });
  leaf_sums(pool_, missing);
  expects_ = false;
  std::fill(ready_.begin(), ready_.end(), 0);
  int64_t non_finite = 0;
  for (const LeafRun& run : own_)
    for (int64_t leaf = 0; leaf < leaves_of(run.values.count); ++leaf)
      if (!std::isfinite(run.out[leaf]))
        non_finite +=
            non_finite_of(part_of(run.values, leaf * kLeaf, std::min(kLeaf, run.values.count - leaf * kLeaf)));
  return non_finite;
}

int64_t NormLeaves::non_finite_of(const zr_view& leaf) const {
  if (!pages_ || !pages_->holds(leaf.data)) return count_non_finite(leaf);
  int64_t n = 0;
  pages_->visit(leaf, States::Use::read, "gradient sums", [&](void* memory, int64_t, int64_t count) {
    n += count_non_finite({memory, count, leaf.dtype, 0, {1, 0}});
  });
  return n;
}

void NormLeaves::take(const double* leaves, int64_t first, int64_t count, Folded& folded) const {
  for (int64_t i = 0; i < count; ++i) {
    folded.sum_of_squares += leaves[i];
    if (std::isfinite(leaves[i]) || folded.first_non_finite >= 0) continue;
    const auto after = std::upper_bound(first_leaf_.begin(), first_leaf_.end(), first + i) - first_leaf_.begin();
    folded.first_non_finite = after - 1;  // frozen and empty parameters stand before the one that begins where they do
  }
}

// The leaves [begin, end) of all ranks into ordered_.
void NormLeaves::gather(int64_t begin, int64_t end) {
  const auto overlap = [&](const Run& run) {
    return std::max<int64_t>(0, std::min(end, run.leaf + run.count) - std::max(begin, run.leaf));
  };
  std::vector<int64_t> counts(provides_.size(), 0);
  for (std::size_t r = 0; r < provides_.size(); ++r)
    for (std::size_t i = at_[r]; i < provides_[r].size() && provides_[r][i].leaf < end; ++i)
      counts[r] += overlap(provides_[r][i]);
  const int64_t own = counts[static_cast<std::size_t>(plan_.rank)];
  zr_coll gather{};
  gather.op = ZR_ALL_GATHER;
  gather.src = {mine_ + sent_, own, ZR_F64, 0, {1, 0}};
  gather.dst = {received_, end - begin, ZR_F64, 0, {1, 0}};
  gather.counts = counts.data();
  gather.label = kTag;
  comm_.run_control(gather);
  sent_ += own;
  const double* from = received_;
  for (std::size_t r = 0; r < provides_.size(); ++r)
    for (std::size_t& i = at_[r]; i < provides_[r].size() && provides_[r][i].leaf < end; ++i) {
      const Run& run = provides_[r][i];
      const int64_t count = overlap(run);
      std::copy_n(from, count, ordered_.data() + std::max(begin, run.leaf) - begin);
      from += count;
      if (run.leaf + run.count > end) break;  // the rest of it is in the next window
    }
}

NormLeaves::Folded NormLeaves::fold() {
  Folded folded;
  if (leaves_.everywhere) {
    take(mine_, 0, leaves_.total, folded);
    return folded;
  }
  at_.assign(provides_.size(), 0);
  sent_ = 0;
  for (int64_t begin = 0; begin < leaves_.total; begin += window_) {
    const int64_t end = std::min(begin + window_, leaves_.total);
    gather(begin, end);
    take(ordered_.data(), begin, end - begin, folded);
  }
  return folded;
}

}  // namespace zr::host
