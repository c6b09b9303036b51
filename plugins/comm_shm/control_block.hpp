// What a rank shows its peers at the start of its memory file. All of it is read and written by several processes at
// once: plain fields are published by the release of the counter or state named beside them.
#pragma once

#include <atomic>
#include <cstdint>

#include "zr/abi/communicator.h"

namespace shm {

inline constexpr uint64_t kMagic = 0x31306d687372657a;  // "zershm01"
inline constexpr uint32_t kSegments = 512;              // pieces of memory a rank may hold at a time
inline constexpr uint32_t kRing = 64;                   // collectives a rank may be ahead of its slowest peer
inline constexpr uint32_t kMessages = 16;               // messages to one peer that it has not taken yet
inline constexpr uint32_t kNowhere = ~0u;

using Counter = std::atomic<uint64_t>;
static_assert(Counter::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free, "shared between processes");

/// An address within a rank's memory file, in words that hold in every process.
struct ShmAddress {
  uint32_t segment = kNowhere, generation = 0;
  uint64_t offset = 0;
};

struct Segment {
  uint64_t offset, bytes;            // in the file; published by whatever refers to the segment
  std::atomic<uint32_t> generation;  // odd: in use
  uint32_t rsv;
};

/// Written by one rank, watched by all. `changes` changes after every other change, and is the futex.
struct alignas(64) SharedCounters {
  Counter posted;    // collectives announced: announcements up to this one may be read
  Counter finished;  // collectives whose part of this rank is done: it reads no more of any peer for them, nor their
                     // announcements
  Counter filled;    // loads put into the staging room
  Counter drained;   // loads read from everybody's staging room
  std::atomic<uint32_t> changes, sleepers, closed;
};

enum : uint32_t { kSrcShared = 1, kDstShared = 2, kInPlace = 4 };

/// One announced collective; published by SharedCounters::posted. Two arrays of `world` elements follow: all_to_all's
/// counts to and from every rank.
struct alignas(64) Announcement {
  uint64_t number, fingerprint;
  uint32_t op, traits;
  zr_dtype dst_dtype, dtype;
  int64_t elements;  // these, of dtype, and the label: for reports
  ShmAddress src, dst;
  char label[64];
  int64_t* to() { return reinterpret_cast<int64_t*>(this + 1); }
};

/// A message to one peer. The state says whose turn it is; it publishes the rest.
struct alignas(64) Message {
  enum State : uint32_t { empty, sent, wanted, filled, taken, rejected };
  std::atomic<uint32_t> state;
  int32_t tag;
  zr_dtype dtype;
  uint32_t traits;  // kSrcShared, or it comes load by load through the staging room: wanted, filled, wanted, ...
  uint64_t number;  // 1, 2, ... to this peer
  int64_t count;
  ShmAddress src;
  char label[64];
  char rejection[192];  // written by the receiver before it refuses
};

struct ControlBlock {
  uint64_t magic, identity;  // identity: as told in the store
  SharedCounters counters;
  Segment segments[kSegments];
};

/// Offsets in the file.
struct Layout {
  Layout(int world, int64_t staging_bytes)
      : announcement_bytes(aligned(sizeof(Announcement) + 2 * sizeof(int64_t) * static_cast<uint64_t>(world))),
        ring(aligned(sizeof(ControlBlock))),
        messages(ring + kRing * announcement_bytes),
        staging(page(messages + static_cast<uint64_t>(world) * kMessages * sizeof(Message))),
        bytes(staging + 2 * page(static_cast<uint64_t>(staging_bytes) / 2)) {}
  uint64_t announcement_bytes, ring, messages;
  uint64_t staging, bytes;  // two halves: collectives, messages
  uint64_t staging_capacity() const { return (bytes - staging) / 2; }
  static uint64_t aligned(uint64_t n) { return (n + 63) / 64 * 64; }
  static uint64_t page(uint64_t n) { return (n + 4095) / 4096 * 4096; }
};

}  // namespace shm
