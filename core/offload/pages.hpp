// Sums and shards on disk. The strategy is bound with addresses that have no memory; here they get some for as long as
// a collective uses them, and the host reads, writes and updates what stands there in parts.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "comm/communicator.hpp"
#include "offload/page_rooms.hpp"
#include "offload/paged_buffer.hpp"
#include "offload/states.hpp"
#include "plan/paging.hpp"
#include "plan/plan.hpp"
#include "update/update.hpp"

namespace zr::host {

/// Calls are [use]; one at a time.
class Pages final : public Paged {
 public:
  /// Takes slots of the plan's tiers and the memory that Paging counts. Refers to all of them.
  Pages(const Plan& plan, Tiers& tiers, Communicator& comm, Ledger& ledger);
  Pages(const Pages&) = delete;

  /// Where a buffer of the plan stands; null: it has memory.
  char* base(std::size_t buffer) const { return buffers_[buffer] ? buffers_[buffer]->base() : nullptr; }
  /// The address has no memory.
  bool holds(const void* at) const { return find(at) != nullptr; }

  /// Paged: what a collective reads is brought in, unless it was read ahead.
  uint64_t enter(zr_coll& coll) override;
  /// What it wrote is written behind.
  void leave(uint64_t number, bool well) noexcept override;
  /// The order of collectives begins anew: what the last step read next is read ahead in the coming one.
  void step_end();

  /// Calls fn(memory, first, count) over all elements of a view of paged addresses, in parts that begin at leaves if
  /// they are read only. `what` names them in errors. `write`: fn writes all of them.
  void visit(const zr_view& view, States::Use use, const std::string& what,
             const std::function<void(void* memory, int64_t first, int64_t count)>& fn);
  /// Hands touched units to `work` in parts whose sums and weights are in memory, and writes new weights behind it.
  void update(const std::vector<Unit>& units, const std::vector<char>& touched,
              const std::function<void(const std::vector<Unit>& units)>& work);

  const TierWaits& waits() const { return waits_; }  // of training
  /// Ranges that collectives read, and those of them that were read ahead.
  int64_t reads() const { return reads_; }
  int64_t reads_ahead() const { return reads_ahead_; }

 private:
  struct Range {  // of a buffer, and its room
    PagedBuffer* buffer = nullptr;
    int64_t from = 0, to = 0;  // bytes
    char* room = nullptr;
    uint64_t move = 0;  // of the buffer: what is under way with it
    bool writes = false;
    std::string what{};
    int64_t room_bytes() const { return buffer->hi(to) - buffer->lo(from); }
    char* data() const { return room + from - buffer->lo(from); }
    bool overlaps(const Range& other) const {
      return buffer == other.buffer && buffer->lo(from) < buffer->hi(other.to) &&
             buffer->lo(other.from) < buffer->hi(to);
    }
  };
  struct Seen {  // of the order of collectives
    Range range;
    bool reads;
  };
  struct Chunk {
    std::vector<Unit> units;
    std::vector<Range> sums, weights;
  };
  struct Free {
    Communicator* comm;
    void operator()(char* memory) const { comm->free(memory); }
  };
  struct Room {  // memory that peers can read
    std::unique_ptr<char, Free> memory;
    Announced announced;
  };
  PagedBuffer* find(const void* at) const;
  Range range_of(const zr_view& view) const;
  int64_t room_of(const Range& range) const {
    return (range.room_bytes() + paging_.align - 1) / paging_.align * paging_.align;
  }
  void grow(int64_t bytes);
  bool is_entered_to_write(const Range& range) const;
  bool take_room(Range& range);
  void sweep();
  void drop_ahead(std::list<Range>::iterator at);
  void drop_ahead(const Range& overlapping);
  void read(Range& range);
  void wait(const Range& range, double& seconds);
  void follow(const Range& range, bool reads);
  void read_ahead();
  bool fill(Chunk& chunk, Unit& rest) const;
  void begin(Chunk& chunk, char* room);
  std::string name_of(const char* what, const Unit& unit) const;

  const Plan& plan_;
  Communicator& comm_;
  Ledger& ledger_;
  Paging paging_;
  std::vector<TierStore*> stores_;  // of the buffers
  std::vector<Room> peer_memory_;
  CountedMemory chunks_;                               // kChunksUnderWay of them
  Announced announced_;                                // of chunks_
  std::vector<std::unique_ptr<PagedBuffer>> buffers_;  // by buffer of the plan; null: it has memory. First to go: waits
  mutable std::mutex mutex_;
  PageRooms rooms_;                                           // of peer_memory_
  std::unordered_map<uint64_t, std::vector<Range>> entered_;  // by number
  std::list<Range> ahead_, behind_;                           // read for what comes next; being written
  std::vector<Seen> last_step_, this_step_;
  bool follows_ = false;  // this step began as the last one did
  uint64_t last_ = 0;
  int64_t reads_ = 0, reads_ahead_ = 0;
  std::exception_ptr failed_;
  TierWaits waits_;
};

}  // namespace zr::host
