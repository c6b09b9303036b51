// One memory file (memfd) per rank: its control block, its staging buffers, and the segments allocated by mem_alloc.
// Peers map a segment when an operation first refers to it. The file has no name in a file system, so nothing is left
// behind when processes die. Its pages are small unless the machine's shmem_enabled says otherwise.
#pragma once

#include <sys/mman.h>

#include <map>
#include <string>
#include <vector>

#include "control_block.hpp"
#include "zr/base.hpp"

namespace shm {

/// How peers find a rank's memory file. Each rank publishes its address in the store.
struct MemoryFileAddress {
  std::string host, boot, container;  // container: the PID namespace
  int64_t pid = 0;
  int fd = -1;
  uint64_t identity = 0;
};

class Arena {
 public:
  /// first_rank: of the job; rank r of the arena is rank first_rank + r in messages.
  Arena(const zr::Host& host, int rank, int world, int64_t staging_bytes, int first_rank = 0);
  ~Arena();
  Arena(const Arena&) = delete;

  /// "rank 3", for messages.
  std::string name_of(int rank) const { return "rank " + std::to_string(first_rank_ + rank); }
  MemoryFileAddress address() const;
  /// Opens a peer's file. An error names the rank and the remedy.
  void connect(int peer, const MemoryFileAddress& address);

  SharedCounters& counters(int r) const { return reinterpret_cast<ControlBlock*>(control_blocks_[r])->counters; }
  Announcement& announcement(int r, uint64_t number) const {
    return *reinterpret_cast<Announcement*>(control_blocks_[r] + layout_.ring +
                                            number % kRing * layout_.announcement_bytes);
  }
  Message* messages(int from, int to) const {
    return reinterpret_cast<Message*>(control_blocks_[from] + layout_.messages) + to * static_cast<int>(kMessages);
  }
  /// A rank's staging buffers, for collectives and for messages: staging_capacity() bytes each.
  char* staging(int r) const { return control_blocks_[r] + layout_.staging; }
  char* message_staging(int r) const { return staging(r) + layout_.staging_capacity(); }
  int64_t staging_capacity() const { return static_cast<int64_t>(layout_.staging_capacity()); }

  /// Zeroed, aligned to a page.
  void* allocate(uint64_t bytes);
  void release(void* memory);
  /// The address of [data, data + bytes) for peers; kNowhere unless one of this rank's segments contains all of it.
  ShmAddress address_of(const void* data, int64_t bytes) const;
  /// The memory of a peer (or of this rank) in this process. Maps the segment at its first use.
  char* at(int r, const ShmAddress& address);
  /// Maps the segment of an address a second time, read-only; `writer` identifies it for release_reader(). The memory
  /// stays allocated until all ranks have closed, because peers may still read it.
  const char* map_reader(int r, const ShmAddress& address, const void* writer);
  void release_reader(const void* writer);

 private:
  struct OwnSegment {
    uint64_t bytes, offset;
    uint32_t segment;
  };
  struct PeerSegment {
    uint32_t generation = 0;
    char* memory = nullptr;
    uint64_t bytes = 0;
  };
  ControlBlock& control_block(int r) const { return *reinterpret_cast<ControlBlock*>(control_blocks_[r]); }
  char* map(int fd, uint64_t offset, uint64_t bytes, const std::string& what, int flags = MAP_POPULATE) const;
  void extend(uint64_t bytes, const char* what);
  void unmap_released();

  zr::Host host_;
  const int rank_, world_, first_rank_;
  const Layout layout_;
  uint64_t identity_ = 0, end_ = 0;                 // end_: size of the file
  std::vector<int> fds_;                            // by rank
  std::vector<char*> control_blocks_;               // by rank: the start of its file
  std::map<const char*, OwnSegment> own_segments_;  // by address
  std::vector<std::vector<PeerSegment>> peer_segments_;
  std::map<const void*, std::pair<void*, uint64_t>> readers_;  // by writer
};

}  // namespace shm
