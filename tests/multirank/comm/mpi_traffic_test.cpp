// What comm_mpi plans against what it sends: the bytes of its messages, counted in a job of mpirun.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <mpi.h>

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <string>
#include <vector>

#include "multirank/comm/mpi_calls.hpp"
#include "multirank/comm/mpi_ranks.hpp"
#include "support/planned_traffic.hpp"

namespace {

using namespace zr::testing;

constexpr int64_t kPiece = 131072;  // elements

struct Job {
  std::vector<int32_t> ranks;  // of each host
  std::string keys;
  bool quantizes = true;
};
void PrintTo(const Job& job, std::ostream* out) { *out << testing::PrintToString(job.ranks) << " " << job.keys; }

std::vector<int> hosts_of(const std::vector<int32_t>& ranks) {
  std::vector<int> hosts;
  for (std::size_t host = 0; host < ranks.size(); ++host)
    hosts.insert(hosts.end(), static_cast<std::size_t>(ranks[host]), static_cast<int>(host));
  return hosts;
}

// Flags of sums, and of gathers.
std::vector<uint32_t> flags_of(uint32_t op, bool quantizes) {
  std::vector<uint32_t> flags{0};
  const bool is_sum = op == ZR_ALL_REDUCE || op == ZR_REDUCE_SCATTER || op == ZR_REDUCE;
  if (is_sum)
    flags.insert(flags.end(), {ZR_COLL_ACCUMULATE, ZR_COLL_ANY_ORDER, ZR_COLL_ACCUMULATE | ZR_COLL_ANY_ORDER});
  if (quantizes && (is_sum || op == ZR_ALL_GATHER)) flags.insert(flags.end(), {ZR_COLL_INT8, ZR_COLL_INT4});
  if (quantizes && is_sum) flags.push_back(ZR_COLL_ACCUMULATE | ZR_COLL_INT8);
  return flags;
}

// Parts of many elements, of few, none, and of less than a block of quantized values.
std::vector<int64_t> uneven(int world, int64_t scale) {
  const int64_t sizes[] = {scale + 131, 0, 127, 2 * scale + 1, 129};
  std::vector<int64_t> counts;
  for (int rank = 0; rank < world; ++rank) counts.push_back(sizes[(rank * 2 + 3) % 5]);
  return counts;
}

// Every operation; sizes below and above the default of hierarchy_min_bytes, of several pieces, and of none.
std::vector<Case> traffic_cases(int world, bool quantizes, bool shares) {
  std::vector<Case> all{{.op = ZR_BARRIER, .world = world}};
  const auto add = [&](Case c) {
    c.world = world;
    for (const uint32_t flags : flags_of(c.op, quantizes)) {
      c.flags = flags;
      all.push_back(c);
    }
  };
  const auto add_types = [&](Case c) {
    add(c);
    c.in_place = c.op == ZR_ALL_REDUCE || c.op == ZR_ALL_GATHER;
    c.src = c.dst = ZR_BF16;
    add(c);
    c.in_place = false;
    if (flags_of(c.op, false).size() == 1) return;  // not a sum
    c.dst = ZR_F32;
    add(c);
    c.reduce = ZR_MAX;
    c.src = ZR_F32;
    add(c);
  };
  for (const int64_t total : {int64_t{0}, int64_t{1}, int64_t{5001}, 2 * kPiece + 77}) {
    add_types({.op = ZR_ALL_REDUCE, .total = total});
    for (const int root : {0, world - 1})
      for (const uint32_t op : {ZR_BROADCAST, ZR_REDUCE}) add_types({.op = op, .root = root, .total = total});
  }
  for (const int64_t scale : {int64_t{100}, int64_t{50000}, kPiece + 9})
    for (const auto& counts : {std::vector<int64_t>{}, uneven(world, scale)})
      for (const uint32_t op : {ZR_REDUCE_SCATTER, ZR_ALL_GATHER, ZR_GATHER, ZR_SCATTER})
        add_types({.op = op, .root = world / 2, .counts = counts, .part = scale});
  for (const int64_t scale : {int64_t{100}, int64_t{50000}}) {
    all.push_back({.op = ZR_ALL_TO_ALL, .world = world, .part = scale});
    const std::vector<std::vector<int64_t>> alike(static_cast<std::size_t>(world), uneven(world, scale));
    all.push_back({.op = ZR_ALL_TO_ALL, .world = world, .exchange = alike});
  }
  for (const auto& counts : {std::vector<int64_t>{}, uneven(world, 50000)})
    if (shares) {
      const Case c{.op = ZR_ALL_GATHER, .flags = ZR_COLL_SHARED, .world = world, .counts = counts, .part = 50000};
      all.push_back(c);
      all.back().in_place = true;
    }
  return all;
}

std::string text_of(const Case& c) {
  return zr::testing::text_of(c, Home::own) + ", counts " + testing::PrintToString(c.counts);
}

// The operation as a rank submits it. All ranks have the same counts of an all_to_all.
struct Submitted {
  Submitted(const Case& c, int rank, void* src, void* dst, uint64_t fingerprint)
      : coll(coll_of(c, rank, src, dst, fingerprint)) {
    if (c.exchange.empty()) return;
    from.assign(c.exchange.size(), c.sent(0, rank));
    coll.counts = c.exchange[0].data();
    coll.recv_counts = from.data();
  }
  Submitted(const Submitted&) = delete;
  zr_coll coll;
  std::vector<int64_t> from;
};

class CommMpiTrafficTest : public testing::TestWithParam<Job> {
 protected:
  CommMpiTrafficTest()
      : hosts_(hosts_of(GetParam().ranks)), cases_(traffic_cases(world(), GetParam().quantizes, shares())) {}
  int world() const { return static_cast<int>(hosts_.size()); }
  // Whether the ranks of a host can share weights.
  static bool shares() {
    const std::vector<int32_t>& ranks = GetParam().ranks;
    return GetParam().quantizes && ranks.size() > 1 && std::ranges::max(ranks) > 1;
  }
  // The bytes that this rank sends to each rank, case by case.
  std::vector<int64_t> sent(RawComm& comm);
  // `sent`: of all ranks.
  void compare(const zr::host::plugin::Instance& plugin, const std::vector<int64_t>& sent) const;

