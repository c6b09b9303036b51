// Loading: reads any part of any tensor of a checkpoint and verifies every byte before it returns.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/file.hpp"
#include "checkpoint/manifest.hpp"
#include "checkpoint/read_watch.hpp"
#include "checkpoint/safetensors.hpp"

namespace zr::host::checkpoint {

/// Whether `path` holds weights of another program: a file NAME.safetensors, or a folder without a manifest that has
/// model.safetensors or an index of several files.
bool is_from_other_program(const std::string& path);

/// An open checkpoint, or open weights of another program. At most one thread at a time. A read that does not return
/// ends the process: see ReadWatch.
class Checkpoint {
 public:
  /// Reads manifest and headers; calls `on_progress`, if any, with the number of files read and the total. Throws
  /// UserError naming the file that is missing, truncated, or differs from the manifest in step, run or contents.
  explicit Checkpoint(const std::string& folder, const std::function<void(int64_t, int64_t)>& on_progress = nullptr);
  /// Whether these are weights of another program: every tensor is a weight, and only the headers can be verified.
  bool from_other_program() const { return from_other_program_; }

  const Manifest& manifest() const { return manifest_; }
  const std::string& folder() const { return folder_; }
  /// The tensor; null if the checkpoint does not have it.
  const SavedTensor* find(const std::string& kind, const std::string& name) const;
  /// Reads bytes [first, first + bytes) of the tensor. Throws UserError naming file, tensor and offset if a byte
  /// has changed. If only part of a chunk is needed, the full chunk is read into a buffer and verified.
  void read(const SavedTensor& tensor, int64_t first, int64_t bytes, void* to) const;
  /// Verifies all chunks, or the `portion`-th of `portions` equal portions; calls `on_progress` with the number of
  /// bytes verified so far.
  void verify(const std::function<void(int64_t)>& on_progress, int portion = 0, int portions = 1) const;
  int64_t bytes() const;  // total size of all tensors
  int64_t largest_chunk() const;

 private:
  void read_manifest();
  void check_file(uint32_t index);
  void check_tensors(uint32_t index, const TensorHeader& header) const;
  void check_step() const;
  void check_index() const;
  void open_from_other_program();
  void open_indexed_files();
  TensorHeader open_file_without_manifest(const std::string& name);
  void add_weight(StoredTensor stored, int64_t data);
  void read_bytes(const File& file, int64_t at, void* to, int64_t bytes) const;
  void read_verified(const SavedTensor& tensor, const Chunk& chunk, int64_t first, void* to) const;
  std::unique_ptr<ReadWatch> watch_ = std::make_unique<ReadWatch>();
  std::string folder_;
  Manifest manifest_;
  bool from_other_program_ = false;
  std::vector<std::pair<uint64_t, uint32_t>> index_;  // hash of kind and name, index of manifest_.tensors; sorted
  std::vector<File> files_;
  mutable std::vector<char> chunk_buffer_;
};

}  // namespace zr::host::checkpoint
