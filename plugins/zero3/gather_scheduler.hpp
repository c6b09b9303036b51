// Decides which sharded groups are gathered on this rank: on demand or ahead of use, and kept if they are soon used
// again.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "all_gather_buffer.hpp"
#include "execution_order.hpp"
#include "gather_groups.hpp"
#include "zr/strategy.hpp"

namespace zero3 {

/// All in bytes.
struct Limits {
  int64_t prefetch;  // most bytes gathered ahead of use
  int64_t gathered;  // most bytes gathered at any time; the groups of one operator may exceed it
  int64_t reuse;     // a group stays gathered if its next use is at most this far away
};

/// Elements of the all-gather buffer that `limits` need.
int64_t all_gather_buffer_elements(const GatherGroups& groups, const Limits& limits, int64_t bytes_per_element);

/// Every decision follows from the execution order alone, so that all ranks issue the same gathers. [use]
class GatherScheduler {
 public:
  /// groups must outlive the scheduler. shard, buffer: buffers of the plan.
  GatherScheduler(const zr_plan_in& in, const GatherGroups& groups, const Limits& limits, const zr::Comm& comm,
                  const zr_view& shard, const zr_view& buffer, const zr::Host& host);
  ~GatherScheduler();

  /// Gathers parameters; full[i] is the full parameter. Uses in ZR_FORWARD and ZR_BACKWARD are recorded.
  void acquire(const uint32_t* params, uint32_t n, uint32_t phase, zr_view* full);
  void release(const uint32_t* params, uint32_t n);
  /// Ends a training pass (forward and backward). On return no gather is in flight.
  void pass_end();
  void wait();      // for the gathers in flight
  void refresh();   // the shards have been updated: drops all gathered groups
  void prefetch();  // starts to gather the groups that the recorded order uses next

 private:
  enum class State : uint8_t { absent, gathering, gathered };
  struct GroupState {
    State state = State::absent;
    int users = 0;            // parameters acquired and not yet released
    bool prefetched = false;  // gathered before its use, and not yet used
    int64_t offset = -1;      // in the all-gather buffer; -1: in `overflow`
    zr_view overflow{};       // memory of the host, used if the all-gather buffer was full
    bool is_reused = false;   // `overflow` is kept for later overflows
    bool is_rounded = false;  // the gathered weights
    zr::Done done;
  };
  void check_use(const uint32_t* params, uint32_t n, bool rounds) const;
  std::vector<uint32_t> begin_use(const uint32_t* params, uint32_t n, bool recorded, bool rounds);
  zr_view memory(uint32_t group) const;
  int64_t aligned_size(uint32_t group) const { return zr::round_up(groups_.groups()[group].size, align_); }
  int64_t bytes(uint32_t group) const { return aligned_size(group) * width_; }
  bool allocate(uint32_t group);
  void allocate_overflow(uint32_t group, uint32_t phase);
  zr_view allocate_overflow_memory(int64_t bytes, bool is_reused);
  void free_overflow(const zr_view& memory);
  bool drop_farthest(int64_t beyond);
  void drop(uint32_t group);
  void start(uint32_t group, bool rounds);
  void wait_for(uint32_t group);
  void order_changed(uint32_t group);

  const zr_plan_in* in_;
  const GatherGroups& groups_;
  const Limits limits_;
  zr::Comm comm_;
  zr::Host host_;
  const zr_view shard_, buffer_view_;
  const int64_t align_, width_;
  const bool rounds_;  // gathers for training and evaluation may round weights
  AllGatherBuffer buffer_;
  ExecutionOrder order_;
  std::vector<GroupState> group_states_;            // by group
  std::vector<uint32_t> gathered_groups_;           // groups that are not absent
  std::multimap<int64_t, zr_view> spare_overflow_;  // by bytes: overflow memory that no group uses
  std::vector<std::vector<int64_t>> counts_;        // by group: elements of each rank's part
  int64_t gathered_bytes_ = 0, prefetched_bytes_ = 0;
  size_t next_ = 0;  // position in the recorded order up to which groups were prefetched
  int changes_ = 0;  // of the execution order
  bool reported_overflow_ = false;
};

}  // namespace zero3
