// A sum over the ranks of several hosts that is not in rank order: the ranks of each host add their elements, and the
// owner of a piece adds the sums of the other hosts and the elements of its own, in the order of the hosts. Between the
// hosts, sums have 4 bytes per element, or are quantized, and so are the results of an all_reduce.
#pragma once

#include "host_reduction.hpp"

namespace mpi {

class PerHostReduction : public HostReduction {
 public:
  using HostReduction::HostReduction;
  /// Of an all_reduce: the owner of piece `number`. [any]
  static int owner_of(const zr::CollectiveParts& parts, int64_t number) {
    return static_cast<int>(number % parts.world);
  }
  /// Bytes of so many elements of a sum, and of a result of an all_reduce, between hosts. [any]
  static int64_t sum_bytes(const zr::CollectiveParts& parts, int64_t count);
  static int64_t result_bytes(const zr::CollectiveParts& parts, int64_t count);

 private:
  bool sums_meet_at_owner() const override { return true; }
  int owner_of(const Channel&, int64_t number) const override { return owner_of(parts_, number); }
  bool passes_here(const Channel&, const Piece&) const override { return true; }
  bool needs_sum(const Channel& channel, const Piece& piece) const override;
  bool begins_here(const Channel& channel, const Piece& piece) const override;
  bool needs_slot(const Channel&, int) const override { return true; }
  void receive(Channel& channel, Work& work) override;
  void prepare(Channel& channel, Work& work) override;
  void finish(Channel& channel, Work& work) override;
  void take_result(Channel& channel, Work& work) override;
  void add_sums(const Channel& channel, const Work& work, int first_host, int end_host);
  void send_result(Channel& channel, Work& work);
  char* sum_of_host(const Channel& channel, const Work& work, int host) const;
};

}  // namespace mpi
