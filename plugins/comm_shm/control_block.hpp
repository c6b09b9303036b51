// What a rank shows its peers at the start of its memory file. Several processes read and write it at once: a plain
// member is published by a release store of the counter or state that its comment names.
#pragma once

#include <atomic>
#include <cstdint>

#include "zr/abi/communicator.h"
#include "zr/round_up.hpp"

namespace shm {

inline constexpr uint64_t kMagic = 0x31306d687372657a;  // "zershm01"
inline constexpr uint32_t kSegments = 512;              // most segments that a rank has allocated at a time
inline constexpr uint32_t kRing = 64;                   // most collectives that a rank is ahead of its slowest peer
inline constexpr uint32_t kMessages = 16;               // most messages that one peer has not received yet
inline constexpr uint32_t kNowhere = ~0u;

using Counter = std::atomic<uint64_t>;
static_assert(Counter::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free, "shared between processes");

/// An address within a rank's memory file, valid in every process.
struct ShmAddress {
  uint32_t segment = kNowhere, generation = 0;
  uint64_t offset = 0;
};

struct Segment {
  uint64_t offset, bytes;            // in the file; published by the announcement or message that refers to the segment
  std::atomic<uint32_t> generation;  // odd: in use
  uint32_t rsv;
};

/// Written by one rank, read by all. `changes` is incremented after every other change; ranks wait on it with a futex.
struct alignas(64) SharedCounters {
  Counter posted;         // announced collectives: announcements up to this number may be read
  Counter finished;       // collectives of which this rank has done its part: it reads neither peers' memory nor
                          // announcements for them any more
  Counter rounds_filled;  // rounds copied into this rank's staging buffer
  Counter rounds_read;    // rounds read from the staging buffers of all ranks
  std::atomic<uint32_t> changes, sleepers, closed;
};

enum : uint32_t { kSrcShared = 1, kDstShared = 2, kInPlace = 4 };

/// One announced collective; published by SharedCounters::posted. Two arrays of `world` elements follow it in memory:
/// the counts of an all_to_all to and from every rank.
struct alignas(64) Announcement {
  uint64_t number, fingerprint;
  uint32_t op, traits;
  zr_dtype dst_dtype, dtype;
  int64_t elements;  // elements, dtype and label are for reports
  ShmAddress src, dst;
  char label[64];
  int64_t* to() { return reinterpret_cast<int64_t*>(this + 1); }
};

/// A message to one peer. `state` says which side acts next; storing it publishes the other members.
struct alignas(64) Message {
  enum State : uint32_t { empty, sent, requested, filled, received, rejected };
  std::atomic<uint32_t> state;
  int32_t tag;
  zr_dtype dtype;
  uint32_t
      traits;  // kSrcShared; else it is sent in rounds through the staging buffer: requested, filled, requested, ...
  uint64_t number;  // 1, 2, ... per peer
  int64_t count;
  ShmAddress src;
  char label[64];
  char rejection[192];  // error message, written by the receiver before it sets `rejected`
};

struct ControlBlock {
  uint64_t magic, identity;  // identity: equal to the one published in the store
  SharedCounters counters;
  Segment segments[kSegments];
};

/// Offsets in the memory file, in bytes.
struct Layout {
  Layout(int world, int64_t staging_bytes)
      : announcement_bytes(
            zr::round_up(sizeof(Announcement) + 2 * sizeof(int64_t) * static_cast<uint64_t>(world), kCacheLine)),
        ring(zr::round_up(sizeof(ControlBlock), kCacheLine)),
        messages(ring + kRing * announcement_bytes),
        staging(zr::round_up(messages + static_cast<uint64_t>(world) * kMessages * sizeof(Message), kPage)),
        bytes(staging + 2 * zr::round_up(static_cast<uint64_t>(staging_bytes) / 2, kPage)) {}
  uint64_t announcement_bytes, ring, messages;
  uint64_t staging, bytes;  // the staging buffer has two halves: collectives, messages
  uint64_t staging_capacity() const { return (bytes - staging) / 2; }
  static constexpr uint64_t kCacheLine = 64, kPage = 4096;
};

}  // namespace shm
