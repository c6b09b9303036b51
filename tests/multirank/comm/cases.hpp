// The test cases that every communicator must pass, and a function that runs one of them on a rank and checks it.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "multirank/comm/reference.hpp"

namespace zr::testing {

inline constexpr const char* kNames[] = {"",       "all_reduce", "reduce_scatter", "all_gather", "broadcast",
                                         "reduce", "gather",     "scatter",        "all_to_all"};

/// The memory of a rank's src and dst: shared with its peers, private, or a mixture that depends on the rank.
enum class Home { shared, own, mixed };

/// What a case needs: a communicator, and an allocator of memory that the peers can read.
struct Bench {
  int rank, world;
  std::function<void(const zr_coll&)> run;
  std::function<void*(int64_t bytes)> allocate;
  std::function<void(void*)> free;
};

/// Two buffers of `bytes` bytes each in shared memory and two in private memory.
class Memory {
 public:
  Memory(const Bench& bench, int64_t bytes)
      : bench_(bench),
        shared_(static_cast<char*>(bench.allocate(2 * bytes))),
        own_(static_cast<std::size_t>(2 * bytes)),
        bytes_(bytes) {}
  ~Memory() { bench_.free(shared_); }
  Memory(const Memory&) = delete;
  char* at(Home home, int which) {
    const bool shared = home == Home::shared || (home == Home::mixed && (bench_.rank + which) % 2 == 0);
    return (shared ? shared_ : own_.data()) + which * bytes_;
  }

