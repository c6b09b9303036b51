// ZR-T..: offload tiers.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <map>
#include <string>
#include <thread>

#include "conform/library.hpp"
#include "conform/rule.hpp"
#include "conform/use.hpp"
#include "zr/abi/offload.h"

namespace zr::host::conform {

namespace {

constexpr double kTransferSeconds = 5;
enum class Kind { write, read };

// A tier and its allocations.
class Tier {
 public:
  Tier(Instance& instance, const Mode& mode) : instance_(instance), mode_(mode), api_(instance.api<zr_offload_api>()) {}

  zr_offload_caps caps() const {
    Loan loan(mode_);
    zr_offload_caps* out = loan.sized(zr_offload_caps{});
    must("caps()", [&](zr_error* error) { return api_.caps(instance_.self(), out, error); });
    zr_offload_caps copy;
    ZR_TAKE(&copy, out);
    return copy;
  }
  void open() {
    must("open()", [&](zr_error* error) { return api_.open(instance_.self(), error); });
    align_ = std::max<uint64_t>(caps().io_align, 1);
  }
  uint64_t align() const { return align_; }
  /// `bytes` rounded up to whole units of transfers.
  uint64_t whole(uint64_t bytes) const { return (std::max<uint64_t>(bytes, 1) + align_ - 1) / align_ * align_; }
  Answer try_reserve(uint64_t bytes, uint64_t* id) const {
    Loan loan(mode_);
    const char* tag = loan.text("masters");
    return call("reserve()", [&](zr_error* error) { return api_.reserve(instance_.self(), bytes, tag, id, error); });
  }
  uint64_t reserve(uint64_t bytes) const {
    uint64_t id = ~uint64_t{0};
    if (const Answer answer = try_reserve(bytes, &id); !answer.ok()) fail("reserve(", bytes, ") ", answer.said());
    return id;
  }
  void release(uint64_t id) const {
    call_void("release()", [&] { api_.release(instance_.self(), id); });
  }
  Answer try_transfer(Kind kind, const std::vector<zr_transfer>& transfers, Completion* done = nullptr) const {
    Loan loan(mode_);
    const zr_transfer* list = loan.list(transfers);
    const auto function = kind == Kind::write ? api_.write : api_.read;
    return call(kind == Kind::write ? "write()" : "read()", [&](zr_error* error) {
      return function(instance_.self(), list, static_cast<uint32_t>(transfers.size()), nullptr,
                      done ? done->abi() : nullptr, error);
    });
  }
  void transfer(Kind kind, const std::vector<zr_transfer>& transfers) const {
    if (const Answer answer = try_transfer(kind, transfers); !answer.ok())
      fail(kind == Kind::write ? "write() " : "read() ", answer.said());
  }
  /// Starts transfers with a completion.
  Completion& start(Kind kind, const std::vector<zr_transfer>& transfers) const {
    Completion& done = instance_.host().new_completion();
    if (const Answer answer = try_transfer(kind, transfers, &done); !answer.ok())
      fail(kind == Kind::write ? "write() " : "read() ", answer.said());
    return done;
  }
  /// Waits for a completion, which must be resolved with ZR_OK.
  void finish(Completion& done) const {
    require(instance_.host().wait(done, kTransferSeconds), "a transfer with a completion never resolves it");
    require(done.code() == ZR_OK, "a transfer was resolved with ", code_text(done.code()), ": ", done.text());
  }
  void transfer_later(Kind kind, const std::vector<zr_transfer>& transfers) const { finish(start(kind, transfers)); }
  const zr_offload_api& api() const { return api_; }
  Instance& instance() const { return instance_; }

