// Memory of exactly the size asked for, there when it is given.
#pragma once

#include <cstdint>
#include <string>

#include "zr/base.hpp"

namespace cpu {

/// What the machine and the control group of this process can still give, -1 if neither says, and who says it. `root`:
/// where /proc and /sys are, for tests.
struct AvailableMemory {
  int64_t bytes = -1;
  std::string source;
};
AvailableMemory available_memory(const std::string& root = "");

/// Mapped, in whole pages, all of them present. Throws zr::Error(ZR_NOMEM).
class Block {
 public:
  Block(const zr::Host& host, uint64_t bytes, const std::string& tag);
  ~Block();
  Block(const Block&) = delete;
  char* data() const { return data_; }
  uint64_t bytes() const { return bytes_; }    // as asked for
  uint64_t mapped() const { return mapped_; }  // as there

 private:
  void populate(const zr::Host& host) const;
  char* data_ = nullptr;
  uint64_t bytes_, mapped_;
};

}  // namespace cpu
