// comm_mpi with collectives that need not be exact, against scalar code: quantized ones, and sums in any order.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <limits>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "multirank/comm/mpi_ranks.hpp"
#include "multirank/comm/reference.hpp"
#include "support/name_by_ranks.hpp"

namespace {

using namespace zr::testing;
using testing::HasSubstr;
using Values = std::vector<float>;

constexpr int64_t kBlock = 128, kPiece = 131072;
int64_t block_of(int bits) { return bits == 8 ? kBlock : 64; }

// Different for each rank and element, with other magnitudes in each block. With a spread above 1, magnitudes also
// differ by rank and element, so that sums depend on their order.
float value(int rank, int64_t i, int spread = 1) {
  const uint32_t mixed = (static_cast<uint32_t>(i) * 2654435761u) ^ (static_cast<uint32_t>(rank) * 40503u + 977u);
  return std::ldexp(static_cast<float>(mixed % 20011u) - 10005.0f,
                    static_cast<int>(i / 64 % 9) - 16 - static_cast<int>((rank * 11 + i * 5) % spread));
}
constexpr int kSpread = 27;

// What a typed value is worth.
float as(zr_dtype dtype, float x) {
  char at[4];
  downcast(dtype, x, at);
  return upcast(dtype, at);
}

// What values are worth after they have passed between hosts.
Values quantized(int bits, Values values) {
  const float levels = bits == 8 ? 127 : 7;
  const auto block = static_cast<std::size_t>(block_of(bits));
  for (std::size_t first = 0; first < values.size(); first += block) {
    const std::size_t end = std::min(values.size(), first + block);
    float most = 0;
    for (std::size_t i = first; i < end; ++i) most = std::max(most, std::fabs(values[i]));
    for (std::size_t i = first; i < end; ++i)
      values[i] = most == 0 ? 0 : std::nearbyint(values[i] * (levels / most)) * (most / levels) + 0.0f;  // not -0
  }
  return values;
}

// The parameter: the number of ranks on each host.
class CommMpiInexactTest : public testing::TestWithParam<std::vector<int>> {
 protected:
  CommMpiInexactTest() {
    for (std::size_t host = 0; host < GetParam().size(); ++host)
      host_of_.insert(host_of_.end(), static_cast<std::size_t>(GetParam()[host]), static_cast<int>(host));
  }
  int world() const { return static_cast<int>(host_of_.size()); }
  // Ranks use different instruction sets, with the same bits.
  void on_ranks(const std::function<void(RawComm&)>& body) {
    constexpr const char* kSets[] = {"avx512", "portable", "avx2"};
    if (const char* rank = std::getenv("OMPI_COMM_WORLD_RANK")) ::setenv("ZR_ISA", kSets[std::atoi(rank) % 3], 1);
    on_mpi_ranks(
        world(),
        [&](CommRig& rig) {
          RawComm comm(rig);
          body(comm);
        },
        kAllSizes, host_of_);
  }

