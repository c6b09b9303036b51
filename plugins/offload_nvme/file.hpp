// The file of an instance in one folder: unnamed if the file system supports it, so that nothing can be left behind.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "fault.hpp"
#include "swap_folder.hpp"
#include "zr/base.hpp"

namespace nvme {

constexpr uint64_t kAlign = 4096;  // alignment of offsets, lengths and addresses; bytes covered by one checksum

enum class Direct { automatic, yes, no };

class File {
 public:
  /// Creates the file in `folder` and tests it. Throws zr::PluginError with the folder and a remedy.
  File(const zr::Host& host, const std::string& folder, Direct direct, Faults& faults);
  ~File();
  File(const File&) = delete;
  int fd() const { return fd_; }
  const std::string& name() const { return name_; }  // for messages: "/scratch (unnamed file)"
  bool direct() const { return direct_; }
  /// Reserves disk space for bytes [at, at + bytes), at the end of the file or in a part that was released. Throws
  /// ZR_IO, and takes no space then.
  void reserve(uint64_t at, uint64_t bytes);
  /// Gives the space of bytes [at, at + bytes) back to the disk. end: of what is still used; nothing after it is.
  void release(uint64_t at, uint64_t bytes, uint64_t end);
  /// Whether the file system cannot free a part within a file: released parts keep their space.
  bool keeps_space() const { return keeps_space_; }
  /// Free bytes of the file system, and its device number.
  uint64_t free_bytes() const;
  uint64_t device() const;

 private:
  void make(const zr::Host& host, const std::string& folder, Faults& faults);
  void try_out(const zr::Host& host, const std::string& folder, Direct direct);
  int write_zeros(uint64_t at, uint64_t bytes) const;
  int allocate(int mode, uint64_t at, uint64_t bytes) const;
  std::unique_ptr<SwapFolder> swap_;  // if the file has a name
  std::string folder_, name_, path_;
  int fd_ = -1;
  bool direct_ = false;
  uint64_t size_ = 0;  // bytes of the file
  bool keeps_space_ = false;
};

}  // namespace nvme
