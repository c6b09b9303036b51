// ZR-C25 to C31: collectives that need not be exact, of communicators with ZR_COMM_QUANTIZED or ZR_COMM_ANY_ORDER.
// Ranks pretend to be on several hosts, because values are rounded only where they pass between hosts.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "conform/communicator_run.hpp"
#include "conform/rule.hpp"
#include "zr/float_cast.hpp"
#include "zr/names.hpp"

namespace zr::conform {

namespace {

constexpr int64_t kBlock = 128;  // elements that have one scale, at most (docs/numerics.md, "Inexact collectives")
const std::vector<int> kWorlds{2, 3, 4};

// Two hosts.
void pretend_hosts(int rank, int world) {
  ::setenv("ZR_HOST_ID", std::to_string(host_of_rank(rank, world)).c_str(), 1);
}

// The value of an element: of a rank's part of a gather, or of all of its src of a sum.
using Value = std::function<float(int rank, int64_t element)>;

float rounded(zr_dtype dtype, float value) {
  return dtype == ZR_BF16 ? from_bf16(to_bf16(value)) : dtype == ZR_F16 ? from_f16(to_f16(value)) : value;
}
std::string stored(zr_dtype dtype, const std::vector<float>& values) {
  std::string bytes(values.size() * static_cast<std::size_t>(size_of(dtype)), 0);
  for (std::size_t i = 0; i < values.size(); ++i) {
    const uint16_t half = dtype == ZR_BF16 ? to_bf16(values[i]) : to_f16(values[i]);
    if (dtype == ZR_F32)
      std::memcpy(bytes.data() + i * 4, &values[i], 4);
    else
      std::memcpy(bytes.data() + i * 2, &half, 2);
  }
  return bytes;
}
std::vector<float> loaded(zr_dtype dtype, const std::string& bytes) {
  std::vector<float> values(bytes.size() / static_cast<std::size_t>(size_of(dtype)));
  for (std::size_t i = 0; i < values.size(); ++i) {
    uint16_t half = 0;
    if (dtype != ZR_F32) std::memcpy(&half, bytes.data() + i * 2, 2);
    if (dtype == ZR_F32)
      std::memcpy(&values[i], bytes.data() + i * 4, 4);
    else
      values[i] = dtype == ZR_BF16 ? from_bf16(half) : from_f16(half);
  }
  return values;
}

bool gathers(const CollectiveCase& one) { return one.op == ZR_ALL_GATHER || one.op == ZR_GATHER; }
int levels_of(const CollectiveCase& one) { return one.flags & ZR_COLL_INT4 ? 7 : 127; }

// In (-1, 1), with another magnitude in every block.
float random_value(uint64_t seed, int rank, int64_t i) {
  uint64_t x =
      seed + static_cast<uint64_t>(i) * 0x9e3779b97f4a7c15u + static_cast<uint64_t>(rank) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 31)) * 0x94d049bb133111ebu;
  return std::ldexp(static_cast<float>(static_cast<int32_t>(x >> 32)) * 0x1p-31f, static_cast<int>(i / kBlock % 9) - 8);
}
// Values that no form rounds: 0, and the largest magnitude of every block, in all parts.
float level_value(int levels, int64_t i) {
  if (i / 700 % 3 == 2 || i % 5 == 3) return 0;
  return static_cast<float>(i % 2 ? levels : -levels) * 0x1p-3f;
}

