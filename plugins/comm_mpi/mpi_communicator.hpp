// The queue of one communicator: operations start in the order of submission and advance on the thread that calls MPI.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "mpi_thread.hpp"
#include "transfer.hpp"
#include "zr/base.hpp"

namespace mpi {

/// Threads as in zr_communicator_api.
class MpiCommunicator : private MpiThread::Client {
 public:
  /// Throws PluginError. `thread`: null if there is one rank, which needs no MPI.
  MpiCommunicator(const zr::Host& host, const zr_comm_open& options, MpiThread* thread);
  ~MpiCommunicator() override;
  MpiCommunicator(const MpiCommunicator&) = delete;

  void submit(const zr_coll& coll, zr_stream* stream, zr_done* done);
  /// Resolves completions: only here and in submit(), so that the host's code runs on its own threads.
  void progress();
  void abort() noexcept;

 private:
  struct Failed {
    zr_code code = ZR_COMM;
    std::string text;
  };
  struct Pending {
    zr::Done done;
    std::string what;
  };
  void meet(const zr_comm_open& options);
  void open_channel(const zr_comm_open& options);
  State advance() noexcept override;
  bool advance_transfers();
  bool may_start(std::size_t index) const;
  void fail(zr_code code, const std::string& text);
  void resolve_completed();
  [[noreturn]] void throw_failure();

  zr::Host host_;
  MpiThread* thread_;
  std::vector<char> pieces_;
  Channel channel_;
  int tag_limit_ = 0;          // the largest tag of a message
  uint64_t collectives_ = 0;   // submitted
  std::deque<Pending> queue_;  // not resolved, in order of submission
  uint64_t resolved_ = 0;
  std::vector<std::unique_ptr<Transfer>> transfers_;  // not complete, or after one that is not [MPI thread]
  std::atomic<bool> aborted_{false};
  std::mutex mutex_;  // of what follows
  std::condition_variable changed_;
  std::vector<std::unique_ptr<Transfer>> submitted_;
  uint64_t completed_ = 0;  // operations that are complete, and all before them
  std::optional<Failed> failed_;
};

}  // namespace mpi
