// One operation in progress: messages to and from the peers, and the reduction of what has arrived.
#pragma once

#include <mpi.h>

#include <cstdint>
#include <string>
#include <vector>

#include "../comm_shm/kernel.hpp"
#include "zr/base.hpp"
#include "zr/collective_parts.hpp"

namespace mpi {

inline constexpr int64_t kPieceBytes = int64_t{512} << 10;  // of a message of a reduction

/// What the operations of a communicator share.
struct Channel {
  MPI_Comm collectives, messages;
  int rank, world;
  uint64_t tags;         // of collectives: 0 to `tags` - 1
  char* pieces;          // two pieces of each peer: see Transfer::buffer_bytes()
  bool is_used = false;  // `pieces`, by a reduction in progress
  decltype(ZR_CHOOSE(reduce_ranks)) reduce;
};

/// Requests that complete together. [MPI thread]
class Requests {
 public:
  MPI_Request& add_send();
  /// A message of exactly so many bytes.
  MPI_Request& add_receive(int bytes);
  /// True once all are complete; they are forgotten then. Throws PluginError with `what` if one failed, or received
  /// fewer bytes.
  bool complete(const std::string& what);

 private:
  std::vector<MPI_Request> requests_;
  std::vector<int> expected_;  // bytes; -1: a send
  std::vector<MPI_Status> statuses_;
};

/// [MPI thread], except what says otherwise.
class Transfer {
 public:
  /// Bytes of Channel::pieces. [any]
  static int64_t buffer_bytes(int world) { return 2 * (world - 1) * kPieceBytes; }

  /// Keeps a copy of the arguments. `number`: of the collective; the same on all ranks. Throws PluginError. [any]
  Transfer(const zr_coll& coll, int rank, int world, uint64_t number) : number_(number) {
    parts_.assign(coll, rank, world);
  }
  /// Copies what this rank sends to itself; with one rank, that is all. [any]
  void copy_own_part(const Channel& channel);

  const zr::CollectiveParts& parts() const { return parts_; }  // [any]
  bool has_started() const { return has_started_; }
  bool is_complete() const { return is_complete_; }
  /// True if start() has to wait for another reduction.
  bool waits_for(const Channel& channel) const { return parts_.is_reduction() && channel.is_used; }
  /// Posts the first messages. Throws PluginError.
  void start(Channel& channel);
  /// Does what can be done without waiting; true if anything was done. Throws PluginError.
  bool advance(Channel& channel);

 private:
  struct Piece {  // of a source of a reduction, to the rank that reduces it
    int peer;
    const char* data;
    int64_t bytes;
  };
  int tag(const Channel& channel, int phase) const {
    return static_cast<int>(number_ % (channel.tags / 2)) * 2 + phase;
  }
  zr::Extent reduced_by(int r) const;
  void post_receive(void* data, int64_t bytes, int peer, int tag, MPI_Comm comm);
  void post_send(const void* data, int64_t bytes, int peer, int tag, MPI_Comm comm);
  void post_parts(Channel& channel);
  void post_shares(Channel& channel);
  void list_pieces();
  bool send_pieces(Channel& channel);
  bool reduce_pieces(Channel& channel);
  void receive_piece(Channel& channel, int64_t piece);
  void reduce_piece(Channel& channel, int64_t piece);
  const char* source() const;  // this rank's src, or the copy of it

  zr::CollectiveParts parts_;
  uint64_t number_;
  bool has_started_ = false, is_complete_ = false, has_reduced_ = false;
  Requests whole_;          // messages of whole parts, or a barrier
  std::vector<char> copy_;  // of a src that would be overwritten before it is sent
  // Of a reduction: pieces to send, requests of the last ones, and those of the two pieces that are received.
  std::vector<Piece> to_send_;
  std::size_t sent_ = 0;
  std::vector<MPI_Request> sending_;
  std::vector<int> ended_;
  Requests receiving_[2];
  int64_t piece_elements_ = 0, pieces_ = 0, reduced_ = 0;
};

}  // namespace mpi
