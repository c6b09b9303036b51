// Memory of exactly the requested size, all pages of which are present from the start.
#pragma once

#include <cstdint>
#include <string>

#include "zr/base.hpp"

namespace cpu {

/// Memory that the machine and the control groups of this process have left: the smallest limit, and where it comes
/// from. bytes is -1 if no limit is known.
struct AvailableMemory {
  int64_t bytes = -1;
  std::string source;
};
/// `root`: the folder that contains /proc and /sys, for tests.
AvailableMemory available_memory(const std::string& root = "");

/// A mapping rounded up to full pages, all present. The constructor throws zr::PluginError(ZR_NOMEM).
class Block {
 public:
  Block(const zr::Host& host, uint64_t bytes, const std::string& tag);
  ~Block();
  Block(const Block&) = delete;
  char* data() const { return data_; }
  uint64_t bytes() const { return bytes_; }    // as requested
  uint64_t mapped() const { return mapped_; }  // rounded up to pages

 private:
  void populate(const zr::Host& host) const;
  char* data_ = nullptr;
  uint64_t bytes_, mapped_;
};

}  // namespace cpu
