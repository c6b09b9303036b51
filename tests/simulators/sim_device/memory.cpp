// Device memory that the host cannot touch, a caching allocator per stream, and pinned host memory.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <map>

#include "sim.hpp"

namespace zr::test::sim {
namespace {

using c10::CachingAllocator::StatType;
constexpr std::size_t kGranule = 512;
constexpr int kPattern = 0xFF;  // every floating point type reads as NaN

// Device addresses are in a PROT_NONE range; the memory is at a constant distance from them. It is a file without a
// name, so that other processes can map it.
struct Arena {
  std::size_t limit;  // bytes per device
  std::size_t span;   // addresses per device
  int file;
  char *addresses, *memory;
  static char* map(std::size_t bytes, int protection, int file) {
    const int kind = file < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
    void* const at = mmap(nullptr, bytes, protection, kind | MAP_NORESERVE, file, 0);
    TORCH_CHECK(at != MAP_FAILED, "sim: cannot map ", bytes, " bytes; lower ZR_SIM_BYTES");
    return static_cast<char*>(at);
  }
  Arena()
      : limit((env_number("ZR_SIM_BYTES", uint64_t{1} << 30) + kGranule - 1) / kGranule * kGranule),
        file(memfd_create("zr_sim_device", MFD_CLOEXEC)) {
    span = 4 * limit;  // fragmentation of addresses never causes an out-of-memory error
    const std::size_t bytes = span * static_cast<std::size_t>(device_count());
    TORCH_CHECK(file >= 0 && ftruncate(file, static_cast<off_t>(bytes)) == 0, "sim: cannot make a file of ", bytes,
                " bytes in memory; lower ZR_SIM_BYTES");
    addresses = map(bytes, PROT_NONE, -1);
    memory = map(bytes, PROT_READ | PROT_WRITE, file);
  }
};
const Arena& arena() {
  static const auto* const it = new Arena;
  return *it;
}

struct Block {
  std::size_t size = 0;
  bool counted = true;                  // in libtorch's statistics
  StreamQueue* owner = nullptr;         // the stream of the allocation
  std::vector<StreamQueue*> also_used;  // recordStream()
};

struct Wait {
  StreamQueue* queue;
  uint64_t ticket;
};

struct Freed {
  char* at;
  Block block;
  std::vector<Wait> waits;
};

struct DeviceMemory {
  std::unordered_map<void*, Block> live;
  std::map<std::pair<StreamQueue*, std::size_t>, std::vector<char*>> cached;
  std::vector<Freed> waiting;               // freed, but in use on other streams
  std::map<std::size_t, std::size_t> free;  // offset -> size of address ranges
  std::size_t reserved = 0;                 // live + cached + waiting
  c10::CachingDeviceAllocator::DeviceStats stats;
};

c10::CachingAllocator::Stat& total(c10::CachingAllocator::StatArray& stats) {
  return stats[static_cast<std::size_t>(StatType::AGGREGATE)];
}

void fill(StreamQueue& queue, char* at, std::size_t size) {
  queue.enqueue(
      "fill", [at, size] { std::memset(backing(at), kPattern, size); }, /*delayed=*/false);
}

class SimAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    const c10::DeviceIndex device = current_device();
    void* const at = bytes == 0 ? nullptr : take(device, bytes, true);
    return {at, at, &release, c10::Device(kSim, device)};
  }
  // Memory that is not in libtorch's statistics, as that of other libraries.
  void* allocate_uncounted(std::size_t bytes) { return take(current_device(), bytes, false); }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    current_queue(device_of(to)).enqueue("copy_data", [=] { std::memcpy(backing(to), backing(from), bytes); });
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t /*pool*/) override {
    for (c10::DeviceIndex d = 0; d < device_count(); ++d) release_cached(d);
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    if (data.get() == nullptr) return;
    StreamQueue& queue = stream_queue(stream);
    const std::lock_guard lock(mutex_);
    auto& live = memory(device_of(data.get())).live;
    const auto found = live.find(data.get_context());
    if (found != live.end() && found->second.owner != &queue) found->second.also_used.push_back(&queue);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    const std::lock_guard lock(mutex_);
    return memory(device).stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    const std::lock_guard lock(mutex_);
    auto& stats = memory(device).stats;
    for (auto* each : {&stats.allocated_bytes, &stats.allocation, &stats.reserved_bytes})
      total(*each).reset_accumulated();
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    const std::lock_guard lock(mutex_);
    auto& stats = memory(device).stats;
    for (auto* each : {&stats.allocated_bytes, &stats.allocation, &stats.reserved_bytes}) total(*each).reset_peak();
  }
  std::pair<std::size_t, std::size_t> getMemoryInfo(c10::DeviceIndex device) override {
    const std::lock_guard lock(mutex_);
    return {arena().limit - memory(device).reserved, arena().limit};
  }

 private:
  static void release(void* at);

  DeviceMemory& memory(c10::DeviceIndex device) {
    if (devices_.empty()) {
      devices_.resize(static_cast<std::size_t>(device_count()));
      for (std::size_t d = 0; d < devices_.size(); ++d) devices_[d].free[arena().span * d] = arena().span;
    }
    return devices_.at(static_cast<std::size_t>(device));
  }

  char* take(c10::DeviceIndex device, std::size_t bytes, bool counted) {
    const std::size_t size = (bytes + kGranule - 1) / kGranule * kGranule;
    StreamQueue& queue = current_queue(device);
    char* at = try_take(device, queue, size, counted);
    if (at == nullptr) {
      release_cached(device);
      at = try_take(device, queue, size, counted);
    }
    if (at != nullptr) return at;
    const std::lock_guard lock(mutex_);
    DeviceMemory& m = memory(device);
    ++m.stats.num_ooms;
    TORCH_CHECK_WITH(OutOfMemoryError, false, "sim out of memory: cannot allocate ", size,
                     " bytes on sim:", static_cast<int>(device), " (", m.reserved, " of ", arena().limit,
                     " bytes in use); see ZR_SIM_BYTES");
  }

  // A cached block of the same stream and size, or new addresses; null when the limit is reached.
  char* try_take(c10::DeviceIndex device, StreamQueue& queue, std::size_t size, bool counted) {
    const std::lock_guard lock(mutex_);
    DeviceMemory& m = memory(device);
    collect(m);
    char* at = nullptr;
    auto cached = m.cached.find({&queue, size});
    if (cached != m.cached.end() && !cached->second.empty()) {
      at = cached->second.back();
      cached->second.pop_back();
    } else {
      if (m.reserved + size > arena().limit) return nullptr;
      auto range = m.free.begin();
      while (range != m.free.end() && range->second < size) ++range;
      if (range == m.free.end()) return nullptr;
      at = arena().addresses + range->first;
      if (range->second > size) m.free[range->first + size] = range->second - size;
      m.free.erase(range);
      m.reserved += size;
      total(m.stats.reserved_bytes).increase(size);
      ++m.stats.num_device_alloc;
      fill(queue, at, size);
    }
    m.live[at] = {size, counted, &queue, {}};
    if (!counted) return at;
    total(m.stats.allocated_bytes).increase(size);
    total(m.stats.allocation).increase(1);
    return at;
  }

  // Moves freed blocks to the cache once the streams that used them are done.
  void collect(DeviceMemory& m) {
    std::erase_if(m.waiting, [&](const Freed& freed) {
      for (const Wait& wait : freed.waits)
        if (!wait.queue->finished(wait.ticket)) return false;
      to_cache(m, freed.at, freed.block);
      return true;
    });
  }

  static void to_cache(DeviceMemory& m, char* at, const Block& block) {
    fill(*block.owner, at, block.size);
    m.cached[{block.owner, block.size}].push_back(at);
  }

  // As cudaFree: waits for the device, then returns all cached blocks.
  void release_cached(c10::DeviceIndex device) {
    for (StreamQueue* queue : queues_of(device)) queue->wait(queue->last_ticket());
    decltype(DeviceMemory::cached) blocks;
    {
      const std::lock_guard lock(mutex_);
      collect(memory(device));
      blocks.swap(memory(device).cached);
    }
    // Without the lock: a task that ends may free device memory.
    for (const auto& [key, each] : blocks) key.first->wait(key.first->last_ticket());
    const std::lock_guard lock(mutex_);
    for (const auto& [key, each] : blocks)
      for (char* at : each) give_back(memory(device), at, key.second);
  }

  static void give_back(DeviceMemory& m, char* at, std::size_t size) {
    m.reserved -= size;
    total(m.stats.reserved_bytes).decrease(size);
    ++m.stats.num_device_free;
    auto offset = static_cast<std::size_t>(at - arena().addresses);
    auto next = m.free.lower_bound(offset);
    if (next != m.free.end() && offset + size == next->first) {
      size += next->second;
      next = m.free.erase(next);
    }
    if (next != m.free.begin()) {
      const auto before = std::prev(next);
      if (before->first + before->second == offset) {
        before->second += size;
        return;
      }
    }
    m.free[offset] = size;
  }

  void free_block(char* at) {
    const std::lock_guard lock(mutex_);
    DeviceMemory& m = memory(device_of(at));
    const auto found = m.live.find(at);
    if (found == m.live.end()) return;
    const Block block = std::move(found->second);
    m.live.erase(found);
    if (block.counted) {
      total(m.stats.allocated_bytes).decrease(block.size);
      total(m.stats.allocation).decrease(1);
    }
    if (block.also_used.empty()) return to_cache(m, at, block);
    Freed freed{at, block, {}};
    for (StreamQueue* queue : block.also_used) freed.waits.push_back({queue, queue->last_ticket()});
    m.waiting.push_back(std::move(freed));
  }

  std::mutex mutex_;
  std::vector<DeviceMemory> devices_;
};

