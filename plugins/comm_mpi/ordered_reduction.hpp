// A sum over the ranks of several hosts, in rank order.
//
// The sum of a piece, in fp32, passes from host to host in ascending order, and on each the ranks add their elements.
// Where fewer bytes pass so, ranks of hosts before the owner's, or after it, send their elements to the owner instead.
// So each element is added in the order of the ranks, whatever the route.
#pragma once

#include "host_reduction.hpp"

namespace mpi {

class OrderedReduction : public HostReduction {
 public:
  using HostReduction::HostReduction;

 private:
  int owner_of(const Channel& channel, int64_t number) const override;
  bool passes_here(const Channel& channel, const Piece& piece) const override;
  bool begins_here(const Channel& channel, const Piece& piece) const override;
  bool needs_slot(const Channel& channel, int home) const override;
  void receive(Channel& channel, Work& work) override;
  void prepare(Channel& channel, Work& work) override;
  void finish(Channel& channel, Work& work) override;
  void add_elements(Channel& channel, const Work& work, int first_rank, int end_rank);
  char* elements_of(const Channel& channel, const Work& work, int rank) const;
};

}  // namespace mpi
