#include "arena.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <random>

#include "machine.hpp"

namespace shm {

namespace {
constexpr const char* kTag = "shared memory: counters and staging";

[[noreturn]] void reject(zr_code code, const std::string& what) {
  const int error = errno;
  throw zr::PluginError(code, what + ": " + std::strerror(error), error);
}

// Bytes of memory that the machine has available; -1 if unknown.
int64_t available() {
  std::ifstream file("/proc/meminfo");
  for (std::string line; std::getline(file, line);)
    if (line.rfind("MemAvailable:", 0) == 0) return std::strtoll(line.c_str() + 13, nullptr, 10) * 1024;
  return -1;
}
}  // namespace

Arena::Arena(const zr::Host& host, int rank, int world, int64_t staging_bytes, int first_rank)
    : host_(host),
      rank_(rank),
      world_(world),
      first_rank_(first_rank),
      layout_(world, staging_bytes),
      fds_(static_cast<size_t>(world), -1),
      control_blocks_(static_cast<size_t>(world), nullptr),
      peer_segments_(static_cast<size_t>(world), std::vector<PeerSegment>(kSegments)) {
  const int fd =
      ::memfd_create(("zeroth-rank-" + std::to_string(first_rank + rank)).c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) reject(ZR_UNSUPPORTED, "memfd_create failed; comm_shm needs a Linux kernel and a sandbox that allow it");
  fds_[rank] = fd;
  // A truncated file would crash the peers that map it. If the kernel does not support seals, only this protection is
  // missing.
  ::fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK);
  extend(layout_.bytes, "counters and staging");
  control_blocks_[rank] = map(fd, 0, layout_.bytes, "counters and staging");
  host_.need<zr_memory_service>().account(host_.abi(), kTag, static_cast<int64_t>(layout_.bytes));
  std::random_device random;
  identity_ = (uint64_t{random()} << 32) | random();
  control_block(rank).identity = identity_;
  control_block(rank).magic = kMagic;
}

Arena::~Arena() {
  for (const auto& [memory, own] : own_segments_) ::munmap(const_cast<char*>(memory), own.bytes);
  for (const auto& list : peer_segments_)
    for (const PeerSegment& segment_of_peer : list)
      if (segment_of_peer.memory) ::munmap(segment_of_peer.memory, segment_of_peer.bytes);
  for (const auto& [writer, reader] : readers_) ::munmap(reader.first, reader.second);
  for (char* start : control_blocks_)
    if (start) ::munmap(start, layout_.bytes);
  for (const int fd : fds_)
    if (fd >= 0) ::close(fd);
  if (control_blocks_[rank_])
    host_.need<zr_memory_service>().account(host_.abi(), kTag, -static_cast<int64_t>(layout_.bytes));
}

MemoryFileAddress Arena::address() const {
  return {host_name(), boot_id(), pid_namespace(), ::getpid(), fds_[rank_], identity_};
}

void Arena::connect(int peer, const MemoryFileAddress& address) {
  const MemoryFileAddress own_address = this->address();
  const std::string peer_text = name_of(peer);
  if (address.boot != own_address.boot)
    throw zr::PluginError(ZR_UNSUPPORTED,
                          "comm_shm connects ranks of one node only: " + peer_text + " is on host '" + address.host +
                              "', this is " + name_of(rank_) + " on '" + own_address.host +
                              "'; start all ranks on one node, or choose a communicator for several nodes");
  if (address.container != own_address.container)
    throw zr::PluginError(ZR_UNSUPPORTED, "comm_shm opens its peers' memory through /proc: " + peer_text +
                                              " on host '" + address.host +
                                              "' is in another container (PID namespace) than " + name_of(rank_) +
                                              "; start all ranks in one container");
  const std::string path = "/proc/" + std::to_string(address.pid) + "/fd/" + std::to_string(address.fd);
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0)
    reject(ZR_COMM, "cannot open the memory of " + peer_text + " (" + path +
                        "); its process must be alive and run as the same user");
  fds_[peer] = fd;
  control_blocks_[peer] = map(fd, 0, layout_.bytes, "the control block of " + peer_text);
  if (control_block(peer).magic != kMagic || control_block(peer).identity != address.identity)
    throw zr::PluginError(ZR_COMM, path + " is not the memory that " + peer_text + " announced; process " +
                                       std::to_string(address.pid) +
                                       " has ended, and its process id may have been reused");
}

void Arena::extend(uint64_t bytes, const char* what) {
  // The kernel does not limit the size of such files: without this check its OOM killer would end processes.
  if (const int64_t free_bytes = available(); free_bytes >= 0 && bytes > static_cast<uint64_t>(free_bytes))
    throw zr::PluginError(ZR_NOMEM,
                          "cannot allocate " + std::to_string(bytes) + " bytes of shared memory (" + what +
                              "): the machine has " + std::to_string(free_bytes) +
                              " bytes available; use fewer ranks on this node, or a strategy that shards more",
                          ENOMEM);
  const auto offset = static_cast<off_t>(end_);
  int error = 0;
  do {
    error = ::ftruncate(fds_[rank_], offset + static_cast<off_t>(bytes)) == 0 ? 0 : errno;
    if (!error) error = ::fallocate(fds_[rank_], 0, offset, static_cast<off_t>(bytes)) == 0 ? 0 : errno;
  } while (error == EINTR);
  if (error) {
    errno = error;
    reject(ZR_NOMEM,
           "cannot allocate " + std::to_string(bytes) + " bytes of shared memory (" + what + ")" +
               (error == EFBIG ? ", because the limit of file sizes (ulimit -f) holds for it too: raise it" : ""));
  }
  end_ += bytes;
}

