// comm_mpi with more than 2^31 elements and bytes, which neither MPI nor `int` can count. Memory is written completely,
// and compared at samples: everywhere, and all elements near 2^31, 2^32 and the ends.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <string>

#include "multirank/comm/mpi_ranks.hpp"

namespace {

using namespace zr::testing;

constexpr int64_t kGiB = int64_t{1} << 30;

// -1 if the kernel does not say it.
int64_t available_bytes() {
  std::ifstream info("/proc/meminfo");
  for (std::string word; info >> word;)
    if (int64_t kib = 0; word == "MemAvailable:" && info >> kib) return kib << 10;
  return -1;
}

// A number from 0 to 127 that depends on all bits of i.
unsigned number(int64_t i, int rank = 0) {
  return static_cast<unsigned>(
      (static_cast<uint64_t>(i) + static_cast<uint64_t>(rank) * 1000003) * 0x9e3779b97f4a7c15u >> 57);
}

uint16_t bf16(unsigned value) {
  return static_cast<uint16_t>(std::bit_cast<uint32_t>(static_cast<float>(value)) >> 16);
}

// Calls `is_right` for samples of the elements from first to first + count, and names the first one that is not.
void expect_samples(int64_t first, int64_t count, const std::function<bool(int64_t)>& is_right, const char* what) {
  constexpr int64_t kNear = 1 << 16, kStride = 4099;
  const auto all_right = [&](int64_t begin, int64_t end, int64_t stride) {
    begin = std::max(begin, first);
    end = std::min(end, first + count);
    for (int64_t i = begin; i < end; i += stride)
      if (!is_right(i)) {
        ADD_FAILURE() << what << ": element " << i << " is wrong";
        return;
      }
  };
  all_right(first, first + count, kStride);
  for (const int64_t at : {first, 2 * kGiB, 4 * kGiB, first + count}) all_right(at - kNear, at + kNear, 1);
}

// Blocks until no other process runs such a test.
void wait_for_others() {
  static const int program = ::open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
  ::flock(program, LOCK_EX);
}

class CommMpiLargeTest : public testing::Test {
 protected:
  // Hosts as of on_mpi_ranks(). Skips the test if its ranks, all together, need more memory than there is.
  void on_ranks(int64_t bytes, const std::vector<int>& hosts, const std::function<void(RawComm&)>& body) {
    const bool is_rank = std::getenv("OMPI_COMM_WORLD_RANK");
    if (!is_rank) wait_for_others();
    if (const int64_t available = available_bytes(); !is_rank && available < bytes + 2 * kGiB)
      GTEST_SKIP() << "needs " << (bytes + 2 * kGiB) / kGiB << " GiB of memory, but " << available / kGiB
                   << " GiB are available";
    on_mpi_ranks(
        static_cast<int>(hosts.size()),
        [&](CommRig& rig) {
          RawComm comm(rig);
          body(comm);
        },
        {}, hosts);
  }

  // In place. The last part is small, and begins after element 2^31.
  static void gather_bytes(RawComm& comm, int64_t total) {
    constexpr int64_t kLast = (32 << 20) + 1000;
    std::vector<int64_t> counts(static_cast<std::size_t>(comm.world()), (total - kLast) / (comm.world() - 1));
    counts.back() = kLast + (total - kLast) % (comm.world() - 1);
    int64_t first = 0;
    for (int rank = 0; rank < comm.rank(); ++rank) first += counts[static_cast<std::size_t>(rank)];
    const int64_t count = counts[static_cast<std::size_t>(comm.rank())];
    auto* const all = static_cast<uint8_t*>(comm.allocate(total));
    for (int64_t i = first; i < first + count; ++i) all[i] = static_cast<uint8_t>(number(i));
    comm.run(zr::all_gather(view(all + first, count, ZR_U8), view(all, total, ZR_U8), "gather", counts.data()));
    expect_samples(
        0, total, [&](int64_t i) { return all[i] == number(i); }, "all_gather");
    comm.free(all);
  }

  // Sums of bf16 in place, which are exact. scatters: each rank gets a part.
  static void sum_bf16(RawComm& comm, int64_t total, bool scatters) {
    auto* const all = static_cast<uint16_t*>(comm.allocate(total * 2));
    uint16_t table[128];
    for (unsigned i = 0; i < 128; ++i) table[i] = bf16(i / 2);
    for (int64_t i = 0; i < total; ++i) all[i] = table[number(i, comm.rank())];
    const auto is_sum = [&](int64_t i) {
      unsigned sum = 0;
      for (int rank = 0; rank < comm.world(); ++rank) sum += number(i, rank) / 2;
      return all[i] == bf16(sum);
    };
    const int64_t count = scatters ? total / comm.world() : total, first = scatters ? comm.rank() * count : 0;
    const zr_view whole = view(all, total, ZR_BF16), own = view(all + first, count, ZR_BF16);
    comm.run(scatters ? zr::reduce_scatter(whole, own, "sum") : zr::all_reduce(whole, whole, "sum"));
    expect_samples(first, count, is_sum, scatters ? "reduce_scatter" : "all_reduce");
    comm.free(all);
  }
};

TEST_F(CommMpiLargeTest, SLOW_GathersMoreThanTwoToThe32Elements) {
  on_ranks(9 * kGiB, {0, 1}, [](RawComm& comm) { gather_bytes(comm, 4 * kGiB + 777); });
}

TEST_F(CommMpiLargeTest, SLOW_AllReducesMoreThanTwoToThe31Elements) {
  on_ranks(9 * kGiB, {0, 1}, [](RawComm& comm) { sum_bf16(comm, 2 * kGiB + 1234, false); });
}

// More than 2^31 elements are gathered, and 2^31 bytes reduced, through hosts of which one has two ranks.
TEST_F(CommMpiLargeTest, SLOW_PassesMoreThanTwoToThe31BytesThroughHosts) {
  on_ranks(7 * kGiB, {0, 0, 1}, [](RawComm& comm) {
    gather_bytes(comm, 2 * kGiB + (64 << 20) + 1);
    const int64_t total = kGiB + (64 << 20);
    sum_bf16(comm, total - total % 3, true);
    sum_bf16(comm, total, false);
  });
}

}  // namespace
