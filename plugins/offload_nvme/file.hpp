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
  /// Reserves disk space for bytes [at, at + bytes) at the end of the file. Throws ZR_IO.
  void extend(uint64_t at, uint64_t bytes);
  /// Free bytes of the file system, and its device number.
  uint64_t free_bytes() const;
  uint64_t device() const;

 private:
  void make(const zr::Host& host, const std::string& folder, Faults& faults);
  void try_out(const zr::Host& host, const std::string& folder, Direct direct);
  int write_zeros(uint64_t at, uint64_t bytes) const;
  std::unique_ptr<SwapFolder> swap_;  // if the file has a name
  std::string folder_, name_, path_;
  int fd_ = -1;
  bool direct_ = false;
};

}  // namespace nvme
