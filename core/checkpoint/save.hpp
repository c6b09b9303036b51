// Saving: every rank writes its parts of whole tensors into shared files, then rank 0 commits.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "checkpoint/manifest.hpp"

namespace zr::host {

/// Bytes [first, first + bytes) of a tensor, in this rank's memory until the save ends. Slabs of all ranks cover every
/// tensor once.
struct Slab {
  uint32_t tensor;  // of CheckpointContents::tensors
  int64_t first, bytes;
  const void* data;
  /// Where there is no such memory: copies bytes [from, from + bytes) of the slab to `to`, a chunk at a time. Not where
  /// the save is in the background.
  std::function<void(int64_t from, int64_t bytes, void* to)> read{};
};

/// What one rank knows of a checkpoint to be.
struct CheckpointContents {
  int64_t step = 0;
  std::string run, metadata_json;   // Manifest
  bool last_step_applied = true;    // as the facts have it
  std::vector<TensorInfo> tensors;  // the same on all ranks
  std::vector<Slab> slabs;          // this rank's
  /// By how much this rank's slabs, each aligned to kAlignment, can grow in a later image of the same model.
  int64_t later_bytes = 0;
  static constexpr int64_t kAlignment = 64;
};

/// How the ranks of a job talk while they save or load. Both are collective.
struct CheckpointComm {
  int rank = 0, world = 1;
  std::function<std::vector<std::string>(const std::string& mine)> gather;  // all ranks' words on rank 0, else nothing
  std::function<std::string(const std::string& word)> broadcast;            // rank 0's
};
/// A job of one rank.
CheckpointComm single_rank_comm();
/// Runs `work` on every rank; if it failed on any, throws on all what the first of them threw.
void run_on_all_ranks(const CheckpointComm& comm, const std::function<void()>& work);

struct SaveOptions {
  int64_t keep = 0;                        // of committed ones (retain()); 0: all
  int64_t file_bytes = int64_t{4} << 30;   // a file ends with the tensor that reaches it
  int64_t chunk_bytes = int64_t{4} << 20;  // hashed together
};

/// A checkpoint that is committed.
struct SaveResult {
  std::string folder;
  std::vector<std::string> warnings;  // rank 0's: what else did not go as it should
};

/// Writes the checkpoint into the folder `path`. Collective. Rank 0's process holds the FolderLock of it. A failure on
/// any rank is thrown on all, says whether it was committed, and leaves the checkpoints that were there as they were.
SaveResult save(const std::string& path, const CheckpointContents& image, const CheckpointComm& comm,
                const SaveOptions& options);

}  // namespace zr::host
