// All-gather groups: the parameters that zero3 gathers together, each group cut over all ranks; and the gradient
// buckets made of the groups.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "zr/flat_layout.hpp"
#include "zr/gradient_buckets.hpp"

namespace zero3 {

/// Elements [begin, end) of a group.
struct GroupRange {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};

/// Consecutive parameters that are gathered together: one parameter, or one with the small parameters of its module (a
/// bias); either all frozen or all trainable. Parameters of at most `persistent` elements stay unsharded; those of one
/// bucket form one group.
struct GatherGroup {
  std::vector<uint32_t> params;
  std::vector<int64_t> start;  // of each parameter in the group; a multiple of the alignment
  int64_t size = 0;            // elements to the last parameter's end
  std::vector<int64_t> cut;    // rank r has [cut[r], cut[r + 1]); every cut is at an edge of a block
  bool persistent = false, frozen = false;
  int64_t own_offset = 0;  // of this rank's part in the shard buffer, or of a full persistent group in its buffer
  GroupRange part(int32_t rank) const { return {cut[static_cast<size_t>(rank)], cut[static_cast<size_t>(rank) + 1]}; }
};

/// The index-th of n pieces of a group's part on every rank. Buckets are made of such pieces. n is 1 unless the group
/// is larger than a bucket.
struct BucketPiece {
  uint32_t group;
  int64_t index, n;
};

/// Pure; immutable. [any]
class GatherGroups {
 public:
  /// bucket, persistent: limits in elements.
  GatherGroups(const zr_plan_in& in, int64_t bucket, int64_t persistent);

  const std::vector<GatherGroup>& groups() const { return groups_; }
  uint32_t group_of(uint32_t param) const { return group_of_[param]; }
  /// The offset of a parameter in its group.
  int64_t offset(uint32_t param) const { return offset_[param]; }
  int64_t shard() const { return shard_; }            // elements of this rank's parts of all sharded groups
  int64_t persistent() const { return persistent_; }  // elements of persistent groups, unsharded
  /// Elements of the groups that one operator is likely to use at once, for the largest module.
  int64_t largest_use() const { return largest_use_; }
  int64_t sharded() const { return sharded_; }  // elements of all sharded groups, gathered
  /// The number of buckets. They are sent in their order: from the model's end, as backward visits it.
  size_t buckets() const { return buckets_.size(); }
  /// bucket_size: elements of a bucket, padding included. own_part: elements of this rank's part; appends its ranges,
  /// with offsets from the begin of the part, to `ranges`. before_own: elements of the parts of all lower ranks. The
  /// cost of the first two does not depend on the number of ranks.
  int64_t bucket_size(size_t b) const { return size_[b]; }
  int64_t own_part(size_t b, std::vector<zr::GradientBucket::ParamRange>& ranges) const {
    return part(b, in_->rank, 0, ranges);
  }
  int64_t before_own(size_t b) const;
  /// A bucket for zr::GradientBuckets.
  zr::GradientBucket bucket(size_t b) const;
  /// Calls fn(param, first, count, offset in the group) for the elements in a range of a group.
  template <class F>
  void pieces(const GatherGroup& group, const GroupRange& range, F&& fn) const {
    for (size_t i = 0; i < group.params.size(); ++i) {
      const int64_t begin = std::max(range.begin, group.start[i]);
      const int64_t end = std::min(range.end, group.start[i] + in_->params[group.params[i]]->count);
      if (end > begin) fn(group.params[i], begin - group.start[i], end - begin, begin);
    }
  }

 private:
  void make_groups(int64_t bucket, int64_t persistent);
  void cut_groups();
  void cut_groups_by_cost();
  double cost_before(const GatherGroup& group, int64_t element) const;
  int64_t edge_at_cost(const GatherGroup& group, double cost) const;
  void lay_out_groups();
  void make_buckets(int64_t bucket);
  int64_t element_count(const GatherGroup& group) const;
  int64_t edge(const GatherGroup& group, int64_t element) const;
  GroupRange range(const BucketPiece& piece, int32_t rank) const;
  int64_t part(size_t b, int32_t rank, int64_t offset, std::vector<zr::GradientBucket::ParamRange>& ranges) const;
  /// The parts of a group; parts that are cut into pieces of equal sizes are counted together.
  struct PartSizes {
    std::vector<std::pair<int64_t, int64_t>> equal;  // size in elements, and number of ranks with this size
    std::vector<int32_t> others;                     // ranks whose part is different
    int64_t block = 1;                               // elements of a block of the first parameter
  };
  PartSizes part_sizes_of(const GatherGroup& group) const;
  int64_t size_of(const BucketPiece& piece, const PartSizes& part_sizes) const;

  const zr_plan_in* in_;
  std::vector<GatherGroup> groups_;
  std::vector<uint32_t> group_of_;
  std::vector<int64_t> offset_;
  std::vector<std::vector<BucketPiece>> buckets_;
  std::vector<int64_t> size_;  // by bucket
  int64_t shard_ = 0, persistent_ = 0, largest_use_ = 0, sharded_ = 0;
};

}  // namespace zero3