  // The sum at its owner of elements that begin at `from` in every rank's source. bits 0: between hosts as fp32.
  Values sum(int bits, zr_dtype dtype, int owner, int64_t from, Values start, int spread = 1) const {
    Values total = std::move(start);
    const int hosts = host_of_.back() + 1, home = host_of_[static_cast<std::size_t>(owner)];
    for (int host = 0; host < hosts; ++host) {
      Values of_host(total.size(), 0.0f);
      Values& to = host == home ? total : of_host;
      for (int rank = 0; rank < world(); ++rank)
        for (std::size_t i = 0; host_of_[static_cast<std::size_t>(rank)] == host && i < total.size(); ++i)
          to[i] += as(dtype, value(rank, from + static_cast<int64_t>(i), spread));
      if (host == home) continue;
      if (bits) of_host = quantized(bits, of_host);
      for (std::size_t i = 0; i < total.size(); ++i) total[i] += of_host[i];
    }
    return total;
  }
  // The exact sum, as NUMERICS.md defines it.
  Values sum_in_rank_order(zr_dtype dtype, int64_t from, Values start) const {
    for (int rank = 0; rank < world(); ++rank)
      for (std::size_t i = 0; i < start.size(); ++i)
        start[i] += as(dtype, value(rank, from + static_cast<int64_t>(i), kSpread));
    return start;
  }
  std::vector<int> host_of_;
};

// The bytes of typed values.
Bytes stored(zr_dtype dtype, int64_t count, const std::function<float(int64_t)>& at) {
  Bytes bytes(static_cast<std::size_t>(count * width_of(dtype)));
  for (int64_t i = 0; i < count; ++i) downcast(dtype, at(i), bytes.data() + i * width_of(dtype));
  return bytes;
}
Bytes stored(zr_dtype dtype, const Values& values) {
  return stored(dtype, static_cast<int64_t>(values.size()),
                [&](int64_t i) { return values[static_cast<std::size_t>(i)]; });
}

// Of 1 element, 127 (exact: smaller than its encoded form with some types), one block, several with a rest.
std::vector<int64_t> uneven(int world) {
  const int64_t sizes[] = {131, 0, 127, 128, 129, 3 * kBlock + 1, 5000, kPiece + 7};
  std::vector<int64_t> counts;
  for (int rank = 0; rank < world; ++rank) counts.push_back(sizes[(rank * 3 + 7) % 8]);
  return counts;
}

TEST_P(CommMpiInexactTest, AllRanksGatherWhatTheEncodedValuesAreWorth) {
  on_ranks([&](RawComm& comm) {
    const std::vector<int64_t> counts = uneven(world());
    const int64_t total = std::accumulate(counts.begin(), counts.end(), int64_t{0});
    for (const int bits : {8, 4})
      for (const zr_dtype dtype : {ZR_F32, ZR_BF16, ZR_F16})
        for (const bool in_place : {false, true}) {
          Bytes expected, src, dst(static_cast<std::size_t>(total * width_of(dtype)));
          std::size_t own = 0;
          for (int rank = 0; rank < world(); ++rank) {
            const int64_t count = counts[static_cast<std::size_t>(rank)];
            const Bytes part = stored(dtype, count, [&](int64_t i) { return value(rank, i); });
            Values worth;
            for (int64_t i = 0; i < count; ++i) worth.push_back(upcast(dtype, part.data() + i * width_of(dtype)));
            if (count >= kBlock) worth = quantized(bits, worth);
            const Bytes gathered = stored(dtype, worth);
            if (rank == comm.rank()) src = part, own = expected.size();
            expected.insert(expected.end(), gathered.begin(), gathered.end());
          }
          const Bytes before = src;
          if (in_place) std::copy(src.begin(), src.end(), dst.begin() + static_cast<std::ptrdiff_t>(own));
          zr_coll coll = zr::all_gather(
              view(in_place ? dst.data() + own : src.data(), counts[static_cast<std::size_t>(comm.rank())], dtype),
              view(dst.data(), total, dtype), "w", counts.data());
          coll.flags = bits == 8 ? ZR_COLL_INT8 : ZR_COLL_INT4;
          comm.run(coll);
          EXPECT_TRUE(dst == expected) << bits << " bits, dtype " << dtype << (in_place ? ", in place" : "");
          EXPECT_TRUE(src == before);
        }
  });
}

TEST_P(CommMpiInexactTest, ReduceScatterAddsTheRoundedSumsOfTheOtherHosts) {
  on_ranks([&](RawComm& comm) {
    const std::vector<int64_t> counts = uneven(world());
    const int64_t total = std::accumulate(counts.begin(), counts.end(), int64_t{0}),
                  from = std::accumulate(counts.begin(), counts.begin() + comm.rank(), int64_t{0}),
                  count = counts[static_cast<std::size_t>(comm.rank())];
    for (const int bits : {8, 4})
      for (const auto& [src_dtype, dst_dtype] :
           {std::pair{ZR_F32, ZR_F32}, {ZR_BF16, ZR_BF16}, {ZR_F16, ZR_F16}, {ZR_BF16, ZR_F32}})
        for (const bool accumulates : {false, true}) {
          Bytes src = stored(src_dtype, total, [&](int64_t i) { return value(comm.rank(), i); });
          Bytes dst = stored(dst_dtype, count, [](int64_t i) { return static_cast<float>(i % 5); });
          Values start(static_cast<std::size_t>(count), 0.0f);
          for (std::size_t i = 0; accumulates && i < start.size(); ++i) start[i] = static_cast<float>(i % 5);
          zr_coll coll = zr::reduce_scatter(view(src.data(), total, src_dtype), view(dst.data(), count, dst_dtype), "g",
                                            accumulates ? ZR_COLL_ACCUMULATE : 0, counts.data());
          coll.flags |= bits == 8 ? ZR_COLL_INT8 : ZR_COLL_INT4;
          comm.run(coll);
          EXPECT_TRUE(dst == stored(dst_dtype, sum(bits, src_dtype, comm.rank(), from, start)))
              << bits << " bits, dtypes " << src_dtype << " " << dst_dtype << (accumulates ? ", accumulates" : "");
        }
  });
}

// The pieces of an all_reduce have their owners in turn, whose results are rounded for all ranks.
TEST_P(CommMpiInexactTest, AllReduceGivesAllRanksTheSameRoundedSums) {
  on_ranks([&](RawComm& comm) {
    for (const int64_t total : {int64_t{1}, int64_t{200}, 9 * kPiece + 77})
      for (const int bits : {8, 4})
        for (const zr_dtype dtype : {ZR_F32, ZR_BF16}) {
          Bytes expected;
          for (int64_t first = 0, number = 0; first < total; first += kPiece, ++number) {
            const Values zeros(static_cast<std::size_t>(std::min(kPiece, total - first)), 0.0f);
            const Bytes piece =
                stored(dtype, quantized(bits, sum(bits, dtype, static_cast<int>(number % world()), first, zeros)));
            expected.insert(expected.end(), piece.begin(), piece.end());
          }
          for (const bool in_place : {false, true}) {
            Bytes src = stored(dtype, total, [&](int64_t i) { return value(comm.rank(), i); }), dst(src.size());
            zr_coll coll = zr::all_reduce(view(src.data(), total, dtype),
                                          view(in_place ? src.data() : dst.data(), total, dtype), "g");
            coll.flags = bits == 8 ? ZR_COLL_INT8 : ZR_COLL_INT4;
            comm.run(coll);
            EXPECT_TRUE((in_place ? src : dst) == expected)
                << bits << " bits, dtype " << dtype << ", " << total << (in_place ? ", in place" : "");
          }
        }
  });
}

TEST_P(CommMpiInexactTest, ReduceGivesTheRootTheSum) {
  on_ranks([&](RawComm& comm) {
    constexpr int64_t kTotal = kPiece + 130;
    const int root = world() - 1;
    Values src, dst(kTotal, -1.0f);
    for (int64_t i = 0; i < kTotal; ++i) src.push_back(value(comm.rank(), i));
    zr_coll coll = zr::reduce(view(src.data(), kTotal), view(dst.data(), comm.rank() == root ? kTotal : 0), root, "g");
    coll.flags = ZR_COLL_INT8;
    comm.run(coll);
    EXPECT_EQ(dst[0] == -1.0f, comm.rank() != root);
    if (comm.rank() == root) {
      EXPECT_TRUE(dst == sum(8, ZR_F32, root, 0, Values(kTotal, 0.0f)));
    }
  });
}

// Many pieces of the first and the last rank, which wait for each other's sums, and few of the others.
TEST_P(CommMpiInexactTest, ReducesManyPiecesOfTwoHosts) {
  on_ranks([&](RawComm& comm) {
    std::vector<int64_t> counts(static_cast<std::size_t>(world()), kPiece + 1);
    counts.front() = counts.back() = 24 * kPiece;
    const int64_t total = std::accumulate(counts.begin(), counts.end(), int64_t{0}),
                  count = counts[static_cast<std::size_t>(comm.rank())];
    const Values src(static_cast<std::size_t>(total), static_cast<float>(comm.rank() + 1));
    Values dst(static_cast<std::size_t>(count));
    zr_coll coll =
        zr::reduce_scatter(view(const_cast<float*>(src.data()), total), view(dst.data(), count), "g", 0, counts.data());
    coll.flags = ZR_COLL_INT8;
    comm.run(coll);
    const float sum = static_cast<float>(world() * (world() + 1)) / 2;
    for (std::size_t i = 0; i < dst.size(); i += 999) ASSERT_NEAR(dst[i], sum, 1e-4) << i;
  });
}

// Only where that takes fewer bytes than the order of the ranks: of fp32 with all of these numbers of ranks, of bf16
// only with 3, 3 and 3, and with 3 and 2 if the sum is accumulated.
class CommMpiAnyOrderTest : public CommMpiInexactTest {};
TEST_P(CommMpiAnyOrderTest, AddsTheSumsOfTheHosts) {
  on_ranks([&](RawComm& comm) {
    constexpr int64_t kPart = kPiece + 9;
    const int64_t total = kPart * world();
    for (const auto& [src_dtype, dst_dtype] : {std::pair{ZR_F32, ZR_F32}, {ZR_BF16, ZR_BF16}, {ZR_BF16, ZR_F32}})
      for (const bool accumulates : {false, true}) {
        const bool sums_per_host = src_dtype == ZR_F32 || GetParam() == std::vector<int>{3, 3, 3} ||
                                   (GetParam() == std::vector<int>{3, 2} && accumulates);
        Bytes src = stored(src_dtype, total, [&](int64_t i) { return value(comm.rank(), i, kSpread); });
        Bytes dst = stored(dst_dtype, kPart, [](int64_t i) { return static_cast<float>(i % 5); });
        Values start(kPart, 0.0f);
        for (std::size_t i = 0; accumulates && i < start.size(); ++i) start[i] = static_cast<float>(i % 5);
        zr_coll coll = zr::reduce_scatter(view(src.data(), total, src_dtype), view(dst.data(), kPart, dst_dtype), "g",
                                          accumulates ? ZR_COLL_ACCUMULATE : 0);
        coll.flags |= ZR_COLL_ANY_ORDER;
        comm.run(coll);
        const int64_t from = kPart * comm.rank();
        const Values per_host = sum(0, src_dtype, comm.rank(), from, start, kSpread),
                     in_rank_order = sum_in_rank_order(src_dtype, from, start);
        EXPECT_TRUE(dst == stored(dst_dtype, sums_per_host ? per_host : in_rank_order))
            << "dtypes " << src_dtype << " " << dst_dtype << (accumulates ? ", accumulates" : "");
        EXPECT_TRUE(comm.rank() > 0 || per_host != in_rank_order);
      }
  });
}

// The block of an infinity or a NaN becomes NaN at the other hosts, so that the step is skipped; others keep their
// values. Magnitudes too small for a scale become 0.
TEST_P(CommMpiInexactTest, KeepsWhatIsNotFiniteAndDropsWhatIsTiny) {
  on_ranks([&](RawComm& comm) {
    const float infinity = std::numeric_limits<float>::infinity();
    for (const int bits : {8, 4}) {
      const int64_t size = block_of(bits), count = 4 * size;
      Values part(static_cast<std::size_t>(count), 1.0f), all(part.size() * static_cast<std::size_t>(world()));
      if (comm.rank() == 0) part[5] = infinity, part[static_cast<std::size_t>(size) + 5] = -std::nanf("");
      std::fill_n(part.begin() + 2 * size, size, -1e-40f);
      zr_coll coll = zr::all_gather(view(part.data(), count), view(all.data(), static_cast<int64_t>(all.size())), "w");
      coll.flags = bits == 8 ? ZR_COLL_INT8 : ZR_COLL_INT4;
      comm.run(coll);
      for (std::size_t i = 0; i < all.size(); ++i) {
        const std::size_t block = i / static_cast<std::size_t>(size);
        if (block < 2)
          ASSERT_TRUE(std::isnan(all[i])) << i;
        else
          ASSERT_EQ(all[i], block % 4 == 2 ? 0.0f : 1.0f) << i;
      }
    }
  });
}

// Quantized and exact operations overlap; ranks submit without waiting.
TEST_P(CommMpiInexactTest, OverlapsWithExactOperations) {
  on_ranks([&](RawComm& comm) {
    constexpr int64_t kPart = kPiece + 1000;
    constexpr int kRounds = 4;
    const int64_t total = kPart * world();
    std::vector<Values> sums, gathered;
    std::vector<std::unique_ptr<Started>> started;
    for (int i = 0; i < kRounds; ++i) {
      sums.emplace_back(static_cast<std::size_t>(total), static_cast<float>(i + 1));
      gathered.emplace_back(static_cast<std::size_t>(total), static_cast<float>(i + 10));
    }
    for (std::size_t i = 0; i < kRounds; ++i) {
      float *const sum = sums[i].data(), *const all = gathered[i].data();
      const int64_t own = kPart * comm.rank();
      zr_coll coll = i % 2 ? zr::reduce_scatter(view(sum, total), view(sum + own, kPart), "sum")
                           : zr::all_reduce(view(sum, total), view(sum, total), "sum");
      coll.flags = i == 1 ? 0 : ZR_COLL_INT8;
      started.push_back(std::make_unique<Started>(comm, coll));
      coll = zr::all_gather(view(all + own, kPart), view(all, total), "gather");
      coll.flags = i < 2 ? ZR_COLL_INT4 : 0;
      started.push_back(std::make_unique<Started>(comm, coll));
    }
    for (const auto& operation : started) ASSERT_EQ(operation->finish(), ZR_OK) << comm.said();
    for (std::size_t i = 0; i < kRounds; ++i) {
      const auto at = static_cast<std::size_t>(kPart * comm.rank() + kPart - 1);
      EXPECT_NEAR(sums[i][at], static_cast<float>((i + 1) * static_cast<std::size_t>(world())), 1e-4);
      EXPECT_NEAR(gathered[i].back(), static_cast<float>(i + 10), 1e-4);
      EXPECT_NEAR(gathered[i].front(), static_cast<float>(i + 10), 1e-4);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, CommMpiInexactTest, testing::Values(std::vector<int>{1, 3}, std::vector<int>{1, 1}),
                         zr::test::NameByRanks());
INSTANTIATE_TEST_SUITE_P(SLOW_Ranks, CommMpiInexactTest,
                         testing::Values(std::vector<int>{2, 2}, std::vector<int>{2, 1, 1}, std::vector<int>{1, 3, 2}),
                         zr::test::NameByRanks());
INSTANTIATE_TEST_SUITE_P(Ranks, CommMpiAnyOrderTest, testing::Values(std::vector<int>{2, 2}, std::vector<int>{3, 2}),
                         zr::test::NameByRanks());
INSTANTIATE_TEST_SUITE_P(SLOW_Ranks, CommMpiAnyOrderTest,
                         testing::Values(std::vector<int>{1, 3, 2}, std::vector<int>{2, 2, 2},
                                         std::vector<int>{3, 3, 3}),
                         zr::test::NameByRanks());

// Rank 4 has sent its sums to ranks 0 to 2, whose results wait for the late rank 3: their memory on rank 4 must not be
// used for later pieces. A correct sum does not depend on how late that is.
TEST(CommMpiInexactOrderTest, SumsAreKeptUntilTheirResultsHaveArrived) {
  on_mpi_ranks(5,
               [](CommRig& rig) {
                 RawComm comm(rig);
                 constexpr int64_t kTotal = 20 * kPiece;
                 Values x(kTotal);
                 for (int64_t i = 0; i < kTotal; ++i)
                   x[static_cast<std::size_t>(i)] = static_cast<float>(i / kPiece + 1);
                 if (comm.rank() == 3) std::this_thread::sleep_for(std::chrono::milliseconds(300));
                 zr_coll coll = zr::all_reduce(view(x.data(), kTotal), view(x.data(), kTotal), "g");
                 coll.flags = ZR_COLL_INT8;
                 comm.run(coll);
                 for (int64_t i = 0; i < kTotal; i += kPiece / 2)
                   EXPECT_NEAR(x[static_cast<std::size_t>(i)], static_cast<float>(5 * (i / kPiece + 1)), 1e-3) << i;
               },
               kAllSizes, {0, 0, 0, 0, 1});
}

// Quantized operations need hosts whose ranks work together.
TEST(CommMpiInexactErrorsTest, NamesWhatQuantizedOperationsNeed) {
  const auto said = [](CommRig& rig) {
    RawComm comm(rig);
    Values x(1000, 1.0f);
    zr_coll coll = zr::all_reduce(view(x.data(), 1000), view(x.data(), 1000), "g");
    coll.flags = ZR_COLL_INT8;
    EXPECT_EQ(comm.submit(coll), ZR_UNSUPPORTED);
    const std::string text = comm.said();
    comm.run(zr::barrier("end"));
    return text;
  };
  on_mpi_ranks(2,
               [&](CommRig& rig) {
                 EXPECT_THAT(said(rig),
                             HasSubstr("quantized collectives (communicator.gradients, communicator.weights) need "
                                       "communicator.mpi.hierarchy = true"));
               },
               "hierarchy = false\n", {0, 1});
}

TEST(CommMpiInexactErrorsTest, NamesRanksThatAreNotNumberedHostByHost) {
  on_mpi_ranks(3,
               [&](CommRig& rig) {
                 RawComm comm(rig);
                 Values x(1000, 1.0f);
                 zr_coll coll = zr::all_reduce(view(x.data(), 1000), view(x.data(), 1000), "g");
                 coll.flags = ZR_COLL_INT4;
                 EXPECT_EQ(comm.submit(coll), ZR_UNSUPPORTED);
                 EXPECT_THAT(
                     comm.said(),
                     HasSubstr("ranks 0 and 2 are on one host, but rank 1 is not; quantized collectives "
                               "(communicator.gradients, communicator.weights) need ranks that are numbered host by "
                               "host (mpirun --map-by slot, srun --distribution=block)"));
                 comm.run(zr::barrier("end"));
               },
               kAllSizes, {0, 1, 0});
}

}  // namespace
