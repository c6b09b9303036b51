// Loading: any part of any tensor of a checkpoint, each byte checked before it is handed over.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "base/file.hpp"
#include "checkpoint/manifest.hpp"
#include "checkpoint/safetensors.hpp"

namespace zr::host {

/// Weights as other programs write them: a file NAME.safetensors, or a folder with model.safetensors or an index of
/// several, and no manifest.
bool is_foreign(const std::string& path);

/// A committed checkpoint, or such weights, opened. At most one thread at a time.
class Checkpoint {
 public:
  /// Reads manifest and headers; `on_progress`, if any, hears how many files of how many were looked into. Throws
  /// Failure(user) naming the file that is missing, cut off, or of another step, run or content than the manifest says.
  explicit Checkpoint(const std::string& folder, const std::function<void(int64_t, int64_t)>& on_progress = nullptr);
  /// Every tensor is a weight, and nothing but the headers can be checked.
  bool foreign() const { return foreign_; }

  const Manifest& manifest() const { return manifest_; }
  const std::string& folder() const { return folder_; }
  /// Null if there is none.
  const SavedTensor* find(const std::string& role, const std::string& name) const;
  /// Bytes [first, first + bytes) of the tensor. Throws Failure(user) naming file, tensor and offset where a byte
  /// changed. Chunks that are wanted in part are read whole, into a buffer of one chunk.
  void read(const SavedTensor& tensor, int64_t first, int64_t bytes, void* to) const;
  /// Reads every chunk, or the `part`-th of `parts` equal ones; `on_progress` hears how many bytes were checked so far.
  void verify(const std::function<void(int64_t)>& on_progress, int part = 0, int parts = 1) const;
  int64_t bytes() const;  // of all tensors
  int64_t largest_chunk() const;

 private:
  void check_file(uint32_t index);
  void check_tensors(uint32_t index, const TensorHeader& header) const;
  void check_step() const;
  void check_index() const;
  void open_foreign();
  void take(const SavedTensor& tensor, const Chunk& chunk, int64_t first, void* to) const;
  std::string folder_;
  Manifest manifest_;
  bool foreign_ = false;
  std::vector<std::pair<uint64_t, uint32_t>> index_;  // hash of role and name, index of manifest_.tensors; sorted
  std::vector<File> files_;
  mutable std::vector<char> chunk_buffer_;
};

}  // namespace zr::host
