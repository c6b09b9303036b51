// A sum over the ranks of several hosts, in rank order, for which few bytes pass between the hosts.
//
// Elements are summed in pieces. Every piece has an owner, the rank that needs its sum, or that passes it on. The sum
// in fp32 passes from host to host in ascending order; on each, one rank receives it, and the ranks of the host add
// their elements in shared memory. Where fewer bytes pass so, ranks of hosts before the owner's, or after it, send
// their elements to the owner instead. So each element is added in the order of the ranks, whatever the route.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "transfer.hpp"

namespace mpi {

class HostReduction : public Transfer {
 public:
  using Transfer::Transfer;
  /// Bytes of Channel::sums. [any]
  static int64_t buffer_bytes();

  void start(Channel& channel) override;
  bool advance(Channel& channel) override;

 private:
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
    int64_t raw = -1;  // the how many-th piece for which peers send their elements
    Requests arriving, leaving, result;
    bool has_result = false;  // in dst; of an all_reduce
  };
  struct Step {  // of the ranks of this host
    std::size_t piece;
    bool is_broadcast;  // of the sum; otherwise the ranks add their elements
  };

  void list_pieces(const Channel& channel);
  void list_steps(const Channel& channel);
  bool send_elements(Channel& channel);
  bool advance_works(Channel& channel);
  bool advance(Channel& channel, Work& work);
  bool begin(Channel& channel, Work& work);
  void prepare(Channel& channel, Work& work);
  void finish(Channel& channel, Work& work);
  bool receive_results();
  bool submit_steps(Channel& channel);
  bool may_submit(const Channel& channel, const Step& step) const;
  void submit(Channel& channel, const Step& step);
  void add_elements(Channel& channel, const Work& work, int first_rank, int end_rank);
  char* elements_of(const Channel& channel, const Work& work, int rank) const;
  float* sum_of(const Channel& channel, const Work& work) const;
  char* rounded_of(const Channel& channel, const Work& work) const;
  char* dst_of(const Piece& piece) const;
  bool is_all_reduce() const { return parts_.coll.op == ZR_ALL_REDUCE; }
  bool accumulates() const { return (parts_.coll.flags & ZR_COLL_ACCUMULATE) != 0; }
  bool needs_elements(const Channel& channel, int home) const;

  std::vector<Piece> pieces_;
  std::vector<Work> works_;
  std::size_t begun_ = 0, ended_ = 0;  // works; all before `ended_` are complete
  std::size_t results_ = 0;            // works whose result has arrived, and those of all works before them
  int64_t raws_ = 0, raws_used_ = 0;   // works with elements of peers: listed, and added
  std::vector<std::size_t> to_send_;   // pieces whose owners get this rank's elements
  std::size_t sent_ = 0;               // of them
  std::deque<Requests> sending_;       // the last ones
  std::vector<Step> steps_;
  std::size_t submitted_ = 0, added_ = 0;  // steps; added_: complete ones
  std::deque<zr::Done> running_;           // submitted steps that are not complete
};

}  // namespace mpi
