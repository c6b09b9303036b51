// Loading: any part of any tensor of a checkpoint, each byte checked before it is handed over.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "checkpoint/file.hpp"
#include "checkpoint/manifest.hpp"

namespace zr::host {

/// A committed checkpoint, opened. At most one thread at a time.
class Checkpoint {
 public:
  /// Reads manifest and headers. Throws Failure(user) naming the file that is missing, cut off, or of another step, run
  /// or content than the manifest says.
  explicit Checkpoint(const std::string& folder);

  const Manifest& manifest() const { return manifest_; }
  const std::string& folder() const { return folder_; }
  /// Null if there is none.
  const SavedTensor* find(const std::string& role, const std::string& name) const;
  /// Bytes [first, first + bytes) of the tensor. Throws Failure(user) naming file, tensor and offset where a byte
  /// changed. Chunks that are wanted in part are read whole, into a buffer of one chunk.
  void read(const SavedTensor& tensor, int64_t first, int64_t bytes, void* to) const;
  /// Reads all of it; `told` hears how many bytes were checked so far.
  void verify(const std::function<void(int64_t)>& told) const;
  int64_t bytes() const;  // of all tensors
  int64_t largest_chunk() const;

 private:
  void check_file(uint32_t index);
  void take(const SavedTensor& tensor, const Chunk& chunk, int64_t first, void* to) const;
  std::string folder_;
  Manifest manifest_;
  std::vector<File> files_;
  mutable std::vector<char> room_;
};

}  // namespace zr::host