  const std::vector<int> hosts_;
  const std::vector<Case> cases_;
};

std::vector<int64_t> CommMpiTrafficTest::sent(RawComm& comm) {
  std::vector<char> src(static_cast<std::size_t>(8 * (2 * kPiece + 1000) * world())), dst(src.size());
  std::vector<int64_t> bytes, before = mpi_bytes_sent(world());
  uint64_t number = 0;
  for (const Case& c : cases_) {
    const int64_t own = c.in_place && c.op == ZR_ALL_GATHER ? c.start(comm.rank()) * width_of(c.src) : 0;
    comm.run(Submitted(c, comm.rank(), c.in_place ? dst.data() + own : src.data(), dst.data(), ++number).coll);
    const std::vector<int64_t> after = mpi_bytes_sent(world());
    for (std::size_t rank = 0; rank < after.size(); ++rank) bytes.push_back(after[rank] - before[rank]);
    before = after;
  }
  return bytes;
}

void CommMpiTrafficTest::compare(const zr::host::plugin::Instance& plugin, const std::vector<int64_t>& sent) const {
  // Addresses without memory.
  const auto dst = reinterpret_cast<char*>(uintptr_t{1} << 40), src = reinterpret_cast<char*>(uintptr_t{1} << 41);
  const auto ranks = hosts_.size();
  for (std::size_t i = 0; i < cases_.size(); ++i) {
    PlannedTraffic counted{std::vector<uint64_t>(GetParam().ranks.size()),
                           std::vector<uint64_t>(GetParam().ranks.size())};
    for (std::size_t from = 0; from < ranks; ++from)
      for (std::size_t to = 0; to < ranks; ++to) {
        const auto bytes = static_cast<uint64_t>(sent[(from * cases_.size() + i) * ranks + to]);
        const auto home = static_cast<std::size_t>(hosts_[from]), other = static_cast<std::size_t>(hosts_[to]);
        (home == other ? counted.inside : counted.sent[home]) += bytes;
        if (home != other) counted.received[other] += bytes;
      }
    const Submitted submitted(cases_[i], 0, cases_[i].in_place ? dst : src, dst, 1);
    const PlannedTraffic planned = planned_traffic(plugin, submitted.coll, GetParam().ranks);
    ASSERT_EQ(planned.code, ZR_OK) << planned.text << ": " << text_of(cases_[i]);
    ASSERT_EQ(planned.sent, counted.sent) << text_of(cases_[i]);
    ASSERT_EQ(planned.received, counted.received) << text_of(cases_[i]);
    // Ranks of a host exchange messages, or they use shared memory.
    if (counted.inside > 0) {
      ASSERT_EQ(planned.inside, counted.inside) << text_of(cases_[i]);
    }
  }
}

TEST_P(CommMpiTrafficTest, IsWhatTheRanksSend) {
  on_mpi_ranks(
      world(),
      [&](CommRig& rig) {
        RawComm comm(rig);
        std::vector<int64_t> own = sent(comm), all(own.size() * hosts_.size());
        comm.run(zr::all_gather(view(own.data(), static_cast<int64_t>(own.size()), ZR_I64),
                                view(all.data(), static_cast<int64_t>(all.size()), ZR_I64), "bytes"));
        EXPECT_GT(std::accumulate(all.begin(), all.end(), int64_t{0}), 0);
        EXPECT_LE(longest_buffered_message(), 65536);
        if (comm.rank() == 0) compare(rig.instance(), all);
      },
      GetParam().keys, hosts_);
}

TEST(CommMpiTrafficErrorsTest, FailsAsTheCollectiveDoes) {
  on_mpi_ranks(2,
               [](CommRig& rig) {
                 RawComm comm(rig);
                 std::vector<float> x(1000);
                 zr_coll coll = zr::all_reduce(view(x.data(), 1000), view(x.data(), 1000), "g");
                 coll.flags = ZR_COLL_INT8;
                 EXPECT_EQ(comm.submit(coll), ZR_UNSUPPORTED);
                 const PlannedTraffic planned = planned_traffic(rig.instance(), coll, {1, 1});
                 EXPECT_EQ(planned.code, ZR_UNSUPPORTED);
                 EXPECT_EQ(planned.text, comm.said());
                 comm.run(zr::barrier("end"));
               },
               "hierarchy = false\n", {0, 1});
}

constexpr const char* kEagerLimit = "OMPI_MCA_btl_tcp_eager_limit";

// The value that OpenMPI uses for messages over TCP; -1: it has none.
int eager_limit() {
  int level = 0, index = 0, count = 0;
  unsigned long limit = 0;
  MPI_T_cvar_handle handle{};
  EXPECT_EQ(MPI_T_init_thread(MPI_THREAD_MULTIPLE, &level), MPI_SUCCESS);
  if (MPI_T_cvar_get_index("btl_tcp_eager_limit", &index) != MPI_SUCCESS) return -1;
  EXPECT_EQ(MPI_T_cvar_handle_alloc(index, nullptr, &handle, &count), MPI_SUCCESS);
  EXPECT_EQ(MPI_T_cvar_read(handle, &limit), MPI_SUCCESS);
  MPI_T_cvar_handle_free(&handle);
  MPI_T_finalize();
  return static_cast<int>(limit);
}

TEST(CommMpiEagerLimitTest, IsAboveAPieceOfAReduction) {
  if (!std::getenv("OMPI_COMM_WORLD_RANK")) ::unsetenv(kEagerLimit);
  on_mpi_ranks(2, [](CommRig& rig) {
    RawComm comm(rig);
    EXPECT_EQ(eager_limit(), 532480);
    EXPECT_EQ(std::getenv(kEagerLimit), nullptr);  // child processes do not inherit it
    comm.run(zr::barrier("end"));
  });
}

TEST(CommMpiEagerLimitTest, IsTheUsersIfThereIsOne) {
  if (!std::getenv("OMPI_COMM_WORLD_RANK")) ::setenv(kEagerLimit, "100000", 1);
  on_mpi_ranks(2, [](CommRig& rig) {
    RawComm comm(rig);
    EXPECT_EQ(eager_limit(), 100000);
    comm.run(zr::barrier("end"));
  });
  ::unsetenv(kEagerLimit);
}

std::string job_text(const testing::TestParamInfo<Job>& info) {
  std::string name = info.param.quantizes ? "On" : "WithoutHierarchyOn";
  for (const int ranks : info.param.ranks) name += std::to_string(ranks);
  return name + (info.param.keys.empty() ? "ByDefault" : "");
}
INSTANTIATE_TEST_SUITE_P(Jobs, CommMpiTrafficTest,
                         testing::Values(Job{{2, 2}, kAllSizes}, Job{{2, 2}, ""}, Job{{4}, kAllSizes},
                                         Job{{2, 2}, "hierarchy = false\n", false}),
                         job_text);
INSTANTIATE_TEST_SUITE_P(SLOW_Jobs, CommMpiTrafficTest,
                         testing::Values(Job{{1, 3}, kAllSizes}, Job{{1, 1, 2}, kAllSizes}, Job{{3, 1}, ""},
                                         Job{{1, 1, 1}, kAllSizes}, Job{{2, 2, 2}, kAllSizes}),
                         job_text);

}  // namespace
