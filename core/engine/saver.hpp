// Writes a job's checkpoints: synchronously, or in the background from a copy of this rank's part.
#pragma once

#include <atomic>
#include <exception>
#include <map>
#include <memory>
#include <string>
#include <thread>

#include "base/huge_page_memory.hpp"
#include "base/ledger.hpp"
#include "checkpoint/folder.hpp"
#include "checkpoint/save.hpp"
#include "control/control.hpp"

namespace zr::host::engine {

/// Communication between the ranks of a job through the control plane's store. Create one object per save, load or
/// other decision, on all ranks in the same order.
checkpoint::CheckpointComm checkpoint_comm_of(const std::shared_ptr<control::Control>& control);

/// Training thread only; all ranks call the same methods in the same order.
class Saver {
 public:
  Saver(std::shared_ptr<control::Control> control, Ledger& ledger);
  ~Saver();  // the same as close()
  Saver(const Saver&) = delete;

  /// See checkpoint_comm_of().
  checkpoint::CheckpointComm checkpoint_comm() { return checkpoint_comm_of(control_); }
  /// Locks `root` for this job until close(). If another process holds the lock, throws UserError, naming the
  /// owner, on all ranks.
  void lock_folder(const std::string& root);
  /// Allocates host memory for copies of contents of this size, and counts it in the ledger. Throws EnvironmentError
  /// if the allocation fails.
  void reserve_for(const checkpoint::CheckpointContents& contents);

  /// Writes a checkpoint into `root` and returns its folder. keep: as in SaveOptions. Call wait() first.
  std::string save(const std::string& root, const checkpoint::CheckpointContents& contents, int64_t keep);
  /// Copies this rank's slabs and returns; another thread writes the files. Call wait() first.
  void save_async(const std::string& root, checkpoint::CheckpointContents contents, int64_t keep);
  /// True if the background save failed and wait() has not thrown the failure yet.
  bool failed() const { return failed_; }
  /// Waits for the background save. Returns true if one succeeded since the last call; throws the failure of one that
  /// failed, once.
  bool wait();
  /// Waits for the background save, logs its failure, and releases folder locks and memory. Do not save afterwards.
  void close();

 private:
  std::string write(const std::string& root, const checkpoint::CheckpointContents& contents, int64_t keep,
                    const checkpoint::CheckpointComm& comm);
  void lock_on_rank0(const std::string& root);  // called on rank 0 only
  void reserve(int64_t bytes);
  void copy(checkpoint::CheckpointContents& contents);
  std::shared_ptr<control::Control> control_;
  Ledger& ledger_;
  std::map<std::string, checkpoint::FolderLock> locks_;  // by the folder's canonical path
  HugePageMemory snapshot_;
  int64_t snapshot_bytes_ = 0;
  std::thread writer_;  // while it runs, only it uses locks_, the memory of snapshot_ and failure_
  std::atomic<bool> failed_{false};
  std::exception_ptr failure_;
};

}  // namespace zr::host::engine
