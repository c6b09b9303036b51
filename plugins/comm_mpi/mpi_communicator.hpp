// The queue of one communicator: operations start in the order of submission and advance on the thread that calls MPI.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "mpi_thread.hpp"
#include "transfer.hpp"
#include "zr/base.hpp"

namespace mpi {

class MpiCommunicator : private MpiThread::Client {
 public:
  MpiCommunicator(const zr::Host& host, const zr_comm_open& options);
  ~MpiCommunicator() override;
  MpiCommunicator(const MpiCommunicator&) = delete;

  void submit(const zr_coll& coll, zr_stream* stream, zr_done* done);
  void abort() noexcept;

 private:
  struct Failed {
    zr_code code;
    std::string text;
  };
  State advance() noexcept override;
  bool advance_transfers();
  bool may_start(std::size_t index) const;
  void resolve_completed();
  void fail(zr_code code, const std::string& text);

  zr::Host host_;
  std::vector<char> pieces_;
  Channel channel_;
  MpiThread* thread_ = nullptr;  // null: one rank, which needs no MPI
  uint64_t collectives_ = 0;
  std::vector<std::unique_ptr<Transfer>> transfers_;  // [MPI thread]
  std::atomic<bool> aborted_{false};
  std::mutex mutex_;  // of what follows
  std::condition_variable changed_;
  std::vector<std::unique_ptr<Transfer>> submitted_;
  const Transfer* awaited_ = nullptr;  // by a call of submit() without a completion; null once it is complete
  std::optional<Failed> failed_;
};

}  // namespace mpi
