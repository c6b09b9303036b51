// An operation whose ranks all exchange messages with each other, wherever they are.
#pragma once

#include <cstdint>
#include <vector>

#include "transfer.hpp"

namespace mpi {

class FlatTransfer : public Transfer {
 public:
  using Transfer::Transfer;
  /// Bytes of Channel::pieces. [any]
  static int64_t buffer_bytes(int world) { return 2 * (world - 1) * kPieceBytes; }
  /// Of a reduction: true if it is an all_reduce whose ranks send each other what they have reduced. [any]
  static bool shares_results(const zr::CollectiveParts& parts);
  /// Of a reduction: the elements that rank r reduces, `from` in src, `to` in its dst. [any]
  static zr::Extent reduced_by(const zr::CollectiveParts& parts, int r);

  /// Copies what this rank sends to itself; with one rank, that is all. [any]
  void copy_own_part(const Channel& channel);
  void start(Channel& channel) override;
  bool advance(Channel& channel) override;

 private:
  struct Piece {  // of a source of a reduction, to the rank that reduces it
    int peer;
    const char* data;
    int64_t bytes;
    int64_t first;  // element of the part that the peer reduces
  };
  void post_parts(Channel& channel);
  void list_pieces();
  bool send_pieces(Channel& channel);
  bool reduce_pieces(Channel& channel);
  void receive_piece(Channel& channel, int64_t piece);
  void reduce_piece(Channel& channel, int64_t piece);
  zr::Extent results_of(int r, int64_t number) const;
  void receive_results(Channel& channel);
  void send_results(Channel& channel);
  const char* source() const;  // this rank's src, or the copy of it

  bool has_reduced_ = false;
  std::vector<char> copy_;  // of a src that would be overwritten before it is sent
  // Of a reduction: pieces to send, requests of the last ones, and those of the two pieces that are received.
  std::vector<Piece> to_send_;
  std::vector<char> has_left_;       // by piece to send: MPI does not read it any more
  std::size_t sent_ = 0, left_ = 0;  // left_: all before this one have left
  std::vector<MPI_Request> sending_;
  std::vector<std::size_t> sent_by_;  // the piece of each of these requests
  std::vector<int> ended_;
  int64_t most_ = 0;     // the most elements that a rank reduces
  int64_t results_ = 0;  // messages of results from each peer whose receives are posted
  Requests receiving_[2];
  int64_t piece_elements_ = 0, pieces_ = 0, reduced_ = 0;
};

}  // namespace mpi