SimAllocator& instance() {
  static auto* const it = new SimAllocator;
  return *it;
}
void SimAllocator::release(void* at) {
  if (at != nullptr) instance().free_block(static_cast<char*>(at));
}

// Pinned host memory, fresh blocks of which are filled, too. A copy keeps the storage until it is done, so a freed
// block is never in use.
class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes == 0) return {nullptr, c10::Device(c10::kCPU)};
    void* const at = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    TORCH_CHECK(at != nullptr, "sim: cannot allocate ", bytes, " bytes of pinned memory");
    std::memset(at, kPattern, bytes);
    const std::lock_guard lock(mutex_);
    blocks_[at] = bytes;
    return {at, at, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool holds(const void* address) {
    const std::lock_guard lock(mutex_);
    auto next = blocks_.upper_bound(address);
    if (next == blocks_.begin()) return false;
    --next;
    return static_cast<const char*>(address) < static_cast<const char*>(next->first) + next->second;
  }

 private:
  static void release(void* at);
  std::mutex mutex_;
  std::map<const void*, std::size_t> blocks_;
};

PinnedAllocator& pinned() {
  static auto* const it = new PinnedAllocator;
  return *it;
}
void PinnedAllocator::release(void* at) {
  if (at == nullptr) return;
  {
    const std::lock_guard lock(pinned().mutex_);
    pinned().blocks_.erase(at);
  }
  std::free(at);
}

