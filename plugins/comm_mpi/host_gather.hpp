// An all_gather or a broadcast over the ranks of several hosts: every part passes to each host once, to one rank there,
// and then to the others through shared memory. Parts of a quantized all_gather pass as integers, and all ranks get
// what these are worth. With ZR_COLL_SHARED the ranks of a host receive into the same memory, and then only meet.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "transfer.hpp"

namespace mpi {

class HostGather : public Transfer {
 public:
  using Transfer::Transfer;
  /// True if the operation is one of these. [any]
  static bool suits(const zr::CollectiveParts& parts);
  /// Bytes of a part of `count` elements as it passes between hosts. [any]
  static int64_t part_bytes(const zr::CollectiveParts& parts, int64_t count);

  void start(Channel& channel) override;
  bool advance(Channel& channel) override;

 private:
  void list_gathers(Channel& channel);
  void list_shared(Channel& channel);
  void send_own_part(Channel& channel);
  void start_broadcast(Channel& channel);
  bool submit_steps(Channel& channel);

  struct Step {      // of the ranks of this host
    zr_coll coll{};  // without counts and label
    std::vector<int64_t> counts;
    Requests arriving;  // what this rank contributes to it; and the leaving part of this rank, if it is quantized
    std::vector<zr_view> encoded;  // parts of it whose memory ends with their encoded values
  };
  void decode(const Channel& channel, const Step& step) const;

  std::vector<Step> steps_;  // of an all_gather: by host
  std::size_t submitted_ = 0;
  std::deque<zr::Done> running_;  // submitted steps that are not complete
};

}  // namespace mpi
