// What zero3 gathers at a time: cells, each cut over all ranks; and the gradient buckets made of them.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "zr/gradient_buckets.hpp"

namespace zero3 {

struct Range {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};

/// Consecutive parameters that travel together: one, or a module's with its small ones (a bias), frozen or trainable
/// alike. Parameters of at most `persistent` elements stay whole; those of a bucket form one cell.
struct Cell {
  std::vector<uint32_t> params;
  std::vector<int64_t> start;  // of each parameter in the cell; a multiple of the alignment
  int64_t size = 0;            // elements to the last parameter's end
  std::vector<int64_t> cut;    // rank r has [cut[r], cut[r + 1]); every cut is an edge of a leaf
  bool persistent = false, frozen = false;
  int64_t own = 0;  // where this rank's part stands among the shards, or a persistent cell as a whole
  Range part(int32_t rank) const { return {cut[static_cast<size_t>(rank)], cut[static_cast<size_t>(rank) + 1]}; }
};

/// The index-th of n pieces of a cell's part on every rank, of which buckets are made: all of it, or less where the
/// cell is large.
struct Chunk {
  uint32_t cell;
  int64_t index, n;
};

/// Pure; immutable. [any]
class Cells {
 public:
  /// bucket, persistent: elements.
  Cells(const zr_plan_in& in, int64_t bucket, int64_t persistent);

  const std::vector<Cell>& all() const { return cells_; }
  uint32_t cell_of(uint32_t param) const { return cell_of_[param]; }
  /// Where a parameter begins in its cell.
  int64_t offset(uint32_t param) const { return offset_[param]; }
  int64_t shard() const { return shard_; }            // elements of this rank's parts of all sharded cells
  int64_t persistent() const { return persistent_; }  // elements of persistent cells, whole
  /// Elements of the largest cells an operator is likely to use at once: those of one module.
  int64_t largest_use() const { return largest_use_; }
  int64_t sharded() const { return sharded_; }  // elements of all sharded cells, whole
  /// How many there are. They leave in their order: from the model's end, as backward visits it.
  size_t buckets() const { return buckets_.size(); }
  /// Elements of a bucket, alignment included; those of this rank's part, whose runs, with offsets from its begin, are
  /// appended to `runs`; and those of all lower ranks. The first two cost the same however many ranks there are.
  int64_t bucket_size(size_t b) const { return size_[b]; }
  int64_t own(size_t b, std::vector<zr::GradientBucket::Run>& runs) const { return part(b, in_->rank, 0, runs); }
  int64_t before_own(size_t b) const;
  /// A bucket as the SDK knows it.
  zr::GradientBucket bucket(size_t b) const;
  /// Calls fn(param, first, count, offset in the cell) for what lies in a range of a cell.
  template <class F>
  void pieces(const Cell& cell, const Range& range, F&& fn) const {
    for (size_t i = 0; i < cell.params.size(); ++i) {
      const int64_t begin = std::max(range.begin, cell.start[i]);
      const int64_t end = std::min(range.end, cell.start[i] + in_->params[cell.params[i]]->count);
      if (end > begin) fn(cell.params[i], begin - cell.start[i], end - begin, begin);
    }
  }

 private:
  void make_cells(int64_t bucket, int64_t persistent);
  void cut_cells();
  void place_cells();
  void make_buckets(int64_t bucket);
  int64_t live(const Cell& cell) const;
  int64_t edge(const Cell& cell, int64_t element) const;
  Range range(const Chunk& chunk, int32_t rank) const;
  int64_t part(size_t b, int32_t rank, int64_t offset, std::vector<zr::GradientBucket::Run>& runs) const;
  /// A cell's parts, those together that are cut into pieces of equal sizes.
  struct Parts {
    std::vector<std::pair<int64_t, int64_t>> alike;  // elements, and ranks with so many
    std::vector<int32_t> others;                     // ranks
  };
  Parts parts_of(const Cell& cell) const;
  int64_t size_of(const Chunk& chunk, const Parts& parts) const;

  const zr_plan_in* in_;
  std::vector<Cell> cells_;
  std::vector<uint32_t> cell_of_;
  std::vector<int64_t> offset_;
  std::vector<std::vector<Chunk>> buckets_;
  std::vector<int64_t> size_;  // by bucket
  int64_t shard_ = 0, persistent_ = 0, largest_use_ = 0, sharded_ = 0;
};

}  // namespace zero3
