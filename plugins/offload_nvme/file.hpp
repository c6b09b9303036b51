// The file of an instance in one folder: unnamed where the file system has that, so that nothing can be left behind.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "fault.hpp"
#include "swap_folder.hpp"
#include "zr/base.hpp"

namespace nvme {

constexpr uint64_t kAlign = 4096;  // of offsets, lengths, addresses, and what a checksum stands for

enum class Direct { automatic, yes, no };

class File {
 public:
  /// Makes it in `folder` and tries it. Throws zr::Error naming folder and remedy.
  File(const zr::Host& host, const std::string& folder, Direct direct, Faults& faults);
  ~File();
  File(const File&) = delete;
  int fd() const { return fd_; }
  const std::string& name() const { return name_; }  // for texts: "/scratch (unnamed file)"
  bool direct() const { return direct_; }
  /// Bytes [at, at + bytes), behind all others, are the file's own from now on, or ZR_IO.
  void extend(uint64_t at, uint64_t bytes);
  /// What the file system has left, and which one it is.
  uint64_t free_bytes() const;
  uint64_t device() const;

 private:
  void make(const zr::Host& host, const std::string& folder, Faults& faults);
  void try_out(const zr::Host& host, const std::string& folder, Direct direct);
  int write_zeros(uint64_t at, uint64_t bytes) const;
  std::unique_ptr<SwapFolder> swap_;  // where it has a name
  std::string folder_, name_, path_;
  int fd_ = -1;
  bool direct_ = false;
};

}  // namespace nvme
