// ZR-T01 to T05: the capabilities of tiers, and the bytes that they store.
#include <algorithm>
#include <array>
#include <map>
#include <string>

#include "conform/offload_tier.hpp"

namespace zr::conform {

namespace {

std::string text_of(const zr_offload_caps& caps) {
  return concat("flags ", caps.flags, ", io_align ", caps.io_align, ", io_bytes ", caps.io_bytes, ", io_depth ",
                caps.io_depth, ", device_types ", caps.device_types);
}

void capabilities_are_valid(Case& test) {
  TestHost host;
  Instance instance(test, host);
  TestTier tier(instance, {});
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
void bytes_at_large_offsets(const TestTier& tier, std::mt19937_64& random) {
  constexpr std::array<uint64_t, 4> kOffsets{0, uint64_t{1} << 16, uint64_t{1} << 20, uint64_t{1} << 24};
  const uint64_t bytes = tier.whole(5000), all = tier.whole(kOffsets.back() + bytes);
  if (const uint64_t capacity = tier.caps().capacity; capacity != 0 && capacity < all) return;
  const uint64_t id = tier.reserve(all);
  const auto offset_of = [&](uint64_t offset) { return offset / tier.align() * tier.align(); };
  std::vector<std::string> contents;
  for (const uint64_t offset : kOffsets) {
    const Array written = filled(tier, bytes, random);
    tier.transfer(TransferKind::write, {transfer_of(id, offset_of(offset), written)});
    contents.push_back(written.content());
  }
  const Array read = filled(tier, bytes, random);
  for (std::size_t i = 0; i < kOffsets.size(); ++i) {
    tier.transfer(TransferKind::read, {transfer_of(id, offset_of(kOffsets[i]), read)});
    require(read.content() == contents[i], "a read at offset ", offset_of(kOffsets[i]), " of an allocation of ", all,
            " bytes gives other bytes");
  }
  tier.release(id);
}

void bytes_come_back(Case& test) {
  OpenTier open(test);
  TestTier& tier = open.tier;
  std::mt19937_64 random = test.random();
  for (const uint64_t size : {uint64_t{1}, uint64_t{100}, uint64_t{4096}, uint64_t{70000}, uint64_t{3} << 20}) {
    const uint64_t bytes = tier.whole(size), id = tier.reserve(bytes);
    test.note("transferring ", bytes, " bytes");
    const Array written = filled(tier, bytes, random), read = filled(tier, bytes, random);
    tier.transfer(TransferKind::write, {transfer_of(id, 0, written)});
    tier.transfer(TransferKind::read, {transfer_of(id, 0, read)});
    require(read.content() == written.content(), "the ", bytes, " bytes that were read differ from those written");
    // A part, at an offset.
    const uint64_t units = bytes / tier.align(), first = random() % units * tier.align();
    const uint64_t part_bytes = (1 + random() % (units - first / tier.align())) * tier.align();
    const Array part = filled(tier, part_bytes, random), again = filled(tier, part_bytes, random);
    tier.transfer(TransferKind::write, {transfer_of(id, first, part)});
    std::string expected = written.content();
    expected.replace(first, part_bytes, part.content());
    tier.transfer(TransferKind::read, {transfer_of(id, 0, read)});
    require(read.content() == expected, "after ", part_bytes, " bytes were written at offset ", first,
            " of an allocation of ", bytes, " bytes, other bytes are read");
    tier.transfer(TransferKind::read, {transfer_of(id, first, again)});
    require(again.content() == part.content(), "a read of ", part_bytes, " bytes at offset ", first,
            " gives other bytes");
    // Zeros in place of other bytes.
    const Array zeros(part_bytes, std::max<std::size_t>(tier.align(), 64));
    std::memset(zeros.data(), 0, part_bytes);
    tier.transfer(TransferKind::write, {transfer_of(id, first, zeros)});
    tier.transfer(TransferKind::read, {transfer_of(id, first, again)});
    require(again.content() == zeros.content(), "after ", part_bytes, " zeros were written, other bytes are read");
    tier.release(id);
  }
  bytes_at_large_offsets(tier, random);
}

void many_transfers_in_a_call(Case& test) {
  OpenTier open(test);
  TestTier& tier = open.tier;
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
  tier.transfer(TransferKind::write, writes);
  std::reverse(reads.begin(), reads.end());
  tier.transfer(TransferKind::read, reads);
  for (std::size_t i = 0; i < kTransfers; ++i)
    require(read[i].content() == written[i].content(), "transfer ", i, " of ", kTransfers,
            " in one call gives other bytes");
}

void touches_only_its_memory(Case& test) {
  OpenTier open(test);
  TestTier& tier = open.tier;
  std::mt19937_64 random = test.random();
  for (const uint64_t size : {uint64_t{64}, uint64_t{12288}, uint64_t{1} << 20}) {
    const uint64_t bytes = tier.whole(size), id = tier.reserve(bytes);
    const Array written = filled(tier, bytes, random), read = filled(tier, bytes, random);
    written.make_read_only();
    test.note("writing memory that is read-only");
    tier.transfer(TransferKind::write, {transfer_of(id, 0, written)});
    tier.transfer(TransferKind::read, {transfer_of(id, 0, read)});
    require(read.surroundings_are_intact(), "read() wrote outside its memory");
    tier.release(id);
  }
}

void neighbours_stay(Case& test) {
  OpenTier open(test);
  TestTier& tier = open.tier;
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
    tier.transfer(TransferKind::write, {transfer_of(id, 0, memory)});
    contents[id] = memory.content();
    for (const auto& [known, content] : contents) {
      const Array read(bytes, std::max<std::size_t>(tier.align(), 64));
      tier.transfer(TransferKind::read, {transfer_of(known, 0, read)});
      require(read.content() == content, "an allocation changed when another one was reserved, written or released");
    }
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
};

}  // namespace

std::span<const Rule> offload_rules() { return kRules; }

void use_offload(Instance& instance, const Mode& mode) {
  TestTier tier(instance, mode);
  tier.open();
  std::mt19937_64 random(1);
  const uint64_t bytes = tier.whole(50000), id = tier.reserve(bytes);
  const Array written = filled(tier, bytes, random), read = filled(tier, bytes, random);
  const auto transfer = [&](TransferKind kind, const Array& memory) {
    mode.withdraw_arguments ? tier.transfer_later(kind, {transfer_of(id, 0, memory)})
                            : tier.transfer(kind, {transfer_of(id, 0, memory)});
  };
  transfer(TransferKind::write, written);
  transfer(TransferKind::read, read);
  require(read.content() == written.content(), "the bytes that were read differ from those written");
  tier.release(id);
}

}  // namespace zr::conform
