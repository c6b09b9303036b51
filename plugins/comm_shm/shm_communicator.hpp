// One open communicator: a queue of operations that advance during calls. It has no thread of its own.
//
// A collective is announced in this rank's ring of announcements. Once all ranks have announced it, this rank executes
// its part, directly on the peers' memory. The collective is complete when every rank that reads or writes this rank's
// memory has done its part too. Calls are [use], one at a time; abort() is [any].
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "arena.hpp"
#include "kernel.hpp"
#include "operation.hpp"
#include "zr/communicator.hpp"

namespace shm {

/// How the ranks of a communicator appear in the job.
struct RanksOfJob {
  int first = 0;          // rank r of the communicator is rank first + r in messages
  bool use_tasks = true;  // submit() and progress() are called where the host's threads may be used
};

class ShmCommunicator {
 public:
  static constexpr const char* id = "shm";

  /// Exchanges the ranks' addresses through the host's store and opens every peer's memory.
  ShmCommunicator(const zr::Host& host, const zr_comm_open& options, int64_t staging_bytes,
                  const RanksOfJob& ranks = {});
  ~ShmCommunicator();
  ShmCommunicator(const ShmCommunicator&) = delete;

  void submit(const zr_coll& coll, zr_stream* stream, zr_done* done);
  void progress();
  zr_view mem_alloc(uint64_t bytes, uint64_t align, uint32_t flags);
  void mem_free(const zr_view& memory) noexcept;
  void shared_alloc(uint64_t bytes, void** writer, const void** reader);
  /// shared_alloc() in two parts, for callers that must not wait in it: begins, and resolves `done` once map_shared()
  /// may be called. *block must live until then.
  struct SharedBlock {
    ShmAddress address{};                    // in the memory of rank 0
    void* own = nullptr;                     // on rank 0
    std::optional<zr::PluginError> failure;  // on rank 0, which then broadcasts no address
  };
  void begin_shared(uint64_t bytes, SharedBlock* block, zr_done* done);
  void map_shared(const SharedBlock& block, void** writer, const void** reader);
  void shared_free(void* writer) noexcept;
  void abort() noexcept { aborted_.store(true, std::memory_order_relaxed); }

 private:
  // shm_communicator.cpp: the queue
  void rendezvous(const zr_comm_open& options);
  void advance();
  void advance_operations();
  bool step(Operation& op);
  bool may_announce(const Operation& op);
  void announce(Operation& op);
  bool is_complete(const Operation& op);
  void resolve_completed();
  void wait(const Operation& op);
  void sleep(int peer, uint32_t seen);
  [[noreturn]] void fail(zr_code code, const std::string& text);

  // execute.cpp: a rank's part of a collective
  bool execute(Operation& op);  // false: not finished yet
  void compare(const Operation& op);
  Route route(const Operation& op);
  void pull(const Operation& op);
  void push(const Operation& op);
  bool through_staging(Operation& op);
  uint64_t rounds_of(const Operation& op, int64_t round_elements);
  void fill_staging(const Operation& op, int64_t round_elements);
  void read_staging(const Operation& op, int64_t round_elements);
  Extent extent(const Operation& op, int p, int r) const;
  const char* source(const Operation& op, int p);
  char* destination(const Operation& op, int r);
  uint32_t threads() const { return uses_tasks_ ? tasks_.width() : 1; }
  // Reduces sources_ to destinations_.
  void reduce(const Operation& op, zr_dtype dst_dtype, int64_t first, int64_t count, bool streams);
  // streams: use non-temporal stores, because the full result exceeds the cache even if these bytes do not.
  void copy(void* dst, const void* src, int64_t bytes, bool streams = false);

  // messages.cpp
  bool send(Operation& op);
  bool receive(Operation& op);
  bool take_round(Operation& op);
  bool announce_message(Operation& op);
  Message* matching(const Operation& op);
  void set_state(Message& message, Message::State state);

  // True if the counter has reached `value`; else sets blocked_on_ to a rank whose counter has not.
  bool reached(int r, Counter SharedCounters::*counter, uint64_t value);
  bool all_reached(Counter SharedCounters::*counter, uint64_t value);
  void publish(Counter SharedCounters::*counter, uint64_t value);
  void notify_peers();  // wakes peers that wait for a change of this rank

  zr::Host host_;
  zr::Tasks tasks_;
  const int rank_, world_;
  Arena arena_;
  const bool uses_tasks_;
  decltype(ZR_CHOOSE(reduce_ranks)) const reduce_;
  decltype(ZR_CHOOSE(copy_range)) const copy_;
  const bool oversubscribed_;  // more ranks than cores

  std::vector<std::unique_ptr<Operation>> queue_, unused_;  // in order of submission
  const Operation* submitting_ = nullptr;
  uint64_t announced_ = 0, executed_ = 0;    // collectives
  uint64_t rounds_done_ = 0;                 // through the staging buffer
  std::vector<uint64_t> messages_sent_;      // by peer
  const Operation* staging_user_ = nullptr;  // the message that uses this rank's staging buffer
  int blocked_on_ = -1;
  std::atomic<bool> aborted_{false};
  struct Failed {
    zr_code code;
    std::string text;
  };
  std::optional<Failed> failed_;
  std::vector<const void*> sources_;  // of a reduction, in rank order
  std::vector<void*> destinations_;
};

}  // namespace shm