// One operation of one rank with these values.
class Inexact {
 public:
  Inexact(const OpenComm& comm, const CollectiveCase& one, const Value& value) : comm_(comm), one_(one) {
    for (int rank = 0; rank < one.world; ++rank) {
      std::vector<float>& all = sources_.emplace_back(static_cast<std::size_t>(one.src_count(rank)));
      for (std::size_t i = 0; i < all.size(); ++i) all[i] = rounded(one.src, value(rank, static_cast<int64_t>(i)));
    }
  }
  CaseRun run(bool completion = false) const {
    return run_case(comm_, one_, stored(one_.src, sources_[static_cast<std::size_t>(comm_.rank())]), completion);
  }
  // Calls fn(index in dst, the sources of the element with the index there) for all elements of dst.
  template <class F>
  void for_each(F&& fn) const {
    const int64_t n = one_.dst_count(comm_.rank());
    const int64_t first = one_.op == ZR_REDUCE_SCATTER ? one_.start(comm_.rank()) : 0;
    int rank = 0;
    for (int64_t i = 0; i < n; ++i) {
      while (gathers(one_) && i >= one_.start(rank) + one_.parts[static_cast<std::size_t>(rank)]) ++rank;
      if (gathers(one_))
        fn(static_cast<std::size_t>(i), rank, rank + 1, i - one_.start(rank));
      else
        fn(static_cast<std::size_t>(i), 0, one_.world, first + i);
    }
  }
  float at(int rank, int64_t element) const {
    return sources_[static_cast<std::size_t>(rank)][static_cast<std::size_t>(element)];
  }
  // The largest magnitude that can be in a block with the element.
  float largest_near(int rank, int64_t element) const {
    const std::vector<float>& all = sources_[static_cast<std::size_t>(rank)];
    float most = 0;
    for (int64_t i = std::max<int64_t>(element - kBlock + 1, 0);
         i < std::min(element + kBlock, static_cast<int64_t>(all.size())); ++i)
      most = std::max(most, std::fabs(all[static_cast<std::size_t>(i)]));
    return most;
  }

 private:
  const OpenComm& comm_;
  const CollectiveCase& one_;
  std::vector<std::vector<float>> sources_;  // by rank
};

constexpr uint32_t kQuantized = uint32_t{ZR_COLL_INT8} | ZR_COLL_INT4, kAnyOrder = ZR_COLL_ANY_ORDER;
constexpr uint32_t kInexact = kQuantized | kAnyOrder;

constexpr std::size_t kUnevenCut = 2;  // of cuts_of()

// Elements by rank: few and many.
std::vector<std::vector<int64_t>> cuts_of(int world) {
  std::vector<std::vector<int64_t>> cuts(4);
  constexpr int64_t kUneven[] = {1131, 0, 127, 128};
  for (int rank = 0; rank < world; ++rank) {
    cuts[0].push_back(1);
    cuts[1].push_back(300);
    cuts[kUnevenCut].push_back(kUneven[rank % 4]);
    cuts[3].push_back(20000);
  }
  return cuts;
}

// Adds the operations that gradients and weights need and for which the communicator accepts the flag.
void add_cases_of_flag(std::vector<CollectiveCase>& cases, const zr_comm_caps& caps, int world, uint32_t flag) {
  const std::vector<std::vector<int64_t>> cuts = cuts_of(world);
  for (const uint32_t op : {ZR_ALL_REDUCE, ZR_REDUCE_SCATTER, ZR_REDUCE, ZR_ALL_GATHER, ZR_GATHER}) {
    if (!has(caps.ops, op) || (flag == ZR_COLL_ANY_ORDER && !is_reduction(op))) continue;
    for (const zr_dtype dtype : {ZR_F32, ZR_BF16, ZR_F16}) {
      if (!has(caps.dtypes, static_cast<uint64_t>(dtype))) continue;
      for (std::size_t cut = 0; cut < cuts.size(); ++cut)
        cases.push_back({.op = op,
                         .flags = flag,
                         .src = dtype,
                         .dst = dtype,
                         .world = world,
                         .root = world - 1,
                         .parts = cuts[cut],
                         .passes_counts = cut == kUnevenCut && op != ZR_ALL_REDUCE && op != ZR_REDUCE});
    }
  }
}

// The operations with few and many elements, each with one of the flags that the communicator accepts. Skips the rule
// if it accepts none of them: the host then passes none to it.
std::vector<CollectiveCase> inexact_cases(const zr_comm_caps& caps, int world, uint32_t flags) {
  std::vector<CollectiveCase> cases;
  for (const uint32_t flag : {ZR_COLL_INT8, ZR_COLL_INT4, ZR_COLL_ANY_ORDER}) {
    const uint32_t needed = flag == ZR_COLL_ANY_ORDER ? ZR_COMM_ANY_ORDER : ZR_COMM_QUANTIZED;
    if ((flags & flag) && (caps.flags & needed)) add_cases_of_flag(cases, caps, world, flag);
  }
  if (cases.empty())
    skip("it does not announce ", flags & kQuantized ? "ZR_COMM_QUANTIZED" : "", flags == kInexact ? " or " : "",
         flags & kAnyOrder ? "ZR_COMM_ANY_ORDER" : "", ": the host passes no such flags to it");
  return cases;
}