 private:
  Instance& instance_;
  Mode mode_;
  const zr_offload_api& api_;
  uint64_t align_ = 1;
};

struct OpenTier {
  explicit OpenTier(Case& test) : instance(test, host), tier(instance, {}) { tier.open(); }
  TestHost host;
  Instance instance;
  Tier tier;
};

// Memory that a transfer can use, filled with random bytes.
Array filled(const Tier& tier, uint64_t bytes, std::mt19937_64& random) {
  Array memory(bytes, std::max<std::size_t>(tier.align(), 64));
  for (std::size_t i = 0; i < bytes; ++i) memory.data()[i] = static_cast<char>(random());
  return memory;
}
zr_transfer transfer_of(uint64_t id, uint64_t offset, const Array& memory) {
  return {id, offset, view_of(memory.data(), static_cast<int64_t>(memory.size()), ZR_U8)};
}

uint64_t resident_bytes() {
  uint64_t all = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> all >> resident;
  return resident * static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
}

std::string text_of(const zr_offload_caps& caps) {
  return concat("flags ", caps.flags, ", io_align ", caps.io_align, ", io_bytes ", caps.io_bytes, ", io_depth ",
                caps.io_depth, ", device_types ", caps.device_types);
}

void capabilities_are_valid(Case& test) {
  TestHost host;
  Instance instance(test, host);
  Tier tier(instance, {});
  const zr_offload_caps before = tier.caps();
  require(before.io_align <= uint64_t{2} << 20 && (before.io_align & (before.io_align - 1)) == 0, "io_align is ",
          before.io_align, ", not a power of two up to 2 MiB");
  require(before.device_types & (1u << ZR_DEVICE_CPU), "device_types is ", before.device_types, ", without CPU memory");
  const bool maps = before.flags & ZR_TIER_MAPPABLE;
  require(!maps || (tier.api().map && tier.api().unmap), "flags has ZR_TIER_MAPPABLE, but map or unmap is NULL");
  const auto require_same = [&](const char* when) {
    for (int i = 0; i < 100; ++i) {
      const std::string now = text_of(tier.caps());
      require(now == text_of(before), "caps() was ", text_of(before), " at first, and is ", now, " ", when);
    }
  };
  require_same("before open()");
  tier.open();
  require_same("after open()");
  const uint64_t id = tier.reserve(tier.whole(4096));
  require_same("after reserve()");
  tier.release(id);
  require_same("after release()");
}

// Blocks whose offsets have equal low bits.
void bytes_at_large_offsets(const Tier& tier, std::mt19937_64& random) {
  constexpr std::array<uint64_t, 4> kOffsets{0, uint64_t{1} << 16, uint64_t{1} << 20, uint64_t{1} << 24};
  const uint64_t bytes = tier.whole(5000), all = tier.whole(kOffsets.back() + bytes);
  if (const uint64_t capacity = tier.caps().capacity; capacity != 0 && capacity < all) return;
  const uint64_t id = tier.reserve(all);
  const auto offset_of = [&](uint64_t offset) { return offset / tier.align() * tier.align(); };
  std::vector<std::string> contents;
  for (const uint64_t offset : kOffsets) {
    const Array written = filled(tier, bytes, random);
    tier.transfer(Kind::write, {transfer_of(id, offset_of(offset), written)});
    contents.push_back(written.content());
  }
  const Array read = filled(tier, bytes, random);
  for (std::size_t i = 0; i < kOffsets.size(); ++i) {
    tier.transfer(Kind::read, {transfer_of(id, offset_of(kOffsets[i]), read)});
    require(read.content() == contents[i], "a read at offset ", offset_of(kOffsets[i]), " of an allocation of ", all,
            " bytes gives other bytes");
  }
  tier.release(id);
}

void bytes_come_back(Case& test) {
  OpenTier open(test);
  Tier& tier = open.tier;
  std::mt19937_64 random = test.random();
  for (const uint64_t size : {uint64_t{1}, uint64_t{100}, uint64_t{4096}, uint64_t{70000}, uint64_t{3} << 20}) {
    const uint64_t bytes = tier.whole(size), id = tier.reserve(bytes);
    test.note("transferring ", bytes, " bytes");
    const Array written = filled(tier, bytes, random), read = filled(tier, bytes, random);
    tier.transfer(Kind::write, {transfer_of(id, 0, written)});
    tier.transfer(Kind::read, {transfer_of(id, 0, read)});
    require(read.content() == written.content(), "the ", bytes, " bytes that were read differ from those written");
    // A part, at an offset.
    const uint64_t units = bytes / tier.align(), first = random() % units * tier.align();
    const uint64_t part_bytes = (1 + random() % (units - first / tier.align())) * tier.align();
    const Array part = filled(tier, part_bytes, random), again = filled(tier, part_bytes, random);
    tier.transfer(Kind::write, {transfer_of(id, first, part)});
    std::string expected = written.content();
    expected.replace(first, part_bytes, part.content());
    tier.transfer(Kind::read, {transfer_of(id, 0, read)});
    require(read.content() == expected, "after ", part_bytes, " bytes were written at offset ", first,
            " of an allocation of ", bytes, " bytes, other bytes are read");
    tier.transfer(Kind::read, {transfer_of(id, first, again)});
    require(again.content() == part.content(), "a read of ", part_bytes, " bytes at offset ", first,
            " gives other bytes");
    // Zeros in place of other bytes.
    const Array zeros(part_bytes, std::max<std::size_t>(tier.align(), 64));
    std::memset(zeros.data(), 0, part_bytes);
    tier.transfer(Kind::write, {transfer_of(id, first, zeros)});
    tier.transfer(Kind::read, {transfer_of(id, first, again)});
    require(again.content() == zeros.content(), "after ", part_bytes, " zeros were written, other bytes are read");
    tier.release(id);
  }
  bytes_at_large_offsets(tier, random);
}

void many_transfers_in_a_call(Case& test) {
  OpenTier open(test);
  Tier& tier = open.tier;
  std::mt19937_64 random = test.random();
  constexpr uint64_t kTransfers = 200;
  const uint64_t unit = tier.whole(5000);
  std::vector<Array> written, read;
  std::vector<zr_transfer> writes, reads;
  std::vector<uint64_t> ids;
  for (int i = 0; i < 4; ++i) ids.push_back(tier.reserve(unit * kTransfers / 4));
  for (uint64_t i = 0; i < kTransfers; ++i) {
    written.push_back(filled(tier, unit, random));
    read.push_back(filled(tier, unit, random));
    writes.push_back(transfer_of(ids[i % 4], i / 4 * unit, written.back()));
    reads.push_back(transfer_of(ids[i % 4], i / 4 * unit, read.back()));
  }
  tier.transfer(Kind::write, writes);
  std::reverse(reads.begin(), reads.end());
  tier.transfer(Kind::read, reads);
  for (std::size_t i = 0; i < kTransfers; ++i)
    require(read[i].content() == written[i].content(), "transfer ", i, " of ", kTransfers,
            " in one call gives other bytes");
}

void touches_only_its_memory(Case& test) {
  OpenTier open(test);
  Tier& tier = open.tier;
  std::mt19937_64 random = test.random();
  for (const uint64_t size : {uint64_t{64}, uint64_t{12288}, uint64_t{1} << 20}) {
    const uint64_t bytes = tier.whole(size), id = tier.reserve(bytes);
    const Array written = filled(tier, bytes, random), read = filled(tier, bytes, random);
    written.make_read_only();
    test.note("writing memory that is read-only");
    tier.transfer(Kind::write, {transfer_of(id, 0, written)});
    tier.transfer(Kind::read, {transfer_of(id, 0, read)});
    require(read.surroundings_are_intact(), "read() wrote outside its memory");
    tier.release(id);
  }
}

void neighbours_stay(Case& test) {
  OpenTier open(test);
  Tier& tier = open.tier;
  std::mt19937_64 random = test.random();
  const uint64_t bytes = tier.whole(10000);
  std::map<uint64_t, std::string> contents;
  for (int round = 0; round < 60; ++round) {
    if (contents.size() > 8 || (contents.size() > 2 && random() % 3 == 0)) {
      auto victim = std::next(contents.begin(), static_cast<long>(random() % contents.size()));
      tier.release(victim->first);
      contents.erase(victim);
    }
    const uint64_t id = tier.reserve(bytes);
    require(!contents.count(id), "reserve() returned the id of an allocation that is not released");
    const Array memory = filled(tier, bytes, random);
    tier.transfer(Kind::write, {transfer_of(id, 0, memory)});
    contents[id] = memory.content();
    for (const auto& [known, content] : contents) {
      const Array read(bytes, std::max<std::size_t>(tier.align(), 64));
      tier.transfer(Kind::read, {transfer_of(known, 0, read)});
      require(read.content() == content, "an allocation changed when another one was reserved, written or released");
    }
  }
}

// Transfers of one call: consecutive blocks of an allocation, to be written from and read into memory of their own.
struct Batch {
  Batch(const Tier& tier, uint64_t id, uint64_t offset, uint64_t n, uint64_t bytes, std::mt19937_64& random) {
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
  Tier& tier = open.tier;
  std::mt19937_64 random = test.random();
  constexpr uint64_t kCalls = 6, kTransfers = 4;
  const uint64_t bytes = tier.whole(200000), id = tier.reserve(bytes * kCalls * kTransfers);
  for (const uint64_t transfers : {1, 1, 8, 8}) {
    const Batch batch(tier, id, 0, transfers, bytes, random);
    test.note("waiting for the completion of a write");
    tier.transfer_later(Kind::write, batch.writes);
    test.note("waiting for the completion of a read");
    tier.transfer_later(Kind::read, batch.reads);
    require(batch.is_equal(), "a transfer is not complete when its completion is resolved");
  }
  // Several calls in flight.
  std::vector<Batch> batches;
  for (uint64_t call = 0; call < kCalls; ++call)
    batches.emplace_back(tier, id, call * kTransfers * bytes, kTransfers, bytes, random);
  for (const Kind kind : {Kind::write, Kind::read}) {
    test.note("waiting for the completions of ", kCalls, " calls in flight");
    std::vector<Completion*> started;
    for (const Batch& batch : batches)
      started.push_back(&tier.start(kind, kind == Kind::write ? batch.writes : batch.reads));
    for (Completion* done : started) tier.finish(*done);
  }
  for (const Batch& batch : batches)
    require(batch.is_equal(), "with ", kCalls, " calls in flight, reads give other bytes than were written");
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  open.instance.check_host();
}

void calls_at_once(Case& test) {
  OpenTier open(test);
  Tier& tier = open.tier;
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
          tier.transfer(Kind::write, batch.writes);
          tier.transfer(Kind::read, batch.reads);
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
  Tier& tier = open.tier;
  std::mt19937_64 random = test.random();
  const uint64_t bytes = tier.whole(8192), id = tier.reserve(bytes);
  constexpr uint64_t kUnknown = 0x7eadbeef12345;
  const uint64_t allocation = tier.reserve(bytes);  // of the transfer that fails
  const struct {
    const char* what;
    uint64_t id, offset;
    Kind kind;
  } failures[] = {{"of an unknown allocation", kUnknown, 0, Kind::read},
                  {"past the end of its allocation", allocation, tier.whole(4096), Kind::read},
                  {"past the end of its allocation", allocation, tier.whole(4096), Kind::write},
                  {"whose end exceeds 2^64", allocation, ~uint64_t{0} / bytes * bytes, Kind::read}};
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
  Tier& tier = open.tier;
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
  tier.transfer(Kind::write, {transfer_of(small, 0, written)});
  tier.transfer(Kind::read, {transfer_of(small, 0, read)});
  require(read.content() == written.content(), "the tier gives other bytes after a reserve() that failed");
}

// Reserves more than the capacity in all, but not at once. Only if the capacity is known and small.
void fill_to_capacity(Case& test, const Tier& tier) {
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
  Tier& tier = open.tier;
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
  Tier& tier = open.tier;
  if (!(tier.caps().flags & ZR_TIER_MAPPABLE)) skip("the tier cannot map allocations (ZR_TIER_MAPPABLE)");
  std::mt19937_64 random = test.random();
  const uint64_t bytes = tier.whole(20000), id = tier.reserve(bytes), align = std::max<uint64_t>(tier.align(), 64);
  const Array written = filled(tier, bytes, random), read = filled(tier, bytes, random);
  tier.transfer(Kind::write, {transfer_of(id, 0, written)});
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
  tier.transfer(Kind::read, {transfer_of(id, 0, read)});
  require(read.content() == std::string(bytes, 0x17), "read() gives other bytes than those written through map()");
  map();
  call_void("unmap()", [&] { tier.api().unmap(open.instance.self(), id); });
}

void registered_memory_works(Case& test) {
  OpenTier open(test);
  Tier& tier = open.tier;
  if (!tier.api().reg) skip("the tier does not register memory (reg)");
  std::mt19937_64 random = test.random();
  const uint64_t bytes = tier.whole(100000), id = tier.reserve(bytes);
  for (int round = 0; round < 3; ++round) {
    const Array memory = filled(tier, bytes, random), read = filled(tier, bytes, random);
    const zr_view view = view_of(memory.data(), static_cast<int64_t>(bytes), ZR_U8);
    const Answer registered =
        call("reg()", [&](zr_error* error) { return tier.api().reg(open.instance.self(), &view, error); });
    tier.transfer(Kind::write, {transfer_of(id, 0, memory)});
    if (registered.ok()) call_void("unreg()", [&] { tier.api().unreg(open.instance.self(), &view); });
    tier.transfer(Kind::read, {transfer_of(id, 0, read)});
    require(read.content() == memory.content(), "transfers of registered memory give other bytes");
  }
}

constexpr Rule kRules[] = {
    {"ZR-T01", "offload", "caps() is valid before open(), has CPU memory, and changes only in `capacity`.",
     capabilities_are_valid},
    {"ZR-T02", "offload", "Bytes that are read are those last written, at any offset and length.", bytes_come_back},
    {"ZR-T03", "offload", "A call with many transfers does each of them.", many_transfers_in_a_call},
    {"ZR-T04", "offload", "Transfers write only what they are for: write() no memory, read() only its views.",
     touches_only_its_memory},
    {"ZR-T05", "offload", "Ids are unique, and an allocation keeps its content when others change.", neighbours_stay},
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

std::span<const Rule> offload_rules() { return kRules; }

void use_offload(Instance& instance, const Mode& mode) {
  Tier tier(instance, mode);
  tier.open();
  std::mt19937_64 random(1);
  const uint64_t bytes = tier.whole(50000), id = tier.reserve(bytes);
  const Array written = filled(tier, bytes, random), read = filled(tier, bytes, random);
  const auto transfer = [&](Kind kind, const Array& memory) {
    mode.withdraw_arguments ? tier.transfer_later(kind, {transfer_of(id, 0, memory)})
                            : tier.transfer(kind, {transfer_of(id, 0, memory)});
  };
  transfer(Kind::write, written);
  transfer(Kind::read, read);
  require(read.content() == written.content(), "the bytes that were read differ from those written");
  tier.release(id);
}

}  // namespace zr::host::conform
