// One operation in progress.
#pragma once

#include <mpi.h>

#include <cstdint>
#include <memory>
#include <utility>

#include "../comm_shm/kernel.hpp"
#include "hosts.hpp"
#include "local_steps.hpp"
#include "quantization.hpp"
#include "requests.hpp"
#include "zr/base.hpp"
#include "zr/collective_parts.hpp"

namespace mpi {

/// What the operations of a communicator share.
struct Channel {
  MPI_Comm collectives, messages;
  int rank, world;
  uint64_t tags;         // of collectives: 0 to `tags` - 1; at least 32767
  char* pieces;          // two pieces of each peer: see FlatTransfer::buffer_bytes()
  bool is_used = false;  // `pieces` and `sums`, by a reduction in progress
  decltype(ZR_CHOOSE(reduce_ranks)) reduce;
  // With several levels: the ranks of each host, this host's own collectives, and see HostReduction::buffer_bytes().
  Hosts hosts{};
  LocalSteps* local = nullptr;
  char* sums = nullptr;
  Quantization quantization{};
};

/// What an operation waits for, and what waits for the operation.
class Gate {
 public:
  virtual ~Gate() = default;
  /// True once the operation may read and write its memory; stays true. [any]
  virtual bool is_open() noexcept = 0;
  /// Called once, when the operation uses its memory no longer: ZR_OK if it is complete, else why it never will be.
  /// Must not call the communicator. [any]
  virtual void close(zr_code code) noexcept = 0;
};

/// [MPI thread], except what says otherwise.
class Transfer {
 public:
  /// `number`: of the collective; the same on all ranks. [any]
  Transfer(zr::CollectiveParts parts, uint64_t number) : parts_(std::move(parts)), number_(number) {}
  virtual ~Transfer() = default;
  Transfer(const Transfer&) = delete;

  const zr::CollectiveParts& parts() const { return parts_; }  // [any]
  bool has_started() const { return has_started_; }
  bool is_complete() const { return is_complete_; }
  /// The operation waits for the gate, and closes it. Call it before the MPI thread has the operation. [any]
  void pass(std::shared_ptr<Gate> gate) { gate_ = std::move(gate); }
  /// True if start() has to wait, for another reduction or for the gate.
  bool waits_for(const Channel& channel) const {
    return (parts_.is_reduction() && channel.is_used) || (gate_ && !gate_->is_open());
  }
  /// Call once, when the operation uses its memory no longer.
  void end(zr_code code) noexcept {
    if (gate_) gate_->close(code);
    gate_ = nullptr;
  }
  /// Posts the first messages. Throws PluginError.
  virtual void start(Channel& channel) = 0;
  /// Does what can be done without waiting; true if anything was done. Throws PluginError.
  virtual bool advance(Channel& channel) = 0;

 protected:
  enum class Phase { parts, results, sums, seeds, count };
  /// Of a message of so many bytes. Messages of ranks that disagree about a collective do not match, because
  /// OpenMPI 4.1 may write more bytes than the receiver expects (ob1, shared memory); the control plane then finds the
  /// disagreement. Others match in order.
  int tag(const Channel& channel, Phase phase, int64_t bytes) const {
    constexpr auto phases = static_cast<uint64_t>(Phase::count);
    constexpr uint64_t kNumbers = 64;  // consecutive collectives whose messages differ
    const uint64_t hashes = channel.tags / (kNumbers * phases);
    uint64_t hash = (parts_.coll.fingerprint ^ static_cast<uint64_t>(bytes)) * 0x9e3779b97f4a7c15u;
    hash ^= hash >> 32;
    return static_cast<int>(((number_ % kNumbers) * phases + static_cast<uint64_t>(phase)) * hashes + hash % hashes);
  }

  /// Messages of a collective, to and from another rank. Throw PluginError.
  void send_part(const Channel& channel, Requests& requests, const void* from, int64_t bytes, int to,
                 Phase phase) const {
    requests.send(from, bytes, to, tag(channel, phase, bytes), channel.collectives, parts_.what());
  }
  void receive_part(const Channel& channel, Requests& requests, void* to, int64_t bytes, int from, Phase phase) const {
    requests.receive(to, bytes, from, tag(channel, phase, bytes), channel.collectives, parts_.what());
  }

  /// Of values that pass between hosts as integers; 0: they do not.
  int bits() const { return bits_of(parts_.coll); }

  const zr::CollectiveParts parts_;
  const uint64_t number_;
  bool has_started_ = false, is_complete_ = false;
  Requests whole_;  // messages that complete at the end

 private:
  std::shared_ptr<Gate> gate_;  // null: the operation waits for none, or has ended
};

}  // namespace mpi
