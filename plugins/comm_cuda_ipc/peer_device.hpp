// One device as this rank uses it, with memory and events that processes on the same node share: cuda_device.cu for
// CUDA, tests/simulators/sim_communicator for the simulated device of the tests.
#pragma once

#include <cstdint>
#include <memory>

#include "zr/ordered_reduce.hpp"

namespace peer {

/// Names memory or an event of this process for other processes.
struct Handle {
  unsigned char bytes[64];
};

/// Each rank has two: its sources may be read, and it reads and writes no memory of peers any more.
enum class Event { ready, finished };

/// Most ranks of a node: a kernel gets the addresses of all sources and destinations as parameters.
inline constexpr int kMaxRanks = 64;

/// Calls with a stream (the native handle of one) enqueue work there and do not wait. Errors are zr::PluginErrors. One
/// thread at a time, but abort().
class PeerDevice {
 public:
  virtual ~PeerDevice() = default;

  /// Zeroed memory, aligned to at least 256 bytes, which peers can open.
  virtual void* allocate(uint64_t bytes, Handle* handle) = 0;
  /// No peer may still have it open.
  virtual void free(void* memory) noexcept = 0;
  /// Memory of a peer, as an address for streams of this device.
  virtual void* open(const Handle& memory) = 0;
  virtual void close(void* opened) noexcept = 0;

  virtual Handle event(Event event) = 0;  // of this rank
  virtual void open_event(int rank, Event event, const Handle& handle) = 0;
  /// Closes the events of all peers; no call to wait() may follow.
  virtual void close_events() noexcept = 0;
  /// Later waits of peers refer to this point of the stream.
  virtual void record(Event event, void* stream) = 0;
  /// The stream continues after the point that `rank` recorded last, before this call.
  virtual void wait(int rank, Event event, void* stream) = 0;

  virtual void copy(void* to, const void* from, int64_t bytes, void* stream) = 0;
  /// See zr::ordered_reduce().
  virtual void reduce(const zr::ReduceKind& kind, const void* const* sources, int n, void* const* outs, int n_outs,
                      int64_t first, int64_t count, void* stream) = 0;
  /// Calls fn(context) on any thread when the stream gets there. fn must not use the device.
  virtual void call(void (*fn)(void* context), void* context, void* stream) = 0;
  /// Replaces the mark by this point of the stream.
  virtual void set_mark(void* stream) = 0;
  /// True if the stream has reached the mark, or has failed, or there is no mark.
  virtual bool mark_is_reached() noexcept = 0;
  /// Streams do not wait for peers any more: what they then read is undefined. [any]
  virtual void abort() noexcept = 0;
};

/// True if this process can share memory of its devices with processes on the same node.
bool can_share_memory() noexcept;
/// Opens the device with this number, for this rank of `world` ranks.
std::unique_ptr<PeerDevice> open_device(int32_t number, int rank, int world);

}  // namespace peer
