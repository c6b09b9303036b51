// Where the bytes of an allocation are in the files, and their checksums.
#pragma once

#include <atomic>
#include <cstdint>
#include <iterator>
#include <map>
#include <vector>

namespace nvme {

/// Block i of an allocation is in file i % files; the blocks of an allocation in one file are one range.
struct Stripes {
  uint64_t block_bytes;
  uint32_t files;
  /// Bytes in one file of an allocation of `bytes`.
  uint64_t bytes_in(uint32_t file, uint64_t bytes) const {
    const uint64_t blocks = (bytes + block_bytes - 1) / block_bytes;
    if (file >= blocks) return 0;
    const uint64_t full = (blocks - file + files - 1) / files * block_bytes;
    return (blocks - 1) % files == file ? full - (blocks * block_bytes - bytes) : full;
  }
};

struct Allocation {
  Allocation(uint64_t size, uint64_t checked) : bytes(size), checksums(checked) {}
  uint64_t bytes;
  std::vector<uint64_t> at;                      // by file: the begin of its range
  std::vector<std::atomic<uint32_t>> checksums;  // of every kAlign bytes; 0: not written yet; empty: no checksums
};

/// The free ranges of one file; none of them touches its end.
class Ranges {
 public:
  uint64_t end() const { return end_; }
  /// Bytes before end() that are not free.
  uint64_t in_use() const {
    uint64_t bytes = end_;
    for (const auto& [at, size] : free_) bytes -= size;
    return bytes;
  }
  /// The begin of the first free range that is large enough, else end(), which becomes larger.
  uint64_t take(uint64_t bytes) {
    for (auto range = free_.begin(); range != free_.end(); ++range) {
      const auto [at, size] = *range;
      if (size < bytes) continue;
      free_.erase(range);
      if (size > bytes) free_[at + bytes] = size - bytes;
      return at;
    }
    end_ += bytes;
    return end_ - bytes;
  }
  /// If the bytes before end() are free then, end() becomes smaller.
  void release(uint64_t at, uint64_t bytes) {
    if (bytes == 0) return;
    const auto behind = free_.lower_bound(at);
    if (behind != free_.end() && behind->first == at + bytes) {
      bytes += behind->second;
      free_.erase(behind);
    }
    const auto before = free_.lower_bound(at);
    if (before != free_.begin() && std::prev(before)->first + std::prev(before)->second == at) {
      at = std::prev(before)->first;
      bytes += std::prev(before)->second;
    }
    if (at + bytes == end_) {
      end_ = at;
      free_.erase(at);
    } else {
      free_[at] = bytes;
    }
  }

 private:
  std::map<uint64_t, uint64_t> free_;  // begin, bytes
  uint64_t end_ = 0;
};

}  // namespace nvme
