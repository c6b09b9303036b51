// Memory that ranges of paged buffers pass through, cut to their sizes: the first tier that fits.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

namespace zr::host {

class StagingAllocator {
 public:
  /// Null: nothing fits.
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
  /// Takes it back.
  void release(const char* staging) {
    for (Area& area : areas_)
      if (area.memory <= staging && staging < area.memory + area.bytes) area.taken.erase(staging - area.memory);
  }
  /// More memory for rooms; the caller keeps it.
  void add(char* memory, int64_t bytes) { areas_.push_back({memory, bytes, {}}); }
  /// Some staging of that size would fit if none were taken.
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

}  // namespace zr::host
