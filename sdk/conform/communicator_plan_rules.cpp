// ZR-C24: the bytes that a communicator plans for collectives.
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "conform/communicator_run.hpp"
#include "conform/memory.hpp"
#include "conform/rule.hpp"
#include "zr/abi/communicator_extensions.h"

namespace zr::conform {

namespace {

constexpr int64_t kPart = 20000;  // elements per rank
constexpr int kMostRanks = 6;

// The sums to which traffic() adds.
struct Sums {
  explicit Sums(std::size_t hosts, uint64_t value) : sent(hosts, value), received(hosts, value), inside(value) {}
  bool operator==(const Sums&) const = default;
  std::vector<uint64_t> sent, received;  // by host
  uint64_t inside;
};

class TrafficCheck {
 public:
  TrafficCheck(const zr_communicator_plan& plan, Instance& instance) : plan_(plan), instance_(instance) {
    memory_.withdraw();
  }
  // Of one collective of a job with so many ranks on each host.
  void run(CollectiveCase one, const std::vector<int32_t>& ranks) {
    one.world = std::accumulate(ranks.begin(), ranks.end(), 0);
    one.parts.assign(static_cast<std::size_t>(one.world), kPart);
    constexpr uint64_t kBefore = 1000;
    Sums first(ranks.size(), 0), second(ranks.size(), kBefore);
    if (!add(one, ranks, first)) return;
    require(add(one, ranks, second), text(one, ranks), " is ZR_UNSUPPORTED after ZR_OK");
    for (std::size_t host = 0; host < ranks.size(); ++host)
      require(
          first.sent[host] + kBefore == second.sent[host] && first.received[host] + kBefore == second.received[host],
          text(one, ranks), " does not add the same bytes twice");
    require(first.inside + kBefore == second.inside, text(one, ranks), " does not add the same bytes twice");
    const auto sum = [](const std::vector<uint64_t>& list) {
      return std::accumulate(list.begin(), list.end(), uint64_t{0});
    };
    require(sum(first.sent) == sum(first.received), text(one, ranks), " adds ", sum(first.sent),
            " bytes that are sent, but ", sum(first.received), " that are received");
    require(ranks.size() > 1 || sum(first.sent) == 0, text(one, ranks), " adds bytes between hosts");
  }

 private:
  static std::string text(const CollectiveCase& one, const std::vector<int32_t>& ranks) {
    return concat("traffic() of ", one.text(), " on ", ranks.size(), ranks.size() == 1 ? " host" : " hosts");
  }
  // False if it is unknown.
  bool add(const CollectiveCase& one, const std::vector<int32_t>& ranks, Sums& sums) {
    zr_coll coll{};
    coll.size = sizeof coll;
    coll.op = one.op;
    coll.reduce = one.reduce;
    coll.flags = one.flags;
    coll.src = view_of(memory_.data(), one.src_count(0), ZR_U8);
    coll.dst = view_of(memory_.data() + kPart * kMostRanks, one.dst_count(0), ZR_U8);
    if (one.passes_counts) coll.counts = one.parts.data();
    zr_traffic given{sizeof given,         static_cast<uint32_t>(ranks.size()),
                     ranks.data(),         sums.sent.data(),
                     sums.received.data(), sums.inside};
    const Sums before = sums;
    const Answer answer =
        call("traffic()", [&](zr_error* error) { return plan_.traffic(instance_.self(), &coll, &given, error); });
    sums.inside = given.inside;
    if (answer.ok()) return true;
    require(answer.code == ZR_UNSUPPORTED, text(one, ranks), " ", answer.said(), "; expected ZR_OK or ZR_UNSUPPORTED");
    require(!answer.text.empty(), text(one, ranks), " returned ZR_UNSUPPORTED without a text");
    require(sums == before, text(one, ranks), " returned ZR_UNSUPPORTED, but adds bytes");
    return false;
  }

  const zr_communicator_plan& plan_;
  Instance& instance_;
  const Pages memory_{static_cast<std::size_t>(2 * kPart * kMostRanks)};  // of src and dst
};

void plans_its_traffic(Case& test) {
  TestHost host;
  Instance instance(test, host);
  const auto* plan = extension_of<zr_communicator_plan>(instance, "zr.communicator.plan/1");
  if (!plan) skip("it has no extension zr.communicator.plan/1");
  require(plan->size >= ZR_SIZE_0_9(zr_communicator_plan), "its table is incomplete");
  if (!plan->traffic) skip("traffic is NULL");
  const zr_comm_caps caps = caps_of(instance);
  test.note("traffic()");
  TrafficCheck check(*plan, instance);
  for (uint32_t op = ZR_ALL_REDUCE; op <= ZR_ALL_TO_ALL; ++op) {
    if (!has(caps.ops, op) || !has(caps.dtypes, ZR_U8)) continue;
    for (const auto& ranks : std::vector<std::vector<int32_t>>{{1}, {4}, {2, 2}, {1, 3}, {2, 1, 3}, {1, 1, 1}})
      for (const bool passes_counts : {false, true})
        check.run({.op = op, .src = ZR_U8, .dst = ZR_U8, .passes_counts = passes_counts}, ranks);
  }
}

constexpr Rule kRules[] = {
    {"ZR-C24", "communicator",
     "traffic() of zr.communicator.plan/1 adds as many sent as received bytes, none on one host, and reads no views.",
     plans_its_traffic},
};

}  // namespace

std::span<const Rule> communicator_plan_rules() { return kRules; }

}  // namespace zr::conform