char* Arena::map(int fd, uint64_t offset, uint64_t bytes, const std::string& what, int flags) const {
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | flags, fd, static_cast<off_t>(offset));
  if (memory == MAP_FAILED)
    reject(ZR_NOMEM, "cannot map " + std::to_string(bytes) + " bytes of shared memory (" + what + ")");
  return static_cast<char*>(memory);
}

void* Arena::allocate(uint64_t bytes) {
  unmap_released();
  bytes = zr::round_up(bytes ? bytes : 1, Layout::kPage);
  Segment* table = control_block(rank_).segments;
  uint32_t free = 0;
  while (free < kSegments && table[free].generation.load(std::memory_order_relaxed) % 2 == 1) ++free;
  if (free == kSegments)
    throw zr::PluginError(ZR_NOMEM, "cannot allocate more than " + std::to_string(kSegments) +
                                        " segments of shared memory at a time; allocate fewer and larger ones");
  const uint64_t offset = end_;
  extend(bytes, "a buffer");
  char* memory = map(fds_[rank_], offset, bytes, "a buffer");
  table[free].offset = offset;
  table[free].bytes = bytes;
  table[free].generation.fetch_add(1, std::memory_order_release);
  own_segments_[memory] = {bytes, offset, free};
  return memory;
}

void Arena::release(void* memory) {
  const auto at = own_segments_.find(static_cast<char*>(memory));
  if (at == own_segments_.end()) return;
  control_block(rank_).segments[at->second.segment].generation.fetch_add(1, std::memory_order_release);
  ::munmap(memory, at->second.bytes);
  // Free the pages now. A peer that still maps the segment keeps only the address range.
  ::fallocate(fds_[rank_], FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(at->second.offset),
              static_cast<off_t>(at->second.bytes));
  own_segments_.erase(at);
  unmap_released();
}

void Arena::unmap_released() {
  for (int r = 0; r < world_; ++r) {
    if (!control_blocks_[r]) continue;
    for (uint32_t i = 0; i < kSegments; ++i) {
      PeerSegment& segment_of_peer = peer_segments_[r][i];
      if (!segment_of_peer.memory ||
          control_block(r).segments[i].generation.load(std::memory_order_acquire) == segment_of_peer.generation)
        continue;
      ::munmap(segment_of_peer.memory, segment_of_peer.bytes);
      segment_of_peer = {};
    }
  }
}

ShmAddress Arena::address_of(const void* data, int64_t bytes) const {
  auto at = own_segments_.upper_bound(static_cast<const char*>(data));
  if (at == own_segments_.begin()) return {};
  --at;
  const auto offset = static_cast<uint64_t>(static_cast<const char*>(data) - at->first);
  if (offset + static_cast<uint64_t>(bytes) > at->second.bytes) return {};
  return {at->second.segment,
          control_block(rank_).segments[at->second.segment].generation.load(std::memory_order_relaxed), offset};
}

char* Arena::at(int r, const ShmAddress& address) {
  PeerSegment& segment_of_peer = peer_segments_[r][address.segment];
  if (segment_of_peer.generation != address.generation || !segment_of_peer.memory) {
    if (segment_of_peer.memory) ::munmap(segment_of_peer.memory, segment_of_peer.bytes);
    segment_of_peer = {};
    const Segment& segment = control_block(r).segments[address.segment];
    // Without MAP_POPULATE: a rank uses only a part of its peers' memory, and only that part should count as its own.
    segment_of_peer.memory = map(fds_[r], segment.offset, segment.bytes, "a buffer of " + name_of(r), 0);
    segment_of_peer.bytes = segment.bytes;
    segment_of_peer.generation = address.generation;
  }
  return segment_of_peer.memory + address.offset;
}

const char* Arena::map_reader(int r, const ShmAddress& address, const void* writer) {
  const Segment& segment = control_block(r).segments[address.segment];
  void* memory =
      ::mmap(nullptr, segment.bytes, PROT_READ, MAP_SHARED | MAP_POPULATE, fds_[r], static_cast<off_t>(segment.offset));
  if (memory == MAP_FAILED) reject(ZR_NOMEM, "cannot map " + std::to_string(segment.bytes) + " bytes of shared memory");
  readers_[writer] = {memory, segment.bytes};
  // A rank uses only its own part of the writable mapping. Drop its page table entries: the memory itself stays, and
  // the next write maps a page again.
  ::madvise(const_cast<void*>(writer), segment.bytes, MADV_DONTNEED);
  return static_cast<const char*>(memory);
}

void Arena::release_reader(const void* writer) {
  const auto at = readers_.find(writer);
  if (at == readers_.end()) return;
  ::munmap(at->second.first, at->second.second);
  readers_.erase(at);
}

}  // namespace shm
