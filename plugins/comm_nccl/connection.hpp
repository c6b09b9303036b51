// One communicator of NCCL, whose calls do not block: every wait is a loop here, which abort() ends.
//
// NCCL permits one call at a time per communicator, so a mutex serialises them. A thread watches for errors of NCCL
// while only streams wait for peers, and aborts the communicator after one; it also calls NCCL's abort for abort(),
// because that may take long, after it has taken the communicator away from all others.
#pragma once

#include <semaphore.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "gpu_device.hpp"
#include "nccl_abi.hpp"

namespace nccl {

/// A loop that waits calls pause() between its checks: first it yields the core, later it sleeps.
class Wait {
 public:
  void pause();
  std::chrono::steady_clock::duration elapsed() const { return std::chrono::steady_clock::now() - begin_; }

 private:
  const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

/// [use], one call at a time, except abort().
class Connection {
 public:
  /// Connects the ranks; collective. Throws ZR_COMM if that takes longer than `limit`. Meanwhile calls `require_job`
  /// from time to time, which throws if the job has failed.
  Connection(const Functions& nccl, GpuDevice& device, const UniqueId& id, int rank, int world,
             std::chrono::duration<double> limit, const std::function<void()>& require_job);
  /// Closes it without waiting for operations. If one has failed, aborts it.
  ~Connection();
  Connection(const Connection&) = delete;

  /// Registers memory of the device with NCCL, which can then move its data without copies of its own, until the
  /// connection is closed. NCCL before 2.19, or one that cannot register this memory, copies.
  void register_memory(void* memory, int64_t bytes);
  /// Enqueues the operations of NCCL that `issue` calls, as one group, and returns once they are on their streams. The
  /// first operation with a peer waits for the peer's. `what`: for messages. Throws ZR_CANCELLED after abort(), ZR_COMM
  /// after an error of NCCL.
  void group(const std::string& what, const std::function<Result(const Functions&, Comm)>& issue);
  /// Throws like group(), if a peer has failed since.
  void check(const std::string& what);
  /// Set by abort(), and when the thread has found an error, before what streams wait for ends.
  std::shared_ptr<const std::atomic<bool>> has_ended() const { return is_aborted_; }
  /// Ends all waits and what streams wait for, soon. [any]
  void abort() noexcept;

 private:
  Result state_of(Comm comm);
  void require_open(const std::string& what) const;
  void wait(Result result, const std::string& what);
  void connect(Result result, std::chrono::duration<double> limit, const std::function<void()>& require_job);
  std::string text_of(Result result) const;
  [[noreturn]] void fail(Result result, const std::string& what);
  void close() noexcept;
  bool is_woken() noexcept;
  void find_error() noexcept;
  void run_thread() noexcept;

  const Functions nccl_;
  GpuDevice& device_;
  std::mutex mutex_;               // of calls of NCCL
  Comm comm_ = nullptr;            // null: aborted
  std::vector<void*> registered_;  // handles
  bool has_failed_ = false;
  std::string failure_;  // that the thread has found
  const std::shared_ptr<std::atomic<bool>> is_aborted_ = std::make_shared<std::atomic<bool>>(false);
  sem_t wake_;  // of the thread
  std::thread thread_;
};

}  // namespace nccl
