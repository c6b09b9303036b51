// Saving: every rank writes its parts of the unsharded tensors into shared files, then rank 0 commits.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "checkpoint/manifest.hpp"

namespace zr::host::checkpoint {

/// Bytes [first, first + bytes) of a tensor. The data must stay in this rank's memory until the save ends. The slabs of
/// all ranks cover every tensor exactly once.
struct Slab {
  uint32_t tensor;  // index in CheckpointContents::tensors
  int64_t first, bytes;
  const void* data;
  /// Used if `data` is null: copies bytes [from, from + bytes) of the slab to `to`; called for one chunk at a time. Not
  /// supported in asynchronous saves.
  std::function<void(int64_t from, int64_t bytes, void* to)> read{};
};

/// The contents of a new checkpoint, as one rank provides them.
struct CheckpointContents {
  int64_t step = 0;
  std::string run, metadata_json;   // as in Manifest
  bool last_step_applied = true;    // as in CheckpointMetadata
  std::vector<TensorInfo> tensors;  // the same on all ranks
  std::vector<Slab> slabs;          // of this rank
  /// The number of bytes by which this rank's slabs, each aligned to kAlignment, can grow in a later checkpoint of the
  /// same model.
  int64_t later_bytes = 0;
  static constexpr int64_t kAlignment = 64;
};

/// Communication between the ranks of a job during a save or load. Both functions are collective.
struct CheckpointComm {
  int rank = 0, world = 1;
  std::function<std::vector<std::string>(const std::string& text)> gather;  // on rank 0: all strings; else: empty
  std::function<std::string(const std::string& text)> broadcast;            // returns the string of rank 0
};
/// The CheckpointComm of a job with one rank.
CheckpointComm single_rank_comm();
/// Runs `work` on every rank; if it fails on any rank, all ranks throw the failure of the first such rank.
void run_on_all_ranks(const CheckpointComm& comm, const std::function<void()>& work);

struct SaveOptions {
  int64_t keep = 0;                        // as in remove_old_checkpoints(); 0: keeps all
  int64_t file_bytes = int64_t{4} << 30;   // a file ends with the tensor that reaches this size
  int64_t chunk_bytes = int64_t{4} << 20;  // size of a chunk, the unit of hashing
};

/// A committed checkpoint.
struct SaveResult {
  std::string folder;
  std::vector<std::string> warnings;  // on rank 0: problems after the commit
};

/// Writes the checkpoint into the folder `path`. Collective. The process of rank 0 must hold the FolderLock of `path`.
/// A failure on any rank is thrown on all ranks, says whether the checkpoint was committed, and leaves the existing
/// checkpoints unchanged.
SaveResult save(const std::string& path, const CheckpointContents& contents, const CheckpointComm& comm,
                const SaveOptions& options);

}  // namespace zr::host::checkpoint