// Runs `body` with every operation that may have one of the flags.
void for_each_operation(Case& test, uint32_t flags, const std::function<void(OpenComm&, const CollectiveCase&)>& body) {
  on_comms(
      test, kWorlds,
      [&](OpenComm& comm, Instance& instance) {
        for (const CollectiveCase& one : inexact_cases(caps_of(instance), comm.world(), flags)) {
          test.note(one.text());
          body(comm, one);
        }
      },
      pretend_hosts);
}

// One rounding to the dtype of the result.
float dtype_error(zr_dtype dtype) { return dtype == ZR_F32 ? 0x1p-23f : dtype == ZR_BF16 ? 0x1p-8f : 0x1p-11f; }

void sums_in_any_order_are_right(Case& test) {
  for_each_operation(test, kAnyOrder, [&](OpenComm& comm, const CollectiveCase& one) {
    check_case(comm, one, {.seed = test.seed() % 100003});
    const Inexact inexact(comm, one, [&](int rank, int64_t i) { return random_value(test.seed(), rank, i); });
    const std::vector<float> result = loaded(one.dst, inexact.run().dst);
    inexact.for_each([&](std::size_t at, int first, int last, int64_t element) {
      double sum = 0, size = 0;
      for (int rank = first; rank < last; ++rank)
        sum += inexact.at(rank, element), size += std::fabs(inexact.at(rank, element));
      const double bound = size * (dtype_error(one.dst) + one.world * 0x1p-23);
      if (!(std::fabs(result[at] - sum) <= bound))
        fail(one.text(), ": element ", at, " is ", result[at], ", not ", sum);
    });
  });
}

void exact_values_are_kept(Case& test) {
  for_each_operation(test, kQuantized, [&](OpenComm& comm, const CollectiveCase& one) {
    for (const bool zeros : {true, false})
      for (const bool in_place : {false, true}) {
        CollectiveCase now = one;
        now.in_place = in_place;
        const Inexact inexact(comm, now, [&](int, int64_t i) { return zeros ? 0.0f : level_value(levels_of(one), i); });
        const std::vector<float> result = loaded(one.dst, inexact.run().dst);
        inexact.for_each([&](std::size_t at, int first, int last, int64_t element) {
          const float exact = rounded(one.dst, inexact.at(first, element) * static_cast<float>(last - first));
          if (!(result[at] == exact))
            fail(now.text(), ": element ", at, " is ", result[at], ", not ", exact,
                 ", although values that are 0 or the largest magnitude of their block need no rounding");
        });
      }
  });
}

void rounds_to_the_nearest_level(Case& test) {
  for_each_operation(test, kQuantized, [&](OpenComm& comm, const CollectiveCase& one) {
    const Inexact inexact(comm, one, [&](int rank, int64_t i) { return random_value(test.seed(), rank, i); });
    const std::vector<float> result = loaded(one.dst, inexact.run().dst);
    const float level = 1.0f / static_cast<float>(levels_of(one));
    inexact.for_each([&](std::size_t at, int first, int last, int64_t element) {
      double sum = 0, largest = 0;
      for (int rank = first; rank < last; ++rank)
        sum += inexact.at(rank, element), largest += inexact.largest_near(rank, element);
      // Sums of hosts are rounded once each, and the result of an all_reduce once more.
      double bound = largest * level / 2;
      if (one.op == ZR_ALL_REDUCE) bound += (largest + bound) * level / 2;
      bound += (largest + bound) * (dtype_error(one.dst) + one.world * 0x1p-23);
      if (!(std::fabs(result[at] - sum) <= bound))
        fail(one.text(), ": element ", at, " is ", result[at], ", more than ", bound, " from ", sum);
    });
  });
}

