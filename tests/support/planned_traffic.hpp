// What a communicator plans for a collective: the bytes that the ranks transfer, through its C table.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "base/ledger.hpp"
#include "base/thread_pool.hpp"
#include "config/config.hpp"
#include "plugin/plugin_host.hpp"
#include "zr/abi/communicator_extensions.h"

namespace zr::testing {

struct PlannedTraffic {
  std::vector<uint64_t> sent, received;  // by host
  uint64_t inside = 0;
  zr_code code = ZR_OK;
  std::string text{};  // of an error
};

/// coll: as rank 0 submits it. ranks: of each host.
inline PlannedTraffic planned_traffic(const host::plugin::Instance& communicator, const zr_coll& coll,
                                      const std::vector<int32_t>& ranks) {
  PlannedTraffic planned{std::vector<uint64_t>(ranks.size()), std::vector<uint64_t>(ranks.size())};
  const auto* plan =
      static_cast<const zr_communicator_plan*>(communicator.component().table->extension("zr.communicator.plan/1"));
  zr_traffic sum{sizeof(zr_traffic),
                 static_cast<uint32_t>(ranks.size()),
                 ranks.data(),
                 planned.sent.data(),
                 planned.received.data(),
                 0};
  host::CallError error;
  planned.code = plan->traffic(communicator.self(), &coll, &sum, &error);
  planned.inside = sum.inside;
  planned.text = error.msg;
  return planned;
}

/// A communicator of this build that is not opened.
class PlanningCommunicator {
 public:
  /// keys: TOML lines of its table.
  explicit PlanningCommunicator(const std::string& id, const std::string& keys = {}) : pool_(1), host_(ledger_, pool_) {
    const host::plugin::Component component =
        host::plugin::Registry({ZR_BUILD_DIR "/plugins"}).load(host::plugin::Role::communicator, id, "plan.toml:1:1");
    const std::string table = "communicator." + id;
    const auto document = host::config::Document::parse(
        "[train]\nmicro_batch = 1\n[communicator]\nuse = \"" + id + "\"\n[" + table + "]\n" + keys, "plan.toml", {});
    config_ = document.check(host::config::keys_of(component.table->keys, component.table->n_keys, table), 1);
    instance_ = std::make_unique<host::plugin::Instance>(host_, component, config_, table);
  }
  PlannedTraffic of(const zr_coll& coll, const std::vector<int32_t>& ranks) const {
    return planned_traffic(*instance_, coll, ranks);
  }

 private:
  host::Ledger ledger_;
  host::ThreadPool pool_;
  host::plugin::PluginHost host_;
  host::config::JobConfig config_;
  std::unique_ptr<host::plugin::Instance> instance_;
};

}  // namespace zr::testing
