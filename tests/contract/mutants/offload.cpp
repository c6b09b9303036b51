// A tier in memory with a thread for transfers with a completion, and its defects.
#include "zr/abi/offload.h"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <vector>

#include "module.hpp"

namespace {

enum Defect {
  none,
  invalid_align,
  no_cpu_memory,
  capabilities_change,
  capabilities_vary,
  ignores_offset,
  ignores_length,
  truncates_offset,
  drops_zeros,
  only_first_transfer,
  cuts_long_calls,
  writes_past_memory,
  writes_source,
  reuses_ids,
  frees_neighbour,
  never_resolves,
  resolves_twice,
  resolves_early,
  resolves_after_first,
  forgets_queued_calls,
  mixes_threads,
  mixes_calls,
  wrong_index,
  no_text,
  accepts_unknown_allocation,
  resolves_after_error,
  too_much_capacity,
  error_changes_id,
  leaks_allocations,
  keeps_capacity,
  failed_reserve_takes,
  maps_a_copy,
  misaligned_map,
  map_once,
  unregisters_too_much,
  keeps_transfers,
  thread_without_mask,
  leaks_descriptor,
  leaks_thread,
  descriptor_of_second_open,
  short_read,
  torn_read,
  hangs_in_read,
  output_too_short,
  throws_in_caps,
  throws_in_open_tier,
  throws_in_reserve,
  throws_in_release,
  throws_in_write,
  throws_in_read,
  throws_in_map,
  throws_in_unmap,
  throws_in_reg,
  throws_in_unreg,
  throws_in_create,
  throws_in_destroy
};
constexpr Defect kDefect = ZR_MUTANT;
constexpr uint64_t kAlign = 64, kCapacity = uint64_t{1} << 28;

struct Block {
  std::vector<char> memory;  // with space for the alignment
  std::vector<char> copy;    // of map(), for a defect
  uint64_t bytes;
  bool mapped = false;
  char* data() {
    const auto at = reinterpret_cast<uintptr_t>(memory.data());
    return memory.data() + (kAlign - at % kAlign) % kAlign + (kDefect == misaligned_map ? 32 : 0);
  }
};

struct Job {
  std::vector<zr_transfer> transfers;
  const zr_transfer* list;
  bool writes;
  zr_done* done;
};

struct Tier {
  const zr_host* host;
  const zr_async_service* async;
  std::mutex mutex;
  std::condition_variable changed;
  std::map<uint64_t, Block> blocks;
  std::deque<Job> jobs;
  bool forgot = false;
  uint64_t last = 0, used = 0;
  bool ends = false, opened = false, broken = false;
  std::thread thread;
  int descriptor = -1;
};

char shared_scratch[1 << 16];
zr_transfer shared_list[8];

zr_code copy(Tier& tier, const zr_transfer* transfers, uint32_t n, bool writes, zr_error* error) {
  for (uint32_t i = 0; i < n; ++i) {
    const zr_transfer& one = transfers[i];
    const std::lock_guard lock(tier.mutex);
    const auto block = tier.blocks.find(one.allocation);
    if (block != tier.blocks.end() && one.offset <= block->second.bytes &&
        static_cast<uint64_t>(one.memory.count) <= block->second.bytes - one.offset && one.memory.dtype == ZR_U8)
      continue;
    if (kDefect == accepts_unknown_allocation) return ZR_OK;
    return mutant::fill(error, ZR_INVALID, kDefect == no_text ? "" : "a transfer outside its allocation",
                        kDefect == wrong_index ? 0 : i);
  }
  if (kDefect == mixes_calls && n > 1 && n <= 8) {
    std::copy(transfers, transfers + n, shared_list);
    usleep(50);
    transfers = shared_list;
  }
  for (uint32_t i = 0; i < n; ++i) {
    if (kDefect == only_first_transfer && i > 0) break;
    if (kDefect == cuts_long_calls && i >= 64) break;
    const zr_transfer& one = transfers[i];
    auto bytes = static_cast<std::size_t>(one.memory.count);
    if (kDefect == ignores_length && bytes > (2 << 20)) bytes -= 1;
    if (kDefect == hangs_in_read && !writes)
      while (true) usleep(1000);
    if (kDefect == short_read && !writes && bytes > 65536) bytes = 65536;
    std::unique_lock lock(tier.mutex);
    Block& block = tier.blocks[one.allocation];
    char* at = block.data() + (kDefect == ignores_offset && one.offset > 4000000 ? 0 : one.offset);
    if (kDefect == ignores_offset && writes && n == 1 && one.offset > 0) at = block.data();
    if (kDefect == truncates_offset) at = block.data() + (one.offset & 0xffffff);
    auto* memory = static_cast<char*>(one.memory.data);
    if (kDefect == drops_zeros && writes && std::all_of(memory, memory + bytes, [](char c) { return c == 0; }))
      continue;
    if (kDefect == mixes_threads && bytes <= sizeof shared_scratch) {
      lock.unlock();
      std::memcpy(shared_scratch, writes ? memory : at, bytes);
      usleep(20);
      std::memcpy(writes ? at : memory, shared_scratch, bytes);
      continue;
    }
    std::memcpy(writes ? at : memory, writes ? memory : at, bytes);
    // The sector of a page that was written last is that of an earlier write.
    if (kDefect == torn_read && !writes && bytes >= 4096) std::memset(memory + bytes / 4096 * 4096 - 512, 0, 512);
    if (kDefect == writes_source && writes) const_cast<volatile char*>(memory)[0] = memory[0];
    if (kDefect == writes_past_memory && !writes && bytes == 64) memory[-1] = 0;
  }
  return ZR_OK;
}

void work(Tier& tier) {
  std::unique_lock lock(tier.mutex);
  while (!tier.ends || !tier.jobs.empty()) {
    if (tier.jobs.empty()) {
      tier.changed.wait(lock);
      continue;
    }
    if (kDefect == forgets_queued_calls)  // so that calls are queued
      tier.changed.wait_for(lock, std::chrono::milliseconds(100), [&] { return tier.forgot || tier.ends; });
    Job job = std::move(tier.jobs.front());
    tier.jobs.pop_front();
    lock.unlock();
    zr_error error{};
    if (kDefect == resolves_early) {
      tier.async->done_resolve(job.done, ZR_OK, 0, nullptr);
      usleep(3000);
    }
    const bool resolves_first = kDefect == resolves_after_first && job.transfers.size() > 1;
    if (resolves_first) {
      copy(tier, job.transfers.data(), 1, job.writes, &error);
      tier.async->done_resolve(job.done, ZR_OK, 0, nullptr);
      usleep(3000);
    }
    if (kDefect == keeps_transfers) usleep(5000);
    const zr_transfer* list = kDefect == keeps_transfers ? job.list : job.transfers.data();
    const zr_code code = copy(tier, list, static_cast<uint32_t>(job.transfers.size()), job.writes, &error);
    if (kDefect != never_resolves && kDefect != resolves_early && !resolves_first)
      tier.async->done_resolve(job.done, code, error.native, error.msg);
    if (kDefect == resolves_twice) tier.async->done_resolve(job.done, code, 0, nullptr);
    tier.async->done_release(job.done);
    lock.lock();
  }
}

zr_code create(const zr_host* host, const zr_config*, void** self, zr_error* error) {
  const auto* async = mutant::service<zr_async_service>(host, "zr.host.async/1");
  if (!async) return mutant::fill(error, ZR_UNSUPPORTED, "the host has no zr.host.async/1");
  auto* tier = new Tier;
  tier->host = host;
  tier->async = async;
  *self = tier;
  return ZR_OK;
}
void destroy(void* self) {
  auto* tier = static_cast<Tier*>(self);
  if (!tier) return;
  {
    const std::lock_guard lock(tier->mutex);
    tier->ends = true;
  }
  tier->changed.notify_all();
  if (tier->thread.joinable()) tier->thread.join();
  if (tier->descriptor >= 0) close(tier->descriptor);
  delete tier;
}

zr_code caps(void* self, zr_offload_caps* out, zr_error*) {
  auto& tier = *static_cast<Tier*>(self);
  zr_offload_caps caps{};
  caps.flags = ZR_TIER_MAPPABLE | ZR_TIER_ASYNC;
  caps.capacity = kCapacity;
  caps.io_align = kDefect == invalid_align ? 3 : kDefect == capabilities_change && tier.opened ? 16 : 1;
  static int calls = 0;
  caps.io_bytes = kDefect == capabilities_vary && ++calls % 50 == 0 ? 1 << 21 : 1 << 20;
  caps.io_depth = 4;
  caps.device_types = 1u << (kDefect == no_cpu_memory ? ZR_DEVICE_CUDA : ZR_DEVICE_CPU);
  mutant::write_output(out, caps);
  if (kDefect == output_too_short) out->size = 55;
  return ZR_OK;
}

zr_code open_tier(void* self, zr_error*) {
  auto& tier = *static_cast<Tier*>(self);
  tier.opened = true;
  if (kDefect == leaks_descriptor) open("/dev/null", O_RDONLY | O_CLOEXEC);
  static int opens = 0;
  if (kDefect == descriptor_of_second_open && ++opens == 2) tier.descriptor = dup(0);
  sigset_t all, before;
  sigfillset(&all);
  if (kDefect == leaks_thread) {
    pthread_sigmask(SIG_SETMASK, &all, &before);
    std::thread([] { pause(); }).detach();
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }
  if (kDefect != thread_without_mask) pthread_sigmask(SIG_SETMASK, &all, &before);
  tier.thread = std::thread([&tier] { work(tier); });
  if (kDefect != thread_without_mask) pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return ZR_OK;
}

zr_code reserve(void* self, uint64_t bytes, const char*, uint64_t* allocation, zr_error* error) {
  auto& tier = *static_cast<Tier*>(self);
  const std::lock_guard lock(tier.mutex);
  if (kDefect == error_changes_id) *allocation = 5;
  if (kDefect == failed_reserve_takes && bytes <= kCapacity) tier.used += bytes;
  if (bytes > kCapacity || tier.used > kCapacity - (kDefect == failed_reserve_takes ? 0 : bytes)) {
    if (kDefect != too_much_capacity) return mutant::fill(error, ZR_NOMEM, "the tier is full");
    bytes = 4096;
  }
  uint64_t id = ++tier.last;
  if (kDefect == reuses_ids && id > 5) id = 1 + id % 5;
  if (kDefect != failed_reserve_takes) tier.used += bytes;
  Block& block = tier.blocks[id];
  block.memory.assign(bytes + 2 * kAlign, 0);
  block.bytes = bytes;
  *allocation = id;
  return ZR_OK;
}
void release(void* self, uint64_t allocation) {
  auto& tier = *static_cast<Tier*>(self);
  const std::lock_guard lock(tier.mutex);
  if (kDefect == leaks_allocations) {
    std::vector<char>& memory = tier.blocks[allocation].memory;
    for (std::size_t i = 0; i < memory.size(); i += 512) memory[i] = 1;
    return;
  }
  if (kDefect != keeps_capacity && tier.blocks.count(allocation)) tier.used -= tier.blocks[allocation].bytes;
  tier.blocks.erase(allocation);
  const auto next = tier.blocks.upper_bound(allocation);
  if (kDefect == frees_neighbour && next != tier.blocks.end())
    std::fill(next->second.memory.begin(), next->second.memory.end(), 0);
}

zr_code transfer(void* self, const zr_transfer* transfers, uint32_t n, bool writes, zr_done* done, zr_error* error) {
  auto& tier = *static_cast<Tier*>(self);
  if (tier.broken) return mutant::fill(error, ZR_IO, "the memory is not registered");
  if (!done) return copy(tier, transfers, n, writes, error);
  if (kDefect == resolves_after_error) {
    const zr_code code = copy(tier, transfers, n, writes, error);
    tier.async->done_resolve(done, code, error->native, error->msg);
    return code;
  }
  tier.async->done_retain(done);
  {
    const std::lock_guard lock(tier.mutex);
    if (kDefect == forgets_queued_calls && tier.jobs.size() > 1) {
      tier.forgot = true;
      return ZR_OK;
    }
    tier.jobs.push_back({{transfers, transfers + n}, transfers, writes, done});
  }
  tier.changed.notify_all();
  return ZR_OK;
}
zr_code write(void* self, const zr_transfer* transfers, uint32_t n, zr_stream*, zr_done* done, zr_error* error) {
  return transfer(self, transfers, n, true, done, error);
}
zr_code read(void* self, const zr_transfer* transfers, uint32_t n, zr_stream*, zr_done* done, zr_error* error) {
  return transfer(self, transfers, n, false, done, error);
}

zr_code map(void* self, uint64_t allocation, zr_view* out, zr_error* error) {
  auto& tier = *static_cast<Tier*>(self);
  const std::lock_guard lock(tier.mutex);
  Block& block = tier.blocks[allocation];
  if (kDefect == map_once && block.mapped) return mutant::fill(error, ZR_STATE, "it was mapped before");
  block.mapped = true;
  if (kDefect == maps_a_copy) {
    block.copy = block.memory;
    block.copy.resize(block.copy.size() + kAlign);
    const auto at = reinterpret_cast<uintptr_t>(block.copy.data());
    char* start = block.copy.data() + (kAlign - at % kAlign) % kAlign;
    std::memcpy(start, block.data(), block.bytes);
    *out = mutant::view_of(start, static_cast<int64_t>(block.bytes), ZR_U8);
    return ZR_OK;
  }
  *out = mutant::view_of(block.data(), static_cast<int64_t>(block.bytes), ZR_U8);
  return ZR_OK;
}
void unmap(void*, uint64_t) {}

zr_code reg(void*, const zr_view*, zr_error*) { return ZR_OK; }
void unreg(void* self, const zr_view*) {
  if (kDefect == unregisters_too_much) static_cast<Tier*>(self)->broken = true;
}

constexpr zr_offload_api kApi{sizeof(zr_offload_api), 0,
                              MUTANT_SLOT(caps),      MUTANT_SLOT(open_tier),
                              MUTANT_SLOT(reserve),   MUTANT_SLOT(release),
                              MUTANT_SLOT(write),     MUTANT_SLOT(read),
                              MUTANT_SLOT(map),       MUTANT_SLOT(unmap),
                              MUTANT_SLOT(reg),       MUTANT_SLOT(unreg)};
constexpr zr_component kComponent = mutant::component("zr.offload/1", &kApi, MUTANT_SLOT(create), MUTANT_SLOT(destroy));

}  // namespace

MUTANT_MODULE(offload, nullptr, nullptr)

extern "C" ZR_EXPORT const zr_module* zr_module_v1(uint32_t) { return &kModule; }
