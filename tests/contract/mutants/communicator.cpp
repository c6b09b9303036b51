// A communicator through a shared file, and its defects. Every rank copies its src to a slot of the file; when all have
// done so, each computes its dst. Two operations can be in flight.
#include "zr/abi/communicator.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <string>
#include <thread>
#include <vector>

#include "module.hpp"
#include "quantized.hpp"
#include "zr/abi/communicator_extensions.h"

namespace {

using mutant::Form, mutant::load, mutant::store, mutant::width;

enum Defect {
  none,
  no_cpu_memory,
  capabilities_change,
  capabilities_vary,
  wrong_part,
  clobbers_in_place,
  changes_source,
  writes_past_destination,
  adds_in_reverse,
  ignores_accumulate,
  rounds_before_sum,
  wrong_with_completion,
  memory_not_zeroed,
  memory_misaligned,
  wrong_in_own_memory,
  resolves_early,
  resolves_twice,
  never_resolves,
  resolves_out_of_order,
  waits_in_submit,
  waits_in_progress,
  ignores_abort,
  forgets_abort,
  abort_gives_other_code,
  close_forgets,
  resolves_after_close,
  shares_state,
  opens_once,
  mismatch_is_internal,
  ignores_prefix,
  plan_grows,
  traffic_overwrites,
  traffic_unbalanced,
  traffic_of_one_host,
  traffic_reads_views,
  traffic_of_unknown,
  accepts_unknown_dtype,
  error_changes_output,
  error_without_text,
  resolves_after_error,
  keeps_counts,
  rejects_longer_structs,
  descriptor_without_cloexec,
  descriptor_of_second_open,
  leaks_descriptor,
  caches_service_table,
  output_too_long,
  wrong_message,
  weights_are_private,
  weights_not_zeroed,
  output_too_short,
  throws_in_caps,
  throws_in_open_comm,
  throws_in_close_comm,
  throws_in_submit,
  throws_in_progress,
  throws_in_mem_alloc,
  throws_in_mem_free,
  throws_in_abort_comm,
  throws_in_create,
  throws_in_destroy,
  throws_in_extension,
  throws_in_open_bytes,
  throws_in_traffic,
  throws_in_weights_alloc,
  // of one with collectives that need not be exact
  inexact,  // without a defect
  drops_a_rank,
  divides_by_zero,
  one_scale_per_part,
  own_part_is_exact,
  begins_with_own_rank,
  order_of_this_run,
  hides_infinities,
  rounds_source
};
constexpr Defect kDefect = ZR_MUTANT;
constexpr bool kInexact = kDefect >= inexact;

constexpr int kRanks = 8, kSlots = 2;
constexpr std::size_t kSlotBytes = 2 << 20;

struct Announcement {
  uint64_t fingerprint;
  int64_t bytes;
};
struct RankPage {
  std::atomic<uint64_t> announced, finished;
  Announcement announcements[kSlots];
};
struct Mailbox {  // of one message
  std::atomic<int> full;
  int64_t bytes;
  char data[1 << 17];
};
constexpr std::size_t kWeightBytes = 16 << 20;
struct Region {
  alignas(4096) char weights[kWeightBytes];
  std::atomic<int> opened, seed;  // seed: differs between runs
  Mailbox mailboxes[kRanks][kRanks];
  RankPage ranks[kRanks];
  char data[kRanks][kSlots][kSlotBytes];
};

struct Operation {
  zr_coll coll;
  std::vector<int64_t> counts;
  const int64_t* given_counts;
  zr_done* done;
  zr_code code = ZR_AGAIN;
};

struct Communicator {
  const zr_host* host;
  int opened = 0;
};
struct Comm {
  Communicator* owner;
  const zr_async_service* async;
  int rank, world;
  Region* region;
  std::deque<Operation> queue;
  uint64_t next = 0;  // number of the first operation in the queue
  std::atomic<bool> aborted{false};
  int fd = -1;
  std::size_t weight_bytes = 0;  // allocated so far, equal on all ranks
};

uint64_t shared_next = 0;

bool all_ranks(const Comm& c, std::atomic<uint64_t> RankPage::*counter, uint64_t at_least) {
  for (int r = 0; r < c.world; ++r)
    if ((c.region->ranks[r].*counter).load() < at_least) return false;
  return true;
}

bool reads(const Comm& c, const zr_coll& coll) {
  return coll.op != ZR_BARRIER && (coll.op != ZR_BROADCAST || c.rank == coll.root);
}

void quantize(const zr_coll& coll, zr_dtype dtype, char* data, int64_t count) {
  const int64_t usual = coll.flags & ZR_COLL_INT4 ? 64 : 128;
  const int64_t block = kDefect == one_scale_per_part ? std::max<int64_t>(count, 1) : usual;
  const Form form{coll.flags & ZR_COLL_INT4 ? 7.0f : 127.0f, block, kDefect == divides_by_zero,
                  kDefect == hides_infinities};
  mutant::quantize(form, dtype, data, count);
}
bool is_quantized(const zr_coll& coll) { return (coll.flags & (ZR_COLL_INT8 | ZR_COLL_INT4)) != 0; }

// The rank whose elements are added as the i-th.
int rank_of(const Comm& c, const zr_coll& coll, int i) {
  if (kDefect == adds_in_reverse) return c.world - 1 - i;
  if (!(coll.flags & ZR_COLL_ANY_ORDER)) return i;
  if (kDefect == begins_with_own_rank) return (c.rank + i) % c.world;
  if (kDefect == order_of_this_run) return ((c.region->seed >> coll.fingerprint % 24 & 7) + i) % c.world;
  return c.world - 1 - i;
}

void reduce_element(const Comm& c, const zr_coll& coll, const char* const* sources, char* to) {
  const bool accumulates = (coll.flags & ZR_COLL_ACCUMULATE) && kDefect != ignores_accumulate;
  if (coll.dst.dtype == ZR_U8) {
    auto sum = static_cast<uint8_t>(accumulates ? *to : 0);
    for (int r = 0; r < c.world; ++r) sum = static_cast<uint8_t>(sum + static_cast<uint8_t>(*sources[r]));
    *to = static_cast<char>(sum);
    return;
  }
  float sum = accumulates ? load(coll.dst.dtype, to) : 0;
  for (int r = 0; r < c.world; ++r) {
    if (kDefect == drops_a_rank && (coll.flags & ZR_COLL_ANY_ORDER) && r == 1) continue;
    sum += load(coll.src.dtype, sources[rank_of(c, coll, r)]);
    if (kDefect == rounds_before_sum && coll.src.dtype != coll.dst.dtype) sum = zr::from_bf16(zr::to_bf16(sum));
  }
  store(coll.dst.dtype, to, sum);
}

// The first element and the number of elements of a rank's part.
std::pair<int64_t, int64_t> part_of(const Operation& operation, int64_t total, int world, int rank) {
  if (operation.counts.empty()) return {total / world * rank, total / world};
  int64_t first = 0;
  for (int r = 0; r < rank; ++r) first += operation.counts[static_cast<std::size_t>(r)];
  return {first, operation.counts[static_cast<std::size_t>(rank)]};
}

const void* own_memory[64];
bool is_own(const void* data) {
  for (const void* known : own_memory)
    if (known && known == data) return true;
  return false;
}

std::size_t bytes_of(const zr_view& view) { return static_cast<std::size_t>(view.count * width(view.dtype)); }

void execute(const Comm& c, const Operation& operation, uint64_t slot) {
  const zr_coll& coll = operation.coll;
  auto* dst = static_cast<char*>(coll.dst.data);
  const auto source = [&](int r) { return c.region->data[r][slot]; };
  if (coll.op == ZR_BROADCAST)
    std::memcpy(dst, source(coll.root), static_cast<std::size_t>(c.region->ranks[coll.root].announcements[slot].bytes));
  if (coll.op == ZR_ALL_GATHER) {
    std::size_t at = 0;
    for (int r = 0; r < c.world; ++r) {
      const auto bytes = static_cast<std::size_t>(c.region->ranks[r].announcements[slot].bytes);
      if (bytes > 0) std::memcpy(dst + at, source(r), bytes);
      at += bytes;
    }
    if (kDefect == wrong_part && c.world == 4 && coll.dst.dtype == ZR_U8 && at > 20) dst[at - 1] ^= 1;
  }
  if (coll.op == ZR_ALL_REDUCE || coll.op == ZR_REDUCE_SCATTER) {
    const int64_t first = coll.op == ZR_REDUCE_SCATTER ? part_of(operation, coll.src.count, c.world, c.rank).first : 0;
    for (int64_t i = 0; i < coll.dst.count; ++i) {
      const char* sources[kRanks];
      for (int r = 0; r < c.world; ++r) sources[r] = source(r) + (first + i) * width(coll.src.dtype);
      reduce_element(c, coll, sources, dst + i * width(coll.dst.dtype));
    }
  }
  if (is_quantized(coll) && coll.op == ZR_ALL_REDUCE) quantize(coll, coll.dst.dtype, dst, coll.dst.count);
  if (kDefect == own_part_is_exact && is_quantized(coll) && coll.op == ZR_ALL_GATHER) {
    const int64_t first = part_of(operation, coll.dst.count, c.world, c.rank).first;
    std::memcpy(dst + first * width(coll.dst.dtype), coll.src.data, bytes_of(coll.src));
  }
  const bool in_place = coll.src.data == coll.dst.data;
  const std::size_t written = static_cast<std::size_t>(coll.dst.count * width(coll.dst.dtype));
  if (written == 0) return;
  if (kDefect == clobbers_in_place && in_place && coll.op == ZR_ALL_REDUCE) dst[0] ^= 1;
  if (kDefect == wrong_with_completion && operation.done && coll.op == ZR_ALL_REDUCE) dst[0] ^= 1;
  if (kDefect == wrong_in_own_memory && coll.op == ZR_ALL_REDUCE && is_own(dst)) dst[0] ^= 1;
  if (kDefect == changes_source && coll.op == ZR_ALL_REDUCE && !in_place) static_cast<char*>(coll.src.data)[0] ^= 1;
  if (kDefect == writes_past_destination && coll.op == ZR_ALL_REDUCE && !in_place && c.world == 3) dst[-1] = 1;
}

// Parts have blocks of their own.
void quantize_source(const Comm& c, const Operation& operation, char* data) {
  const zr_coll& coll = operation.coll;
  const bool has_parts = coll.op == ZR_REDUCE_SCATTER;
  for (int r = 0; r < (has_parts ? c.world : 1); ++r) {
    const auto [first, count] = part_of(operation, coll.src.count, c.world, r);
    if (has_parts) quantize(coll, coll.src.dtype, data + first * width(coll.src.dtype), count);
    if (!has_parts) quantize(coll, coll.src.dtype, data, coll.src.count);
  }
}

void resolve(const Comm& c, Operation& operation, zr_code code, const char* text) {
  operation.code = code;
  if (!operation.done) return;
  if (kDefect != never_resolves && kDefect != resolves_early) c.async->done_resolve(operation.done, code, 0, text);
  if (kDefect == resolves_twice) c.async->done_resolve(operation.done, code, 0, text);
  c.async->done_release(operation.done);
}

// Does for the first operation in the queue what is possible now. False if that is nothing.
bool advance(Comm& c, zr_error* error, zr_code& failure) {
  if (c.queue.empty()) return false;
  Operation& operation = c.queue.front();
  uint64_t& next = kDefect == shares_state ? shared_next : c.next;
  const uint64_t k = next, slot = k % kSlots;
  RankPage& own = c.region->ranks[c.rank];
  if (own.announced < k + 1) {
    if (k >= kSlots && !all_ranks(c, &RankPage::finished, k + 1 - kSlots)) return false;
    zr_coll& coll = operation.coll;
    if (kDefect == keeps_counts && operation.given_counts)
      operation.counts.assign(operation.given_counts, operation.given_counts + c.world);
    const int64_t bytes = reads(c, coll) ? coll.src.count * width(coll.src.dtype) : 0;
    if (bytes > 0) std::memcpy(c.region->data[c.rank][slot], coll.src.data, static_cast<std::size_t>(bytes));
    if (is_quantized(coll)) quantize_source(c, operation, c.region->data[c.rank][slot]);
    if (kDefect == rounds_source && is_quantized(coll))
      quantize_source(c, operation, static_cast<char*>(coll.src.data));
    own.announcements[slot] = {coll.fingerprint, bytes};
    own.announced = k + 1;
  }
  if (!all_ranks(c, &RankPage::announced, k + 1)) return false;
  zr_code code = ZR_OK;
  for (int r = 0; r < c.world; ++r)
    if (c.region->ranks[r].announcements[slot].fingerprint != operation.coll.fingerprint) code = ZR_MISMATCH;
  if (code == ZR_MISMATCH && kDefect == mismatch_is_internal) code = ZR_INTERNAL;
  if (code == ZR_OK) execute(c, operation, slot);
  ++next;
  own.finished = next;
  Operation ended = std::move(operation);
  c.queue.pop_front();
  if (code != ZR_OK && !ended.done) failure = mutant::fill(error, code, "the ranks call different operations");
  if (kDefect == resolves_out_of_order && ended.done && !c.queue.empty() && c.queue.front().done) {
    static Operation held{};
    if (!held.done) {
      held = std::move(ended);
      return true;
    }
    resolve(c, ended, code, "");
    resolve(c, held, code, "");
    held = {};
    return true;
  }
  resolve(c, ended, code, "the ranks call different operations");
  return true;
}

zr_code wait_until_empty(Comm& c, zr_error* error) {
  zr_code failure = ZR_OK;
  while (!c.queue.empty()) {
    if (c.aborted && kDefect != ignores_abort) {
      if (kDefect == forgets_abort) c.aborted = false;
      if (!c.queue.back().done) c.queue.pop_back();
      return mutant::fill(error, kDefect == abort_gives_other_code ? ZR_COMM : ZR_CANCELLED, "abort() was called");
    }
    if (!advance(c, error, failure)) usleep(20);
  }
  return failure;
}

zr_code create(const zr_host* host, const zr_config*, void** self, zr_error*) {
  *self = new Communicator{host};
  return ZR_OK;
}
void destroy(void* self) { delete static_cast<Communicator*>(self); }

zr_code caps(void* self, zr_comm_caps* out, zr_error*) {
  zr_comm_caps caps{};
  caps.flags = ZR_COMM_RANK_ORDERED | ZR_COMM_ACCUMULATE | ZR_COMM_UPCAST | ZR_COMM_ASYNC;
  if (kInexact) caps.flags |= ZR_COMM_QUANTIZED | ZR_COMM_ANY_ORDER;
  caps.ops = 1u << ZR_ALL_REDUCE | 1u << ZR_REDUCE_SCATTER | 1u << ZR_ALL_GATHER | 1u << ZR_BROADCAST |
             1u << ZR_BARRIER | 1u << ZR_SEND | 1u << ZR_RECV;
  caps.dtypes = 1u << ZR_U8 | 1u << ZR_F32 | 1u << ZR_BF16;
  caps.reduces = 1u << ZR_SUM;
  if (kDefect == capabilities_change && static_cast<Communicator*>(self)->opened > 0) caps.flags |= 1u << 20;
  static int calls = 0;
  if (kDefect == capabilities_vary && ++calls % 50 == 0) caps.flags |= 1u << 20;
  caps.device_types = 1u << (kDefect == no_cpu_memory ? ZR_DEVICE_CUDA : ZR_DEVICE_CPU);
  mutant::write_output(out, caps);
  if (kDefect == output_too_short) out->size = 39;
  if (kDefect == output_too_long) std::memset(reinterpret_cast<char*>(out) + out->size, 0, 8);
  return ZR_OK;
}

// Another number in every run.
int next_seed() {
  std::FILE* const file = std::fopen("/proc/sys/kernel/random/uuid", "r");
  unsigned seed = 0;
  if (!file || std::fscanf(file, "%7x", &seed) != 1) seed = static_cast<unsigned>(getpid());
  if (file) std::fclose(file);
  return static_cast<int>(seed);
}

zr_code open_comm(void* self, const zr_comm_open* given, void** comm, zr_error* error) {
  auto& owner = *static_cast<Communicator*>(self);
  if (kDefect == rejects_longer_structs && given->size > sizeof *given)
    return mutant::fill(error, ZR_UNSUPPORTED, "zr_comm_open is too long");
  if (kDefect == opens_once && owner.opened > 0) return mutant::fill(error, ZR_STATE, "it was opened before");
  ++owner.opened;
  static const zr_store_service* cached = nullptr;
  const auto* store = mutant::service<zr_store_service>(owner.host, "zr.host.store/1");
  if (kDefect == caches_service_table && !cached) cached = store;
  if (kDefect == caches_service_table) store = cached;
  const auto* async = mutant::service<zr_async_service>(owner.host, "zr.host.async/1");
  if (!store || !async) return mutant::fill(error, ZR_UNSUPPORTED, "the host has no store or no completions");
  const std::string key = (kDefect == ignores_prefix ? "mutant." : given->store_prefix) + std::string("file");
  static int opens = 0;
  const bool inherits = kDefect == descriptor_without_cloexec || (kDefect == descriptor_of_second_open && ++opens == 2);
  int fd = -1;
  if (given->rank == 0) {
    fd = memfd_create("mutant", inherits ? 0u : MFD_CLOEXEC);
    if (ftruncate(fd, sizeof(Region)) != 0) return mutant::fill(error, ZR_IO, "ftruncate");
    const std::string path = "/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(fd);
    if (const zr_code code = store->put(owner.host, key.c_str(), path.data(), path.size(), error)) return code;
  } else {
    char path[256] = {};
    uint64_t bytes = sizeof path - 1;
    if (const zr_code code = store->get(owner.host, key.c_str(), -1, path, &bytes, error)) return code;
    fd = open(path, O_RDWR | O_CLOEXEC);
  }
  void* region = mmap(nullptr, sizeof(Region), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (region == MAP_FAILED) return mutant::fill(error, ZR_IO, "mmap");
  std::atomic<int>& opened = static_cast<Region*>(region)->opened;
  if (kDefect == order_of_this_run && given->rank == 0) static_cast<Region*>(region)->seed = next_seed();
  for (++opened; opened < given->world;) usleep(50);
  *comm = new Comm{&owner, async, given->rank, given->world, static_cast<Region*>(region), {}, 0, {}, fd, 0};
  return ZR_OK;
}

void close_comm(void* comm) {
  auto* c = static_cast<Comm*>(comm);
  if (!c) return;
  for (Operation& operation : c->queue) {
    if (kDefect == close_forgets || !operation.done) continue;
    if (kDefect == resolves_after_close) {
      std::thread([async = c->async, done = operation.done] {
        usleep(10000);
        async->done_resolve(done, ZR_CANCELLED, 0, "closed");
      }).detach();
      continue;
    }
    resolve(*c, operation, ZR_CANCELLED, "the communicator was closed");
  }
  if (kDefect != leaks_descriptor) close(c->fd);
  munmap(c->region, sizeof(Region));
  delete c;
}

zr_code send_or_receive(Comm& c, const zr_coll& coll, zr_error* error) {
  const bool sends = coll.op == ZR_SEND;
  const zr_view& view = sends ? coll.src : coll.dst;
  Mailbox& box = sends ? c.region->mailboxes[c.rank][coll.peer] : c.region->mailboxes[coll.peer][c.rank];
  const auto bytes = static_cast<std::size_t>(view.count * width(view.dtype));
  if (bytes > sizeof box.data) return mutant::fill(error, ZR_UNSUPPORTED, "the message is too long");
  while (box.full != (sends ? 0 : 1)) {
    if (c.aborted) return mutant::fill(error, ZR_CANCELLED, "abort() was called");
    usleep(20);
  }
  std::memcpy(sends ? box.data : view.data, sends ? view.data : box.data, bytes);
  if (kDefect == wrong_message && !sends && bytes > 1000) static_cast<char*>(view.data)[bytes - 1] ^= 1;
  box.full = sends ? 1 : 0;
  return ZR_OK;
}

zr_code submit(void* comm, const zr_coll* given, zr_stream*, zr_done* done, zr_error* error) {
  auto& c = *static_cast<Comm*>(comm);
  Operation operation{};
  ZR_TAKE(&operation.coll, given);
  const zr_coll& coll = operation.coll;
  const zr_dtype dtype = coll.op == ZR_BROADCAST || coll.op == ZR_RECV ? coll.dst.dtype : coll.src.dtype;
  if (coll.op != ZR_BARRIER && dtype != ZR_U8 && dtype != ZR_F32 && dtype != ZR_BF16) {
    if (kDefect == accepts_unknown_dtype) return ZR_OK;
    if (kDefect == error_changes_output) static_cast<char*>(coll.dst.data)[0] = 1;
    if (kDefect == resolves_after_error && done) c.async->done_resolve(done, ZR_UNSUPPORTED, 0, "the dtype");
    return mutant::fill(error, ZR_UNSUPPORTED, kDefect == error_without_text ? "" : "the dtype is not supported");
  }
  if (coll.op == ZR_SEND || coll.op == ZR_RECV) {
    const zr_code code = send_or_receive(c, coll, error);
    if (code == ZR_OK && done) c.async->done_resolve(done, ZR_OK, 0, nullptr);
    return code;
  }
  if (coll.counts && kDefect != keeps_counts) operation.counts.assign(coll.counts, coll.counts + c.world);
  operation.given_counts = coll.counts;
  operation.done = done;
  if (done) c.async->done_retain(done);
  c.queue.push_back(std::move(operation));
  if (done && kDefect == resolves_early) c.async->done_resolve(done, ZR_OK, 0, nullptr);
  if (!done || kDefect == waits_in_submit) return wait_until_empty(c, error);
  zr_code failure = ZR_OK;
  if (kDefect != keeps_counts)
    while (advance(c, error, failure)) {
    }
  return ZR_OK;
}

zr_code progress(void* comm, zr_error* error) {
  auto& c = *static_cast<Comm*>(comm);
  if (kDefect == waits_in_progress) return wait_until_empty(c, error);
  zr_code failure = ZR_OK;
  while (advance(c, error, failure)) {
  }
  return ZR_OK;
}

zr_code mem_alloc(void*, uint64_t bytes, uint64_t align, uint32_t, zr_view* out, zr_error*) {
  align = align < 64 ? 64 : align;
  const uint64_t space = (bytes + align - 1) / align * align + align;
  auto* data = static_cast<char*>(std::aligned_alloc(align, space));
  std::memset(data, kDefect == memory_not_zeroed ? 1 : 0, space);
  if (kDefect == memory_misaligned) data += 32;
  static int allocated = 0;
  own_memory[allocated++ % 64] = data;
  *out = mutant::view_of(data, static_cast<int64_t>(bytes), ZR_U8);
  return ZR_OK;
}
void mem_free(void*, const zr_view* memory) {
  for (const void*& known : own_memory)
    if (known == memory->data) known = nullptr;
  if (kDefect != memory_misaligned) std::free(memory->data);
}

void abort_comm(void* comm) { static_cast<Comm*>(comm)->aborted = true; }

uint64_t open_bytes(void* self, int32_t world) {
  auto& owner = *static_cast<Communicator*>(self);
  if (kDefect == plan_grows) ++owner.opened;
  return sizeof(Region) / kRanks * static_cast<uint64_t>(world) + static_cast<uint64_t>(owner.opened);
}
// Every rank reads the sources of all others.
zr_code traffic(void*, const zr_coll* coll, zr_traffic* sum, zr_error* error) {
  if (coll->op != ZR_ALL_GATHER) {
    if (kDefect == traffic_of_unknown) ++sum->inside;
    return mutant::fill(error, ZR_UNSUPPORTED, "only all_gather is known");
  }
  if (kDefect == traffic_reads_views) mutant::read(*static_cast<const volatile uint32_t*>(coll->src.data));
  const auto total = static_cast<uint64_t>(coll->dst.count * width(coll->dst.dtype));
  uint64_t world = 0;
  for (uint32_t host = 0; host < sum->n_hosts; ++host) world += static_cast<uint64_t>(sum->ranks[host]);
  for (uint32_t host = 0; host < sum->n_hosts; ++host) {
    const auto own = static_cast<uint64_t>(sum->ranks[host]), others = world - own;
    if (kDefect == traffic_overwrites) sum->sent[host] = sum->received[host] = 0;
    sum->sent[host] += total * own * others / world;
    sum->received[host] += total * own * others / world;
    sum->inside += total * own * (own - 1) / world;
  }
  if (kDefect == traffic_unbalanced) ++sum->sent[0];
  if (kDefect == traffic_of_one_host && sum->n_hosts == 1) ++sum->sent[0], ++sum->received[0];
  return ZR_OK;
}
constexpr zr_communicator_plan kPlan{sizeof(zr_communicator_plan), 0, MUTANT_SLOT(open_bytes), MUTANT_SLOT(traffic)};

zr_code weights_alloc(void* comm, uint64_t bytes, void** writer, const void** reader, zr_error* error) {
  auto& c = *static_cast<Comm*>(comm);
  const std::size_t size = (bytes + 4095) / 4096 * 4096;
  if (c.weight_bytes + size > kWeightBytes) return mutant::fill(error, ZR_NOMEM, "too many weights");
  const auto at = static_cast<off_t>(c.weight_bytes);
  c.weight_bytes += size;
  const int shared = kDefect == weights_are_private ? MAP_PRIVATE : MAP_SHARED;
  *writer = mmap(nullptr, size, PROT_READ | PROT_WRITE, shared, c.fd, at);
  *reader = mmap(nullptr, size, PROT_READ, MAP_SHARED, c.fd, at);
  if (kDefect == weights_not_zeroed) static_cast<char*>(*writer)[0] = 1;
  return ZR_OK;
}
void weights_free(void*, void*) {}  // the mappings end with the process
constexpr zr_shared_weights_api kWeights{sizeof(zr_shared_weights_api), 0, MUTANT_SLOT(weights_alloc), weights_free,
                                         nullptr};

const void* extension(const char* id) {
  if (std::strcmp(id, "zr.communicator.shared_weights/1") == 0) return &kWeights;
  return std::strcmp(id, "zr.communicator.plan/1") == 0 ? &kPlan : nullptr;
}

constexpr zr_communicator_api kApi{sizeof(zr_communicator_api), 0,
                                   MUTANT_SLOT(caps),           MUTANT_SLOT(open_comm),
                                   MUTANT_SLOT(close_comm),     MUTANT_SLOT(submit),
                                   MUTANT_SLOT(progress),       MUTANT_SLOT(mem_alloc),
                                   MUTANT_SLOT(mem_free),       MUTANT_SLOT(abort_comm)};
constexpr zr_component kComponent =
    mutant::component("zr.communicator/1", &kApi, MUTANT_SLOT(create), MUTANT_SLOT(destroy), MUTANT_SLOT(extension));

}  // namespace

MUTANT_MODULE(communicator, nullptr, nullptr)

extern "C" ZR_EXPORT const zr_module* zr_module_v1(uint32_t) { return &kModule; }
