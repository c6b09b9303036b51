// A sum over the ranks of several hosts, for which few bytes pass between the hosts.
//
// Elements are summed in pieces. Every piece has an owner, the rank that needs its sum, or that passes it on. On each
// host that a piece's sum passes through, one rank works on it: the ranks of the host add their elements to the sum in
// its memory. What passes between the hosts, and in which order it is added, is up to the derived class.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "transfer.hpp"

namespace mpi {

class HostReduction : public Transfer {
 public:
  using Transfer::Transfer;
  static constexpr int64_t kPieceElements = kPieceBytes / int64_t{sizeof(float)};
  /// Bytes of Channel::sums. [any]
  static int64_t buffer_bytes();

  void start(Channel& channel) override;
  bool advance(Channel& channel) override;

 protected:
  struct Piece {
    int owner;           // rank
    int64_t from, to;    // first element in src, and in the owner's dst
    int64_t count;       // elements
    std::size_t work{};  // index in works_, if this rank works on it
  };
  // What this rank does with a piece whose sum passes through it.
  struct Work {
    enum class State { waiting, receives, ready, adds, sends, complete };
    std::size_t piece;
    State state = State::waiting;
    int64_t slot = -1;  // the how many-th piece for which peers fill Channel::pieces; -1: they do not
    Requests arriving, leaving, result;
    bool has_result = false;          // in dst; of an all_reduce
    bool keeps_until_result = false;  // the memory of the sum
  };

  /// True if the sum of a piece passes from each other host to the owner directly.
  virtual bool sums_meet_at_owner() const { return false; }
  /// Of an all_reduce: the owner of piece `number`.
  virtual int owner_of(const Channel& channel, int64_t number) const = 0;
  /// True if the sum of the piece passes through this host. Otherwise this rank sends its elements to the owner.
  virtual bool passes_here(const Channel& channel, const Piece& piece) const = 0;
  /// True if prepare() leaves the sum undefined, and the elements of the ranks of this host are the first ones.
  virtual bool begins_here(const Channel& channel, const Piece& piece) const = 0;
  /// True if peers send the owner of a piece, which is on host `home`, what it keeps in Channel::pieces.
  virtual bool needs_slot(const Channel& channel, int home) const = 0;
  /// Posts what arrives before the ranks of this host add their elements.
  virtual void receive(Channel& channel, Work& work) = 0;
  /// False if finish() takes the elements of this rank, the only one of its host, from src.
  virtual bool needs_sum(const Channel&, const Piece&) const { return true; }
  /// All of it has arrived: makes the sum to which the ranks of this host add their elements, unless it begins here.
  virtual void prepare(Channel& channel, Work& work) = 0;
  /// They have added them: finishes the piece or sends the sum on, and posts the receive of a result.
  virtual void finish(Channel& channel, Work& work) = 0;
  /// Of an all_reduce: the result has arrived.
  virtual void take_result(Channel&, Work&) {}

  /// Memory for an fp32 sum, and for half as many bytes beside it, as long as the work is in progress.
  float* sum_of(const Channel& channel, const Work& work) const;
  char* rounded_of(const Channel& channel, const Work& work) const;
  /// The memory number `i` of the work's slot, of as many as there are peers.
  char* slot_of(const Channel& channel, const Work& work, int i) const;
  const char* src_of(const Piece& piece) const;
  char* dst_of(const Piece& piece) const;
  const Piece& piece_of(const Work& work) const { return pieces_[work.piece]; }
  bool is_all_reduce() const { return parts_.coll.op == ZR_ALL_REDUCE; }
  bool accumulates() const { return (parts_.coll.flags & ZR_COLL_ACCUMULATE) != 0; }

 private:
  struct Step {  // of the ranks of this host
    std::size_t piece;
    bool is_broadcast;  // of the sum; otherwise the ranks add their elements
  };

  void list_pieces(const Channel& channel);
  void delay_own_pieces(const Channel& channel);
  void list_steps(const Channel& channel);
  bool send_elements(Channel& channel);
  bool advance_works(Channel& channel);
  bool advance(Channel& channel, Work& work);
  bool begin(Channel& channel, Work& work);
  bool receive_results(Channel& channel);
  bool submit_steps(Channel& channel);
  bool may_submit(const Channel& channel, const Step& step) const;
  void submit(Channel& channel, const Step& step);

  std::vector<Piece> pieces_;
  std::vector<Work> works_;
  std::size_t begun_ = 0, ended_ = 0;   // works; all before `ended_` are complete
  std::size_t results_ = 0;             // works whose result has arrived, and those of all works before them
  int64_t slots_ = 0, slots_used_ = 0;  // works with a slot: listed, and added
  std::vector<std::size_t> to_send_;    // pieces whose owners get this rank's elements
  std::size_t sent_ = 0;                // of them
  std::deque<Requests> sending_;        // the last ones
  std::vector<Step> steps_;
  std::size_t submitted_ = 0, added_ = 0;  // steps; added_: complete ones
  std::deque<zr::Done> running_;           // submitted steps that are not complete
};

}  // namespace mpi