const bool registered = (c10::SetAllocator(kSim, &instance()), true);

}  // namespace

void* backing(const void* device_address) {
  if (device_address == nullptr) return nullptr;
  return arena().memory + (static_cast<const char*>(device_address) - arena().addresses);
}

bool on_device(const void* address) {
  const auto* const at = static_cast<const char*>(address);
  return at >= arena().addresses && at < arena().addresses + arena().span * static_cast<std::size_t>(device_count());
}

c10::DeviceIndex device_of(const void* address) {
  TORCH_CHECK(on_device(address), "sim: ", address, " is not a device address");
  const auto offset = static_cast<std::size_t>(static_cast<const char*>(address) - arena().addresses);
  return static_cast<c10::DeviceIndex>(offset / arena().span);
}

c10::DeviceAllocator& allocator() { return instance(); }
c10::Allocator* pinned_allocator() { return &pinned(); }
bool is_pinned(const void* address) { return pinned().holds(address); }

}  // namespace zr::test::sim

// For plug-ins that share memory of the device with other processes, which map the file of this one.
extern "C" {
int zr_sim_file() { return zr::test::sim::arena().file; }
uint64_t zr_sim_offset(const void* device_address) {
  return static_cast<uint64_t>(static_cast<const char*>(device_address) - zr::test::sim::arena().addresses);
}
// Zeroed, and not in libtorch's statistics; null if there is not enough memory. The stream that is current waits for
// nothing else.
void* zr_sim_allocate(int device, uint64_t bytes) try {
  using namespace zr::test::sim;
  const c10::DeviceIndex before = current_device();
  set_current_device(static_cast<c10::DeviceIndex>(device));
  void* memory = nullptr;
  try {
    memory = instance().allocate_uncounted(bytes);
    StreamQueue& queue = current_queue(current_device());
    queue.wait(queue.enqueue("zero", [memory, bytes] { std::memset(backing(memory), 0, bytes); }));
  } catch (const c10::OutOfMemoryError&) {
  }
  set_current_device(before);
  return memory;
} catch (const std::exception&) {
  return nullptr;
}
void zr_sim_free(void* memory) { zr::test::sim::allocator().raw_deallocate(memory); }
}
