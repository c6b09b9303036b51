// Who writes a job's checkpoints: at once, or in the background from a copy of this rank's part.
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

namespace zr::host {

/// How the ranks of a job talk, by the control plane's store: once per save, load, or other decision. All ranks make
/// them in the same order.
CheckpointComm peers_of(const std::shared_ptr<Control>& control);

/// Training thread only; all ranks call the same methods in the same order.
class Saver {
 public:
  Saver(std::shared_ptr<Control> control, Ledger& ledger);
  ~Saver();  // waits for what is being written
  Saver(const Saver&) = delete;

  /// See peers_of().
  CheckpointComm peers() { return peers_of(control_); }
  /// Takes `root` for this job, to its end. Throws Failure(user) on all ranks, naming the owner.
  void lock_folder(const std::string& root);
  /// Host memory for copies of such images, counted in the ledger. Throws Failure(environment).
  void reserve_for(const CheckpointContents& image);

  /// Writes now; returns the folder. wait() before it.
  std::string save(const std::string& root, const CheckpointContents& image, int64_t keep);
  /// Copies the slabs and returns; no file is touched on this thread. wait() before it.
  void save_async(const std::string& root, CheckpointContents image, int64_t keep);
  /// The save in the background failed, and nobody was told.
  bool failed() const { return failed_; }
  /// Returns when nothing is being written: true if a save ended well since the last call. Throws, once, what went
  /// wrong.
  bool wait();
  /// Waits, logs what went wrong, and gives folders and memory back. Nothing can be saved any more.
  void close();

 private:
  std::string write(const std::string& root, const CheckpointContents& image, int64_t keep, const CheckpointComm& comm);
  void lock_on_rank0(const std::string& root);  // rank 0
  void reserve(int64_t bytes);
  void copy(CheckpointContents& image);
  std::shared_ptr<Control> control_;
  Ledger& ledger_;
  std::map<std::string, FolderLock> locks_;  // by the folder's one true path
  HugePageMemory snapshot_;
  int64_t snapshot_bytes_ = 0;
  std::thread writer_;  // alone uses what stands here, while it runs
  std::atomic<bool> failed_{false};
  std::exception_ptr failure_;
};

}  // namespace zr::host
