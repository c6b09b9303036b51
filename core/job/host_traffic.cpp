#include "job/host_traffic.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "base/error.hpp"
#include "base/operation.hpp"
#include "comm/coll.hpp"
#include "comm/open_communicator.hpp"
#include "plugin/extension.hpp"

namespace zr::host::job {

uint64_t HostTraffic::between() const { return std::accumulate(sent.begin(), sent.end(), uint64_t{0}); }

uint64_t HostTraffic::largest() const {
  uint64_t largest = 0;
  for (const std::vector<uint64_t>* bytes : {&sent, &received})
    for (const uint64_t of_host : *bytes) largest = std::max(largest, of_host);
  return largest;
}

TrafficCounter::TrafficCounter(const plugin::Instance& communicator, const HostSizes& hosts,
                               const InexactCollectives& flags)
    : communicator_(communicator),
      hosts_(hosts),
      flags_(flags),
      api_(plugin::extension_of<zr_communicator_plan>(communicator.component(), "zr.communicator.plan/1",
                                                      ZR_SIZE_0_9(zr_communicator_plan),
                                                      {offsetof(zr_communicator_plan, open_bytes)})),
      caps_(comm::communicator_caps(communicator)) {
  if (!api_ || !api_->traffic)
    sum_.problem =
        fmt::format("communicator '{}' does not plan the bytes of its collectives", communicator.component().table->id);
  sum_.sent.assign(hosts.size(), 0);
  sum_.received.assign(hosts.size(), 0);
}

void TrafficCounter::add(const zr_coll& coll) {
  if (!sum_.problem.empty()) return;
  zr_coll given = coll;
  given.size = sizeof given;
  given.flags = comm::flags_of_job(coll.flags, flags_.gradients, flags_.weights);
  if (!comm::is_native(caps_, given)) {
    sum_.problem = fmt::format("communicator '{}' does not offer this {}, which the engine composes",
                               communicator_.component().table->id, name_of_op(coll.op));
    return;
  }
  zr_traffic traffic{sizeof(zr_traffic),   static_cast<uint32_t>(hosts_.size()),
                     hosts_.data(),        sum_.sent.data(),
                     sum_.received.data(), 0};
  CallError error;
  const zr_code code =
      call_plugin(&error, [&] { return api_->traffic(communicator_.self(), &given, &traffic, &error); });
  if (code == ZR_UNSUPPORTED) {
    sum_.problem = plugin_text(error);
    return;
  }
  check(code, error, communicator_.call_text("traffic"));
  sum_.inside += traffic.inside;
}

}  // namespace zr::host::job
