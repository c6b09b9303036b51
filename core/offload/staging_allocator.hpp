// Allocates staging memory for ranges of disk-backed buffers from a list of areas, first fit.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

namespace zr::host::offload {

class StagingAllocator {
 public:
  /// Returns null if nothing fits.
  char* allocate(int64_t bytes) {
    for (Area& area : areas_) {
      int64_t at = 0;
      for (const auto& [begin, end] : area.taken) {
        if (begin - at >= bytes) break;
        at = end;
      }
      if (area.bytes - at < bytes) continue;
      area.taken.emplace(at, at + bytes);
      return area.memory + at;
    }
    return nullptr;
  }
  /// Frees memory that allocate() returned.
  void release(const char* staging) {
    for (Area& area : areas_)
      if (area.memory <= staging && staging < area.memory + area.bytes) area.taken.erase(staging - area.memory);
  }
  /// Adds an area of memory, which the caller owns.
  void add(char* memory, int64_t bytes) { areas_.push_back({memory, bytes, {}}); }
  /// True if this size fits when nothing is allocated.
  bool fits_when_empty(int64_t bytes) const {
    for (const Area& area : areas_)
      if (area.bytes >= bytes) return true;
    return false;
  }

 private:
  struct Area {
    char* memory;
    int64_t bytes;
    std::map<int64_t, int64_t> taken;  // begin, end
  };
  std::vector<Area> areas_;
};

}  // namespace zr::host::offload
