// One open communicator for memory of a device. For each collective, the ranks exchange where their memory is, through
// the communicator for host memory, and enqueue their parts on the stream of the call.
//
// A rank waits for its peers' calls, not for the device: its stream waits for the events of theirs. Calls are [use],
// one at a time; abort() is [any].
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "../comm_shm/shm_communicator.hpp"
#include "device_memory.hpp"
#include "peer_device.hpp"
#include "zr/device_stream.hpp"

namespace peer {

class DeviceCommunicator {
 public:
  /// Exchanges the events of the ranks, and opens memory of every peer. staging_bytes: of the communicator for host
  /// memory.
  DeviceCommunicator(const zr::Host& host, const zr_comm_open& options, int64_t staging_bytes);
  ~DeviceCommunicator();
  DeviceCommunicator(const DeviceCommunicator&) = delete;

  void submit(const zr_coll& coll, zr_stream* stream, zr_done* done);
  void progress() {}  // the device needs no calls
  zr_view mem_alloc(uint64_t bytes, uint64_t align, uint32_t flags);
  void mem_free(const zr_view& memory) noexcept { memory_.release(memory.data); }
  void abort() noexcept;

 private:
  // What a rank tells its peers of an operation. The counts of an all_to_all, to and from every rank, follow it.
  struct Announcement {
    uint64_t fingerprint = 0;
    Location src, dst;  // nowhere if peers cannot open the memory
    int64_t elements = 0;
    zr_dtype dtype = 0, dst_dtype = 0;
    uint32_t op = 0;
    uint8_t src_is_shared = 0, dst_is_shared = 0, in_place = 0, rsv = 0;
    char label[64] = {};
  };
  struct Failure {
    zr_code code;
    std::string text;
  };
  enum class Meeting : uint64_t { announce, announce_again, end };  // of the ranks, in one operation

  Announcement& announcement(int rank) {
    return *reinterpret_cast<Announcement*>(received_.data() + static_cast<size_t>(rank) * announcement_bytes_);
  }
  const int64_t* counts_to(int rank) { return reinterpret_cast<const int64_t*>(&announcement(rank) + 1); }
  const int64_t* counts_from(int rank) { return counts_to(rank) + world_; }

  void exchange_handles();
  void enqueue(void* native_stream);
  void resolve_in_stream(zr_done* done, void* native_stream);
  void announce(void* native_stream);
  void exchange_announcements(Meeting meeting);
  void compare();
  shm::Route route();
  void stage(void* native_stream);
  void grow_staging(int64_t bytes);
  void pull(void* native_stream);
  void push(void* native_stream);
  void wait_for_peers(Event event, void* native_stream);
  shm::Extent extent(int from, int to);
  const char* source(int rank);
  char* destination(int rank);
  void wait_for_mark(std::chrono::nanoseconds limit) noexcept;
  void close_orderly() noexcept;
  void put(const char* what, const void* value, uint64_t bytes);
  void get(const char* what, int rank, int64_t timeout_ns, void* value, uint64_t bytes);
  uint64_t fingerprint_of(Meeting meeting) const { return number_ * 4 + static_cast<uint64_t>(meeting); }

  zr::Host host_;
  const int rank_, world_;
  shm::ShmCommunicator control_;  // host memory
  const std::unique_ptr<PeerDevice> device_;
  DeviceMemory memory_;
  const zr_device device_id_;
  const std::string store_prefix_;
  uint64_t number_ = 0;               // of the current operation
  zr::CollectiveParts operation_;     // the current one
  std::optional<Failure> failure_;    // of an operation, so that no later one can be executed
  const char* staged_src_ = nullptr;  // this rank's src, if it was copied
  void* staging_ = nullptr;
  int64_t staging_bytes_ = 0;
  void* last_stream_ = nullptr;  // native
  bool has_stream_ = false;      // last_stream_ is set; null is a valid stream
  const size_t announcement_bytes_;
  zr_view own_announcement_;          // memory of control_
  std::vector<char> received_;        // all announcements, by rank
  std::vector<const void*> sources_;  // of a reduction, in rank order
  std::vector<void*> destinations_;
};

}  // namespace peer
