// The queue of one communicator: operations start in the order of submission and advance on the thread that calls MPI.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "../comm_shm/shm_communicator.hpp"
#include "local_steps.hpp"
#include "mpi_thread.hpp"
#include "transfer.hpp"
#include "way.hpp"
#include "zr/base.hpp"

namespace mpi {

/// Threads as in zr_communicator_api.
class MpiCommunicator : private MpiThread::Client {
 public:
  static constexpr const char* id = "mpi";
  static constexpr uint64_t most_open = 1;  // that a job opens

  /// Throws PluginError. `thread`: null if there is one rank, which needs no MPI.
  MpiCommunicator(const zr::Host& host, const zr_comm_open& open, MpiThread* thread, const MpiOptions& options);
  ~MpiCommunicator() override;
  MpiCommunicator(const MpiCommunicator&) = delete;

  int rank() const { return channel_.rank; }    // [any]
  int world() const { return channel_.world; }  // [any]

  void submit(const zr_coll& coll, zr_stream* stream, zr_done* done);
  /// Starts a collective that waits for the gate, and closes it at its end. More than one rank. [use]
  void submit_through(std::shared_ptr<Gate> gate, const zr_coll& coll) { enqueue(coll, nullptr, std::move(gate)); }
  /// Resolves completions: only here and in submit(), so that the host's code runs on its own threads.
  void progress();
  zr_view mem_alloc(uint64_t bytes, uint64_t align, uint32_t flags);
  void mem_free(const zr_view& memory) noexcept;
  /// Memory of the ranks of this host.
  void shared_alloc(uint64_t bytes, void** writer, const void** reader);
  void shared_free(void* writer) noexcept;
  void abort() noexcept;
  /// The most host memory that each rank allocates for its messages and sums.
  static int64_t most_bytes(int world, const MpiOptions& options);

 private:
  struct Failed {
    zr_code code = ZR_COMM;
    std::string text;
  };
  struct Pending {
    zr::Done done;
    std::string what;
  };
  std::vector<std::string> meet(const zr_comm_open& open);
  void open_channel(const zr_comm_open& open);
  void open_local(const zr_comm_open& open);
  std::unique_ptr<Transfer> transfer(const zr_coll& coll);
  void need_sums();
  uint64_t enqueue(const zr_coll& coll, zr_done* done, std::shared_ptr<Gate> gate);
  State advance() noexcept override;
  bool advance_transfers();
  bool may_start(std::size_t index) const;
  void fail(zr_code code, const std::string& text);
  void end_all(zr_code code) noexcept;
  void resolve();  // what has completed, or failed; throws the failure
  void resolve_completed();
  [[noreturn]] void throw_failure();

  zr::Host host_;
  MpiThread* thread_;
  const MpiOptions options_;
  std::vector<char> pieces_;
  std::mutex local_mutex_;                       // of what the next two members do
  std::unique_ptr<shm::ShmCommunicator> local_;  // of the ranks of this host; null: no hierarchy, or one rank on each
  std::optional<LocalSteps> steps_;
  zr_view sums_{};                                                        // memory of local_
  std::vector<char> sums_alone_;                                          // without local_
  std::map<const void*, std::unique_ptr<void, void (*)(void*)>> memory_;  // of mem_alloc() without local_
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
