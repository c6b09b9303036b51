// One operation in progress: messages to and from the peers, and the reduction of what has arrived.
#pragma once

#include <mpi.h>

#include <cstdint>
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
  char* pieces;          // two pieces of each peer: see Transfer::piece_bytes_of()
  bool is_used = false;  // `pieces`, by a reduction in progress
  decltype(ZR_CHOOSE(reduce_ranks)) reduce;
};

/// [MPI thread], except what says otherwise.
class Transfer {
 public:
  /// Bytes of Channel::pieces. [any]
  static int64_t buffer_bytes(int world) { return 2 * (world - 1) * kPieceBytes; }

  /// Keeps a copy of the arguments. `number`: of the collective; the same on all ranks. [any]
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
  /// Cancels what this rank still receives, so that its memory is not written any more.
  void cancel() noexcept;

  zr::Done done;

 private:
  struct Piece {  // of a source of a reduction, to the rank that reduces it
    int peer;
    const char* data;
    int64_t bytes;
  };
  int tag(int phase) const { return static_cast<int>(number_ % (1 << 20)) * 2 + phase; }
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
  bool has_started_ = false, is_complete_ = false, shares_posted_ = false;
  std::vector<MPI_Request> receives_, sends_;  // whole parts
  std::vector<char> copy_;                     // of a src that would be overwritten before it is sent
  // Of a reduction: pieces to send, requests of the last ones, and those of the two pieces that are received.
  std::vector<Piece> to_send_;
  std::size_t sent_ = 0;
  std::vector<MPI_Request> sending_, receiving_[2];
  int64_t piece_elements_ = 0, pieces_ = 0, reduced_ = 0;
};

}  // namespace mpi