void ranks_get_equal_results(Case& test) {
  for_each_operation(test, kInexact, [&](OpenComm& comm, const CollectiveCase& one) {
    if (one.op != ZR_ALL_REDUCE && one.op != ZR_ALL_GATHER) return;
    std::string own =
        Inexact(comm, one, [&](int rank, int64_t i) { return random_value(test.seed(), rank, i); }).run().dst;
    std::string all(own.size() * static_cast<std::size_t>(one.world), 0);
    comm.run(all_gather_of(own.data(), static_cast<int64_t>(own.size()), all.data(), one.world, ZR_U8));
    for (int rank = 0; rank < one.world; ++rank)
      require(all.compare(own.size() * static_cast<std::size_t>(rank), own.size(), own) == 0, one.text(), ": ranks ",
              comm.rank(), " and ", rank, " get different results");
  });
}

void runs_give_equal_results(Case& test) {
  const Store results;  // of the first run: a hash of each operation's dst, by rank
  for (const bool is_first : {true, false})
    on_comms(
        test, kWorlds,
        [&](OpenComm& comm, Instance& instance) {
          const std::vector<CollectiveCase> cases = inexact_cases(caps_of(instance), comm.world(), kInexact);
          std::string hashes, before;
          const std::string key = concat(comm.rank(), " of ", comm.world());
          if (!is_first) results.get(key, std::chrono::seconds(1), before);
          for (const CollectiveCase& one : cases) {
            test.note(one.text());
            const Inexact inexact(comm, one, [&](int rank, int64_t i) { return random_value(test.seed(), rank, i); });
            hashes += concat(std::hash<std::string>()(inexact.run(!is_first).dst), " ");
            require(is_first || before.compare(0, hashes.size(), hashes) == 0, one.text(),
                    " gives another result in another run");
          }
          if (is_first) results.put(key, hashes);
        },
        pretend_hosts);
}

void infinities_stay_visible(Case& test) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for_each_operation(test, kInexact, [&](OpenComm& comm, const CollectiveCase& one) {
    for (const float bad : {kInfinity, -kInfinity, std::nanf("")}) {
      const auto is_bad = [&](int rank, int64_t i) { return rank == one.world - 1 && i % 331 == 0; };
      const Inexact inexact(comm, one, [&](int rank, int64_t i) { return is_bad(rank, i) ? bad : 1.0f; });
      const std::vector<float> result = loaded(one.dst, inexact.run().dst);
      inexact.for_each([&](std::size_t at, int first, int last, int64_t element) {
        bool expected = false;
        for (int rank = first; rank < last; ++rank) expected |= is_bad(rank, element);
        if (expected && std::isfinite(result[at]))
          fail(one.text(), ": element ", at, " is ", result[at],
               ", although a rank's is not finite: the host would not notice the overflow");
      });
    }
  });
}

void inexact_operations_write_dst(Case& test) {
  for_each_operation(test, kInexact, [&](OpenComm& comm, const CollectiveCase& one) {
    for (const bool completion : {false, true}) {
      const Inexact inexact(comm, one, [&](int rank, int64_t i) { return random_value(test.seed(), rank, i); });
      require(inexact.run(completion).stayed_inside, one.text(), " changes src, or memory around its views");
    }
  });
}

constexpr Rule kRules[] = {
    {"ZR-C25", "communicator",
     "With ZR_COMM_ANY_ORDER, sums with ZR_COLL_ANY_ORDER differ by roundings of the order only.",
     sums_in_any_order_are_right},
    {"ZR-C26", "communicator",
     "With ZR_COMM_QUANTIZED, 8 and 4 bits keep zeros and the largest magnitudes of blocks exactly.",
     exact_values_are_kept},
    {"ZR-C27", "communicator",
     "Quantized values are rounded once, to the nearest level of their block of at most 128 elements.",
     rounds_to_the_nearest_level},
    {"ZR-C28", "communicator", "An inexact all_gather or all_reduce gives all ranks the same bits.",
     ranks_get_equal_results},
    {"ZR-C29", "communicator", "An inexact operation gives the same bits in every run.", runs_give_equal_results},
    {"ZR-C30", "communicator", "An element that is not finite is not finite after an inexact operation.",
     infinities_stay_visible},
    {"ZR-C31", "communicator", "An inexact operation writes its dst and nothing else, also with a completion.",
     inexact_operations_write_dst},
};

}  // namespace

std::span<const Rule> communicator_inexact_rules() { return kRules; }

}  // namespace zr::conform
