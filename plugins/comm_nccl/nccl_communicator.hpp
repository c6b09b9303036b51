// One open communicator, for host memory or for memory of the device. An operation is a sequence of rounds; in each,
// the ranks send and receive parts as one group of NCCL, and then reduce what has arrived.
//
// Host memory goes through staging memory of the device, on a stream of the communicator's own. Calls are [use], one at
// a time; abort() is [any].
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "connection.hpp"
#include "gpu_device.hpp"
#include "nccl_abi.hpp"
#include "zr/collective_parts.hpp"
#include "zr/communicator.hpp"
#include "zr/device_stream.hpp"

namespace nccl {

/// The end of the last operation on memory of a device, for all communicators of the process.
class LastOperation {
 public:
  explicit LastOperation(std::unique_ptr<Mark> mark) : mark_(std::move(mark)) {}
  void record(void* stream) {
    const std::lock_guard<std::mutex> lock(mutex_);
    mark_->record(stream);
  }
  /// As Mark::wait().
  void wait(void* stream) {
    const std::lock_guard<std::mutex> lock(mutex_);
    mark_->wait(stream);
  }

 private:
  std::mutex mutex_;  // engines may have threads of their own
  const std::unique_ptr<Mark> mark_;
};

/// A device, for the communicators of one instance.
struct SharedDevice {
  std::unique_ptr<GpuDevice> device;
  std::shared_ptr<LastOperation> last_operation;
};

/// The keys of the plug-in.
struct Settings {
  int64_t staging_bytes;
  std::string library;
  std::chrono::duration<double> connect_timeout;
};

class NcclCommunicator {
 public:
  /// Collective.
  NcclCommunicator(const zr::Host& host, const zr_comm_open& options, const Settings& settings,
                   std::shared_ptr<SharedDevice> shared);
  ~NcclCommunicator();
  NcclCommunicator(const NcclCommunicator&) = delete;

  void submit(const zr_coll& coll, zr_stream* stream, zr_done* done);
  /// Throws if NCCL has failed: then what streams have read since is undefined.
  void progress();
  void abort() noexcept;

 private:
  struct Failure {
    zr_code code;
    std::string text;
  };
  // A completion, which the stream resolves, or the end of the communicator.
  struct Pending {
    zr::Done done;
    std::atomic<bool> is_resolved{false};
    void resolve(zr_code code, const char* text);
  };
  struct Transfer {  // of the current round, with a peer
    int peer;
    char* data;  // on the device
    int64_t bytes;
  };
  struct Copy {
    char* to;
    const char* from;
    int64_t bytes;
  };

  void connect(const zr_comm_open& options, const Settings& settings);
  void allocate(int64_t staging_bytes);
  void check_arguments(bool has_stream) const;
  void run(void* stream);
  void barrier(void* stream);
  void broadcast(void* stream);
  void gather_equal_parts(void* stream);
  void send_part(int to, int64_t first, int64_t piece, char*& common, void* stream);
  void receive_part(int from, int64_t first, int64_t piece);
  void exchange(void* stream);
  void copy_own_part(void* stream);
  void reduce(void* stream);
  zr::Extent reduced_by(int rank) const;
  void reduce_round(int64_t first, int64_t piece, void* stream);
  void share_results(int64_t first, int64_t piece, char* own, void* stream);

  char* slot(int number) const { return staging_ + number * slot_bytes_; }
  char* host_slot(int number) const { return host_staging_ + number * slot_bytes_; }
  char* as_source(int number, const char* data, int64_t bytes, void* stream);
  char* as_destination(int number, char* data, int64_t bytes);
  void transfer(void* stream);
  void finish_round(void* stream);
  void wait_for(Mark& mark);
  void resolve_on_stream(zr_done* done, void* stream);
  void close_orderly() noexcept;

  const zr::Host host_;
  const int rank_, world_;
  const bool on_host_;
  const std::shared_ptr<SharedDevice> shared_;
  GpuDevice& device_;
  std::unique_ptr<Connection> connection_;  // null: one rank
  std::unique_ptr<Mark> end_;               // of the last operation of this communicator
  void* stream_ = nullptr;                  // for host memory
  std::optional<void*> only_stream_;        // of all operations, because they share memory
  char* staging_ = nullptr;                 // slots on the device; see the comment of allocate()
  char* host_staging_ = nullptr;            // the same in host memory
  int64_t slot_bytes_ = 0, host_staging_bytes_ = 0;

  zr::CollectiveParts operation_;  // the current one
  std::vector<Transfer> sends_, receives_;
  std::vector<Copy> copies_;          // on the device, after the transfers of this round
  std::vector<Copy> downloads_;       // to the program's memory, at the end of this round; from: host_slot()
  std::vector<const void*> sources_;  // of a reduction, in rank order
  std::optional<Failure> failure_;    // after which no operation can be executed
  std::vector<std::shared_ptr<Pending>> pending_;
  const std::shared_ptr<std::atomic<bool>> is_aborted_ = std::make_shared<std::atomic<bool>>(false);
};

}  // namespace nccl