 private:
  const Bench& bench_;
  char* shared_;
  std::vector<char> own_;
  int64_t bytes_;
};

inline std::string text_of(const Case& c, Home home) {
  return std::string(kNames[c.op]) + " of dtype " + std::to_string(c.src) + " to " + std::to_string(c.dst) + ", " +
         std::to_string(c.world) + " ranks, root " + std::to_string(c.root) + ", reduce " + std::to_string(c.reduce) +
         ", flags " + std::to_string(c.flags) + ", total " + std::to_string(c.total) + ", part " +
         std::to_string(c.part) + ", counts " + std::to_string(c.counts.size()) + (c.in_place ? ", in place" : "") +
         ", home " + std::to_string(static_cast<int>(home));
}

/// The arguments of a rank, except the counts of an all_to_all. Valid as long as the case.
inline zr_coll coll_of(const Case& c, int rank, void* src, void* dst, uint64_t fingerprint) {
  zr_coll coll{};
  coll.size = sizeof coll;
  coll.op = c.op;
  coll.reduce = c.reduce;
  coll.flags = c.flags;
  coll.root = c.root;
  coll.label = "case";
  coll.fingerprint = fingerprint;
  if (c.has_src(rank)) coll.src = {src, c.src_count(rank), c.src, 0, {1, 0}};
  if (c.has_dst(rank)) coll.dst = {dst, c.dst_count(rank), c.dst, 0, {1, 0}};
  if (!c.counts.empty()) coll.counts = c.counts.data();
  return coll;
}

/// Runs one case on this rank and compares the result with the reference.
inline void check(const Bench& bench, Memory& memory, const Case& c, Home home, uint64_t seed) {
  const int rank = bench.rank;
  std::vector<Bytes> sources;
  for (int r = 0; r < c.world; ++r) sources.push_back(noise(c.src, c.src_count(r), seed + static_cast<uint64_t>(r)));
  const Bytes& mine = sources[static_cast<std::size_t>(rank)];
  char* src = memory.at(home, 0);
  char* dst = memory.at(home, 1);
  if (c.in_place) {
    const int64_t own = c.op == ZR_REDUCE_SCATTER || c.op == ZR_SCATTER || c.op == ZR_ALL_GATHER || c.op == ZR_GATHER
                            ? c.start(rank) * width_of(c.src)
                            : 0;
    if (c.op == ZR_ALL_GATHER || c.op == ZR_GATHER) {
      if (c.has_dst(rank)) src = dst + own;
    } else if (c.has_src(rank)) {
      dst = src + own;
    }
  }
  Bytes previous = noise(c.dst, c.dst_count(rank), seed + 100);
  std::copy(previous.begin(), previous.end(), dst);
  std::copy(mine.begin(), mine.end(), src);
  if (c.in_place && c.has_dst(rank)) std::copy(dst, dst + previous.size(), previous.begin());
  const Bytes wanted = expected(c, rank, sources, previous);

  zr_coll coll = coll_of(c, rank, src, dst, seed);
  std::vector<int64_t> to, from;
  if (!c.exchange.empty()) {
    for (int r = 0; r < c.world; ++r) {
      to.push_back(c.sent(rank, r));
      from.push_back(c.sent(r, rank));
    }
    coll.counts = to.data();
    coll.recv_counts = from.data();
  }
  bench.run(coll);
  if (!c.has_dst(rank)) return;
  EXPECT_TRUE(std::equal(wanted.begin(), wanted.end(), dst)) << "rank " << rank << ": " << text_of(c, home);
}

/// Every operation with equal, uneven and empty parts.
inline std::vector<Case> cases(int world, zr_dtype dtype, int64_t scale) {
  std::vector<Case> all;
  const auto add = [&](Case c) {
    c.world = world;
    c.src = c.dst = dtype;
    all.push_back(c);
    c.in_place = true;
    all.push_back(c);
  };
  std::vector<int64_t> uneven, holes;
  std::vector<std::vector<int64_t>> exchange;
  for (int r = 0; r < world; ++r) {
    uneven.push_back(scale * (1 + 3 * ((r + 1) % world)) + r);
    holes.push_back(r % 2 ? scale + 1 : 0);
    exchange.emplace_back();
    for (int to = 0; to < world; ++to) exchange.back().push_back((r * 3 + to * 2) % 5 * scale);
  }
  for (const int64_t total : {int64_t{0}, int64_t{1}, scale * 67}) {
    add({.op = ZR_ALL_REDUCE, .total = total});
    for (const int root : {0, world - 1}) {
      add({.op = ZR_BROADCAST, .root = root, .total = total});
      add({.op = ZR_REDUCE, .root = root, .total = total});
    }
  }
  for (const auto& counts : {std::vector<int64_t>{}, uneven, holes})
    for (const uint32_t op : {ZR_REDUCE_SCATTER, ZR_ALL_GATHER, ZR_GATHER, ZR_SCATTER})
      add({.op = op, .root = world / 2, .counts = counts, .part = scale * 5});
  add({.op = ZR_ALL_TO_ALL, .part = scale * 2});
  all.push_back({.op = ZR_ALL_TO_ALL, .src = dtype, .dst = dtype, .world = world, .exchange = exchange});
  return all;
}

/// Runs every reduction of every type, in every way.
inline void check_reductions(const Bench& bench, Memory& memory, const std::vector<Home>& homes) {
  uint64_t seed = 5;
  for (const zr_dtype dtype : kDtypes)
    for (const uint32_t op : {ZR_ALL_REDUCE, ZR_REDUCE_SCATTER, ZR_REDUCE})
      for (const uint32_t reduce : {ZR_SUM, ZR_MIN, ZR_MAX})
        for (const uint32_t flags : {0u, uint32_t{ZR_COLL_ACCUMULATE}})
          for (const bool in_place : {false, true})
            for (const Home home : homes)
              check(bench, memory,
                    {.op = op,
                     .reduce = reduce,
                     .flags = flags,
                     .src = dtype,
                     .dst = dtype,
                     .world = bench.world,
                     .root = bench.world - 1,
                     .total = 333,
                     .part = 111,
                     .in_place = in_place},
                    home, seed += 1000);
}

/// Runs every sum of bf16 and fp16 into fp32.
inline void check_upcasts(const Bench& bench, Memory& memory, const std::vector<Home>& homes) {
  uint64_t seed = 9;
  for (const zr_dtype src : {ZR_BF16, ZR_F16})
    for (const uint32_t op : {ZR_ALL_REDUCE, ZR_REDUCE_SCATTER, ZR_REDUCE})
      for (const uint32_t flags : {0u, uint32_t{ZR_COLL_ACCUMULATE}})
        for (const Home home : homes)
          check(bench, memory,
                {.op = op, .flags = flags, .src = src, .dst = ZR_F32, .world = bench.world, .total = 1001, .part = 333},
                home, seed += 1000);
}

}  // namespace zr::testing
