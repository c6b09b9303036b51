// ZR-T06 and up: completions, errors, space, mapped and registered memory of tiers.
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <string>
#include <thread>

#include "conform/offload_tier.hpp"

namespace zr::conform {

namespace {

uint64_t resident_bytes() {
  uint64_t all = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> all >> resident;
  return resident * static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
}

// Transfers of one call: consecutive blocks of an allocation, to be written from and read into memory of their own.
struct Batch {
  Batch(const TestTier& tier, uint64_t id, uint64_t offset, uint64_t n, uint64_t bytes, std::mt19937_64& random) {
    for (uint64_t i = 0; i < n; ++i) {
      writes.push_back(transfer_of(id, offset + i * bytes, written.emplace_back(filled(tier, bytes, random))));
      reads.push_back(transfer_of(id, offset + i * bytes, read.emplace_back(filled(tier, bytes, random))));
    }
  }
  bool is_equal() const {
    return std::equal(written.begin(), written.end(), read.begin(),
                      [](const Array& one, const Array& other) { return one.content() == other.content(); });
  }
  std::vector<Array> written{}, read{};
  std::vector<zr_transfer> writes{}, reads{};
};

void completions_resolve_once(Case& test) {
  OpenTier open(test);
  TestTier& tier = open.tier;
  std::mt19937_64 random = test.random();
  constexpr uint64_t kCalls = 6, kTransfers = 4;
  const uint64_t bytes = tier.whole(200000), id = tier.reserve(bytes * kCalls * kTransfers);
  for (const uint64_t transfers : {1, 1, 8, 8}) {
    const Batch batch(tier, id, 0, transfers, bytes, random);
    test.note("waiting for the completion of a write");
    tier.transfer_later(TransferKind::write, batch.writes);
    test.note("waiting for the completion of a read");
    tier.transfer_later(TransferKind::read, batch.reads);
    require(batch.is_equal(), "a transfer is not complete when its completion is resolved");
  }
  // Several calls in flight.
  std::vector<Batch> batches;
  for (uint64_t call = 0; call < kCalls; ++call)
    batches.emplace_back(tier, id, call * kTransfers * bytes, kTransfers, bytes, random);
  for (const TransferKind kind : {TransferKind::write, TransferKind::read}) {
    test.note("waiting for the completions of ", kCalls, " calls in flight");
    std::vector<Completion*> started;
    for (const Batch& batch : batches)
      started.push_back(&tier.start(kind, kind == TransferKind::write ? batch.writes : batch.reads));
    for (Completion* done : started) tier.finish(*done);
  }
  for (const Batch& batch : batches)
    require(batch.is_equal(), "with ", kCalls, " calls in flight, reads give other bytes than were written");
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  open.instance.check_host();
}

void calls_at_once(Case& test) {
  OpenTier open(test);
  TestTier& tier = open.tier;
  constexpr uint64_t kThreads = 4, kTransfers = 6;
  const uint64_t bytes = tier.whole(60000), id = tier.reserve(bytes * kThreads * kTransfers);
  std::vector<std::string> problems(kThreads);
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < kThreads; ++t)
    threads.emplace_back([&, t] {
      try {
        std::mt19937_64 random = test.random(t + 1);
        for (int round = 0; round < 30; ++round) {
          const Batch batch(tier, id, t * bytes * kTransfers, round % 3 == 0 ? kTransfers : 1, bytes, random);
          tier.transfer(TransferKind::write, batch.writes);
          tier.transfer(TransferKind::read, batch.reads);
          require(batch.is_equal(), "calls of several threads at once mix their bytes");
        }
      } catch (const Failure& failure) {
        problems[t] = failure.reason;
      }
    });
  for (std::thread& thread : threads) thread.join();
  for (const std::string& problem : problems) require(problem.empty(), problem);
  open.instance.check_host();
}

void failed_transfer_has_its_index(Case& test) {
  OpenTier open(test);
  TestTier& tier = open.tier;
  std::mt19937_64 random = test.random();
  const uint64_t bytes = tier.whole(8192), id = tier.reserve(bytes);
  constexpr uint64_t kUnknown = 0x7eadbeef12345;
  const uint64_t allocation = tier.reserve(bytes);  // of the transfer that fails
  const struct {
    const char* what;
    uint64_t id, offset;
    TransferKind kind;
  } failures[] = {{"of an unknown allocation", kUnknown, 0, TransferKind::read},
                  {"past the end of its allocation", allocation, tier.whole(4096), TransferKind::read},
                  {"past the end of its allocation", allocation, tier.whole(4096), TransferKind::write},
                  {"whose end exceeds 2^64", allocation, ~uint64_t{0} / bytes * bytes, TransferKind::read}};
  bool resolves = true;  // else ZR-T06 is about it
  for (const auto& failure : failures)
    for (const int64_t index : {0, 2}) {
      std::vector<Array> memory;
      std::vector<zr_transfer> transfers;
      for (int64_t i = 0; i < 3; ++i) {
        memory.push_back(filled(tier, bytes, random));
        transfers.push_back(i == index ? transfer_of(failure.id, failure.offset, memory.back())
                                       : transfer_of(id, 0, memory.back()));
      }
      const Answer answer = tier.try_transfer(failure.kind, transfers);
      require(!answer.ok(), "a transfer ", failure.what, " succeeds");
      require(answer.code == ZR_INVALID, "a transfer ", failure.what, " ", answer.said(), "; expected ZR_INVALID");
      require(!answer.text.empty(), "a transfer ", failure.what, " fails without a text");
      require(answer.native == index, "native is ", answer.native, ", but transfer ", index, " of 3 failed");
      Completion& done = open.host.new_completion();
      const bool accepted = tier.try_transfer(failure.kind, transfers, &done).ok();
      if (!accepted) done.forbid();
      require(accepted || !done.is_resolved(), "a transfer failed, but resolved its completion");
      resolves = resolves && (!accepted || open.host.wait(done, kTransferSeconds));
      if (accepted && resolves)
        require(done.code() == ZR_INVALID && done.native() == index, "a transfer that fails later is resolved with ",
                code_text(done.code()), " and native ", done.native(), ", but transfer ", index, " of 3 failed");
    }
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  open.instance.check_host();
}

void full_tier_fails_in_reserve(Case& test) {
  OpenTier open(test);
  TestTier& tier = open.tier;
  constexpr uint64_t kTooMany = uint64_t{1} << 60, kMarker = 0x1234567;
  uint64_t id = kMarker;
  const Answer answer = tier.try_reserve(kTooMany, &id);
  require(!answer.ok(), "reserve() of 2^60 bytes succeeds");
  require(answer.code == ZR_NOMEM || answer.code == ZR_IO || answer.code == ZR_UNSUPPORTED || answer.code == ZR_INVALID,
          "reserve() of 2^60 bytes ", answer.said(), "; expected ZR_NOMEM or ZR_IO");
  require(!answer.text.empty(), "reserve() of 2^60 bytes fails without a text");
  require(id == kMarker, "reserve() failed, but changed *allocation");
  std::mt19937_64 random = test.random();
  const uint64_t bytes = tier.whole(4096), small = tier.reserve(bytes);
  const Array written = filled(tier, bytes, random), read = filled(tier, bytes, random);
  tier.transfer(TransferKind::write, {transfer_of(small, 0, written)});
  tier.transfer(TransferKind::read, {transfer_of(small, 0, read)});
  require(read.content() == written.content(), "the tier gives other bytes after a reserve() that failed");
}

// Reserves more than the capacity in all, but not at once. Only if the capacity is known and small.
void fill_to_capacity(Case& test, const TestTier& tier) {
  constexpr uint64_t kLargest = uint64_t{512} << 20;
  const uint64_t capacity = tier.caps().capacity, half = capacity / 2 / tier.align() * tier.align();
  if (capacity > kLargest || half == 0) return;
  test.note("reserving and releasing ", half, " bytes of a capacity of ", capacity, " bytes");
  for (int i = 0; i < 4; ++i) tier.release(tier.reserve(half));
  uint64_t id = 0;
  const uint64_t first = tier.reserve(half);
  if (tier.try_reserve(half + 2 * tier.align(), &id).ok()) tier.release(id);  // the capacity may be an estimate
  tier.release(first);
  tier.release(tier.reserve(half));
}

void released_space_is_reused(Case& test) {
  OpenTier open(test);
  TestTier& tier = open.tier;
  const uint64_t bytes = tier.whole(uint64_t{1} << 20);
  const auto cycle = [&](int n) {
    for (int i = 0; i < n; ++i) tier.release(tier.reserve(bytes));
  };
  cycle(4);
  const int64_t before = open.host.allocated_bytes();
  const uint64_t resident = resident_bytes();
  cycle(100);
  require(open.host.allocated_bytes() <= before, "release() leaves ", open.host.allocated_bytes() - before,
          " bytes of zr.host.memory/1 allocated");
  require(resident_bytes() < resident + 50 * bytes, "100 allocations that were released leave ",
          (resident_bytes() - resident) >> 20, " MiB of memory");
  uint64_t id = 0;
  for (int i = 0; i < 20; ++i)
    if (tier.try_reserve(uint64_t{1} << 60, &id).ok()) return;  // ZR-T09 is about that
  tier.release(tier.reserve(bytes));
  require(open.host.allocated_bytes() <= before, "a reserve() that fails leaves ", open.host.allocated_bytes() - before,
          " bytes of zr.host.memory/1 allocated");
  fill_to_capacity(test, tier);
}

void mapped_memory_is_the_content(Case& test) {
  OpenTier open(test);
  TestTier& tier = open.tier;
  if (!(tier.caps().flags & ZR_TIER_MAPPABLE)) skip("the tier cannot map allocations (ZR_TIER_MAPPABLE)");
  std::mt19937_64 random = test.random();
  const uint64_t bytes = tier.whole(20000), id = tier.reserve(bytes), align = std::max<uint64_t>(tier.align(), 64);
  const Array written = filled(tier, bytes, random), read = filled(tier, bytes, random);
  tier.transfer(TransferKind::write, {transfer_of(id, 0, written)});
  zr_view view{};
  const auto map = [&] {
    must("map()", [&](zr_error* error) { return tier.api().map(open.instance.self(), id, &view, error); });
  };
  map();
  require(view.data && view.dtype == ZR_U8 && view.count >= static_cast<int64_t>(bytes) && view.flags == 0 &&
              view.device.type == ZR_DEVICE_CPU,
          "map() returned no U8 view of CPU memory with all ", bytes, " bytes");
  require(reinterpret_cast<uintptr_t>(view.data) % align == 0, "the memory of map() is not aligned to ", align,
          " bytes");
  require(std::memcmp(view.data, written.data(), bytes) == 0, "map() shows other bytes than those written");
  std::memset(view.data, 0x17, bytes);
  call_void("unmap()", [&] { tier.api().unmap(open.instance.self(), id); });
  tier.transfer(TransferKind::read, {transfer_of(id, 0, read)});
  require(read.content() == std::string(bytes, 0x17), "read() gives other bytes than those written through map()");
  map();
  call_void("unmap()", [&] { tier.api().unmap(open.instance.self(), id); });
}

void registered_memory_works(Case& test) {
  OpenTier open(test);
  TestTier& tier = open.tier;
  if (!tier.api().reg) skip("the tier does not register memory (reg)");
  std::mt19937_64 random = test.random();
  const uint64_t bytes = tier.whole(100000), id = tier.reserve(bytes);
  for (int round = 0; round < 3; ++round) {
    const Array memory = filled(tier, bytes, random), read = filled(tier, bytes, random);
    const zr_view view = view_of(memory.data(), static_cast<int64_t>(bytes), ZR_U8);
    const Answer registered =
        call("reg()", [&](zr_error* error) { return tier.api().reg(open.instance.self(), &view, error); });
    tier.transfer(TransferKind::write, {transfer_of(id, 0, memory)});
    if (registered.ok()) call_void("unreg()", [&] { tier.api().unreg(open.instance.self(), &view); });
    tier.transfer(TransferKind::read, {transfer_of(id, 0, read)});
    require(read.content() == memory.content(), "transfers of registered memory give other bytes");
  }
}

constexpr Rule kRules[] = {
    {"ZR-T06", "offload", "A transfer with a completion resolves it exactly once, when it is complete.",
     completions_resolve_once},
    {"ZR-T07", "offload", "Several threads may call read() and write() at once.", calls_at_once},
    {"ZR-T08", "offload", "If a transfer fails, `native` is its index in the call, and the error has a text.",
     failed_transfer_has_its_index},
    {"ZR-T09", "offload", "A tier that is too small fails in reserve(), which leaves *allocation unchanged.",
     full_tier_fails_in_reserve},
    {"ZR-T10", "offload", "release() frees the space of an allocation, and a reserve() that fails takes none.",
     released_space_is_reused},
    {"ZR-T11", "offload", "map() shows an allocation's bytes, aligned to io_align and to 64 bytes.",
     mapped_memory_is_the_content},
    {"ZR-T12", "offload", "Transfers of memory that was announced with reg() give the same bytes.",
     registered_memory_works},
};

}  // namespace

std::span<const Rule> offload_completion_rules() { return kRules; }

}  // namespace zr::conform
