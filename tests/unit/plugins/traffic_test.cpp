// The bytes that communicators plan for jobs of many hosts, against the tables of docs/communicators.md.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "support/planned_traffic.hpp"
#include "zr/collective.hpp"
#include "zr/names.hpp"

namespace zr::testing {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;
using Ranks = std::vector<int32_t>;

constexpr uint64_t kHosts = 128, kRanksPerHost = 8, kRanks = kHosts * kRanksPerHost;
constexpr int64_t kPart = 128 * 1000;  // elements per rank: full blocks of quantized values
constexpr int64_t kTotal = kPart * int64_t{kRanks};

// Views have addresses without memory.
zr_view view(int address, int64_t count, zr_dtype dtype) {
  return {reinterpret_cast<void*>(static_cast<uintptr_t>(address) << 44), count, dtype, 0, {ZR_DEVICE_CPU, 0}};
}
zr_coll reduce_scatter_of(zr_dtype src, zr_dtype dst, uint32_t flags = 0, const std::vector<int64_t>& counts = {}) {
  if (counts.empty()) return reduce_scatter(view(1, kTotal, src), view(2, kPart, dst), "g", flags);
  const int64_t total = std::accumulate(counts.begin(), counts.end(), int64_t{0});
  return reduce_scatter(view(1, total, src), view(2, counts[0], dst), "g", flags, counts.data());
}
zr_coll all_reduce_of(zr_dtype src, zr_dtype dst, uint32_t flags = 0) {
  return all_reduce(view(1, kTotal, src), view(2, kTotal, dst), "g", flags);
}
zr_coll all_gather_of(zr_dtype dtype, uint32_t flags = 0) {
  return all_gather(view(1, kPart, dtype), view(2, kTotal, dtype), "w", nullptr, flags);
}
// Rank 0 does not know the type of the root's dst.
zr_coll reduce_of(zr_dtype src, int root) { return reduce(view(1, kTotal, src), zr_view{}, root, "g"); }

uint64_t sum(const std::vector<uint64_t>& list) { return std::accumulate(list.begin(), list.end(), uint64_t{0}); }

class PlannedTrafficTest : public ::testing::Test {
 protected:
  // Bytes between hosts of a job with these numbers of ranks.
  static uint64_t between(const PlanningCommunicator& communicator, const zr_coll& coll, const Ranks& ranks) {
    const PlannedTraffic planned = communicator.of(coll, ranks);
    EXPECT_EQ(planned.code, ZR_OK) << planned.text;
    EXPECT_EQ(sum(planned.sent), sum(planned.received));
    return sum(planned.sent);
  }
  const Ranks equal_ = Ranks(kHosts, kRanksPerHost);
  const PlanningCommunicator mpi_{"mpi"}, flat_{"mpi", "hierarchy = false\n"}, shm_{"shm"};
};

TEST_F(PlannedTrafficTest, GathersPassToEachHostOnce) {
  const uint64_t n = kTotal;
  const PlannedTraffic gather = mpi_.of(all_gather_of(ZR_BF16), equal_);
  EXPECT_THAT(gather.sent, Each(2 * n / kHosts * (kHosts - 1)));
  EXPECT_THAT(gather.received, Each(2 * n / kHosts * (kHosts - 1)));
  EXPECT_EQ(gather.inside, 2 * n * (kRanks - kHosts));
  const PlannedTraffic broadcast = mpi_.of(zr::broadcast(view(1, kTotal, ZR_F32), 17, "w"), equal_);
  for (uint64_t host = 0; host < kHosts; ++host) {
    EXPECT_EQ(broadcast.sent[host], host == 2 ? 4 * n * (kHosts - 1) : 0);
    EXPECT_EQ(broadcast.received[host], host == 2 ? 0 : 4 * n);
  }
  EXPECT_EQ(broadcast.inside, 4 * n * (kRanks - kHosts));
}

TEST_F(PlannedTrafficTest, SumsOfAllReducePassFromHostToHost) {
  const uint64_t n = kTotal;
  const PlannedTraffic planned = mpi_.of(all_reduce_of(ZR_BF16, ZR_BF16), equal_);
  for (uint64_t host = 0; host < kHosts; ++host) {
    const bool is_last = host == kHosts - 1;
    EXPECT_EQ(planned.sent[host], is_last ? 2 * n * (kHosts - 1) : 4 * n);
    EXPECT_EQ(planned.received[host], (host > 0 ? 4 * n : 0) + (is_last ? 0 : 2 * n));
  }
  EXPECT_EQ(planned.inside, (2 + 2) * n * (kRanks - kHosts));
  EXPECT_EQ(between(mpi_, all_reduce_of(ZR_BF16, ZR_F32), equal_), (4 + 4) * n * (kHosts - 1));
}

// Hosts of 1 to 8 ranks; of 1 where the numbers of ranks before or after a host are small, so that both ways occur on
// both sides.
TEST_F(PlannedTrafficTest, PartsOfReduceScatterTakeTheWayWithFewerBytesOnEachSide) {
  Ranks ranks;
  for (int host = 0; host < 128; ++host) ranks.push_back(host < 9 || host > 122 || host % 7 == 0 ? 1 : host % 8 + 1);
  const auto world = static_cast<std::size_t>(std::accumulate(ranks.begin(), ranks.end(), 0));
  std::vector<int64_t> counts;
  for (std::size_t rank = 0; rank < world; ++rank) counts.push_back(static_cast<int64_t>(rank * 977 % 5 * 1000));
  for (const auto& [src, dst, w, v] :
       {std::tuple{ZR_BF16, ZR_BF16, 2, 2}, {ZR_BF16, ZR_F32, 2, 4}, {ZR_F32, ZR_F32, 4, 4}})
    for (const uint32_t flags : {0u, uint32_t{ZR_COLL_ACCUMULATE}}) {
      uint64_t bytes = 0, inside = 0;
      const int hosts = static_cast<int>(ranks.size()), all = static_cast<int>(world);
      for (int h = 0, before = 0; h < hosts; before += ranks[static_cast<std::size_t>(h++)]) {
        const int own = ranks[static_cast<std::size_t>(h)], after = all - before - own;
        const auto part = counts.begin() + before;
        const auto elements = static_cast<uint64_t>(std::accumulate(part, part + own, int64_t{0}));
        const int sums_before = 4 * h + (flags ? v : 0), sums_after = 4 * (hosts - 1 - h) + v;
        const bool passes_before = h > 0 && sums_before < w * before, passes_after = sums_after < w * after;
        bytes += elements * static_cast<uint64_t>(passes_before ? sums_before : w * before);
        bytes += elements * static_cast<uint64_t>(passes_after ? sums_after : w * after);
        const int adding_hosts = 1 + (passes_before ? h : 0) + (passes_after ? hosts - 1 - h : 0);
        const int adding_ranks = own + (passes_before ? before : 0) + (passes_after ? after : 0);
        inside += elements * static_cast<uint64_t>(w * (adding_ranks - adding_hosts));
      }
      const zr_coll coll = reduce_scatter_of(src, dst, flags, counts);
      EXPECT_EQ(between(mpi_, coll, ranks), bytes) << w << " " << v << " " << flags;
      EXPECT_EQ(mpi_.of(coll, ranks).inside, inside) << w << " " << v << " " << flags;
    }
}

TEST_F(PlannedTrafficTest, HostsAfterTheRootOfAReduceSendElements) {
  for (const uint64_t home : {uint64_t{0}, uint64_t{50}, kHosts - 1}) {
    const int root = static_cast<int>(home * kRanksPerHost) + 3;
    const uint64_t w = 2, before = home * kRanksPerHost, after = kRanks - before - kRanksPerHost;
    EXPECT_EQ(between(mpi_, reduce_of(ZR_BF16, root), equal_),
              uint64_t{kTotal} * (std::min(4 * home, w * before) + w * after));
  }
}

TEST_F(PlannedTrafficTest, ManyBytesPassBetweenHostsWithoutHierarchy) {
  const uint64_t n = kTotal, others = kRanks - kRanksPerHost;
  const std::vector<std::pair<zr_coll, uint64_t>> expected{
      {all_gather_of(ZR_BF16), 2 * n * others},
      {zr::broadcast(view(1, kTotal, ZR_BF16), 9, "w"), 2 * n * others},
      {all_reduce_of(ZR_BF16, ZR_F32), (2 + 4) * n * others},
      {all_reduce_of(ZR_BF16, ZR_F32, ZR_COLL_ACCUMULATE), 2 * n * others * kRanks},
      {reduce_scatter_of(ZR_BF16, ZR_BF16), 2 * n * others},
      {reduce_of(ZR_BF16, 9), 2 * n * others},
      {zr::gather(view(1, kPart, ZR_BF16), zr_view{}, 9, "g"), 2 * kPart * others},
      {zr::scatter(zr_view{}, view(2, kPart, ZR_BF16), 9, "g"), 2 * kPart * others},
      {zr::barrier("end"), 0}};
  for (const auto& [coll, bytes] : expected) EXPECT_EQ(between(flat_, coll, equal_), bytes) << name_of_op(coll.op);
  EXPECT_EQ(between(mpi_, all_reduce_of(ZR_BF16, ZR_F32, ZR_COLL_ACCUMULATE), equal_), 2 * n * others * kRanks);
}

TEST_F(PlannedTrafficTest, InexactCollectivesPassOneSumPerHost) {
  const uint64_t n = kTotal, hops = kHosts - 1;
  EXPECT_EQ(between(mpi_, reduce_scatter_of(ZR_F32, ZR_F32, ZR_COLL_ANY_ORDER), equal_), 4 * n * hops);
  const auto block = [&](uint64_t bytes) { return n / 128 * bytes * hops; };
  for (const auto& [flag, bytes] : {std::pair{ZR_COLL_INT8, uint64_t{132}}, {ZR_COLL_INT4, uint64_t{72}}}) {
    EXPECT_EQ(between(mpi_, reduce_scatter_of(ZR_BF16, ZR_F32, flag), equal_), block(bytes));
    EXPECT_EQ(between(mpi_, all_gather_of(ZR_BF16, flag), equal_), block(bytes));
    const PlannedTraffic planned = mpi_.of(all_reduce_of(ZR_BF16, ZR_BF16, flag), equal_);
    EXPECT_EQ(sum(planned.sent), 2 * block(bytes));
    EXPECT_EQ(planned.inside, (2 + 2) * n * (kRanks - kHosts));
  }
}

TEST_F(PlannedTrafficTest, RanksAloneOnTheirHostsUseTheHierarchyForQuantizedCollectivesOnly) {
  const Ranks alone(kRanks, 1);
  const uint64_t n = kTotal;
  EXPECT_EQ(between(mpi_, reduce_scatter_of(ZR_F32, ZR_F32), alone), 4 * n * (kRanks - 1));
  EXPECT_EQ(between(mpi_, reduce_scatter_of(ZR_F32, ZR_F32, ZR_COLL_INT8), alone), n / 128 * 132 * (kRanks - 1));
  EXPECT_EQ(mpi_.of(reduce_scatter_of(ZR_F32, ZR_F32, ZR_COLL_INT8), alone).inside, 0u);
}

TEST_F(PlannedTrafficTest, SmallCollectivesGoFromRankToRank) {
  const auto gather = [](int64_t part) {
    return all_gather(view(1, part, ZR_U8), view(2, part * int64_t{kRanks}, ZR_U8), "w");
  };
  EXPECT_EQ(between(mpi_, gather(63), equal_), 63 * kRanks * (kRanks - kRanksPerHost));
  EXPECT_EQ(between(mpi_, gather(64), equal_), 64 * kRanks * (kHosts - 1));
}

TEST_F(PlannedTrafficTest, OneHostSendsNothing) {
  const Ranks one{8};
  for (const auto* communicator : {&mpi_, &shm_})
    for (const auto& [coll, bytes] : std::vector<std::pair<zr_coll, int>>{
             {zr::all_reduce(view(1, 1000, ZR_BF16), view(2, 1000, ZR_F32), "g"), 7 * 1000 * (2 + 4)},
             {zr::all_reduce(view(1, 1000, ZR_F32), view(1, 1000, ZR_F32), "g", ZR_COLL_ACCUMULATE), 56 * 4000},
             {zr::reduce_scatter(view(1, 8000, ZR_BF16), view(2, 1000, ZR_BF16), "g"), 7 * 16000},
             {zr::all_gather(view(1, 1000, ZR_BF16), view(2, 8000, ZR_BF16), "w"), 7 * 16000},
             {zr::broadcast(view(1, 1000, ZR_BF16), 3, "w"), 7 * 2000},
             {zr::reduce(view(1, 1000, ZR_BF16), zr_view{}, 3, "g"), 7 * 2000},
             {zr::gather(view(1, 1000, ZR_BF16), zr_view{}, 3, "g"), 7 * 2000},
             {zr::scatter(zr_view{}, view(2, 1000, ZR_BF16), 3, "g"), 7 * 2000},
             {zr::all_to_all(view(1, 8000, ZR_BF16), view(2, 8000, ZR_BF16), "m"), 7 * 16000},
             {zr::barrier("end"), 0}}) {
      const PlannedTraffic planned = communicator->of(coll, one);
      EXPECT_EQ(planned.code, ZR_OK) << planned.text;
      EXPECT_EQ(planned.inside, static_cast<uint64_t>(bytes)) << name_of_op(coll.op);
      EXPECT_EQ(planned.sent[0] + planned.received[0], 0u);
    }
}

TEST_F(PlannedTrafficTest, NamesWhatIsUnknown) {
  const auto expect_error = [](const PlannedTraffic& planned, const char* text) {
    EXPECT_EQ(planned.code, ZR_UNSUPPORTED);
    EXPECT_THAT(planned.text, HasSubstr(text));
    EXPECT_THAT(planned.sent, Each(0u));
    EXPECT_THAT(planned.received, Each(0u));
    EXPECT_EQ(planned.inside, 0u);
  };
  const zr_view x = view(1, 1024, ZR_F32), y = view(2, 1024, ZR_F32);
  const int64_t from[] = {128, 128, 128, 128, 128, 128, 127, 129};
  for (const zr_coll& coll : {zr::all_to_all(x, y, "x", nullptr, from), zr::send(x, 1, 0, "x"), zr::recv(y, 1, 0, "x")})
    for (const auto* communicator : {&mpi_, &shm_})
      expect_error(communicator->of(coll, {8}), ": they depend on the other ranks");
  expect_error(flat_.of(all_gather_of(ZR_F32, ZR_COLL_INT8), equal_), "need communicator.mpi.hierarchy = true");
  expect_error(shm_.of(all_gather_of(ZR_F32), equal_), "works on one host, but the job has 128");
}

// Every rank sends the same parts: a host receives those of its ranks from the ranks of the others.
TEST_F(PlannedTrafficTest, PartsOfAllToAllGoFromRankToRank) {
  const std::vector<int64_t> counts{100, 0, 40, 7}, own(4, 100);
  const zr_coll coll = zr::all_to_all(view(1, 147, ZR_F32), view(2, 400, ZR_F32), "m", counts.data(), own.data());
  const PlannedTraffic planned = mpi_.of(coll, {1, 3});
  EXPECT_EQ(planned.code, ZR_OK) << planned.text;
  EXPECT_EQ(planned.received, (std::vector<uint64_t>{4 * 3 * 100, 4 * 1 * 47}));
  EXPECT_EQ(planned.sent, (std::vector<uint64_t>{4 * 1 * 47, 4 * 3 * 100}));
  EXPECT_EQ(planned.inside, 4 * 2 * 47u);
}

TEST_F(PlannedTrafficTest, HostsHaveRanks) {
  for (const Ranks& ranks : {Ranks{}, Ranks{0}, Ranks{4, 0}, Ranks{-1, 2}})
    EXPECT_EQ(mpi_.of(zr::barrier("end"), ranks).code, ZR_INVALID);
  EXPECT_EQ(shm_.of(zr::barrier("end"), {0}).code, ZR_INVALID);
}

}  // namespace
}  // namespace zr::testing
