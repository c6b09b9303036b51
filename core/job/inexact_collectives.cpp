#include "job/inexact_collectives.hpp"

#include <fmt/format.h>

#include <string>
#include <vector>

#include "base/error.hpp"
#include "base/log.hpp"
#include "comm/open_communicator.hpp"

namespace zr::host::job {

namespace {
using config::ValueForm;

uint32_t flag_of(ValueForm form) {
  return form == ValueForm::int8 ? uint32_t{ZR_COLL_INT8} : form == ValueForm::int4 ? uint32_t{ZR_COLL_INT4} : 0u;
}

struct Request {  // of a key
  std::string key, value;
  config::Origin origin;
  uint32_t flag, needed;  // of the collective; of the communicator's capabilities
  std::string what() const { return fmt::format("{} = {} ({})", key, value, origin.text()); }
};

std::vector<Request> requests_of(const config::CommunicatorConfig& keys) {
  std::vector<Request> requests;
  const auto name = [](ValueForm form) { return form == ValueForm::int8 ? "\"int8\"" : "\"int4\""; };
  if (!keys.exact)
    requests.push_back({keys.exact.key, "false", keys.exact.origin, ZR_COLL_ANY_ORDER, ZR_COMM_ANY_ORDER});
  for (const config::Setting<ValueForm>* form : {&keys.gradients, &keys.weights})
    if (form->value != ValueForm::exact)
      requests.push_back({form->key, name(*form), form->origin, flag_of(*form), ZR_COMM_QUANTIZED});
  return requests;
}

}  // namespace

bool rounds_weights(const config::JobConfig& config, const plugin::Instance* communicator) {
  return communicator && config.communicator().weights != ValueForm::exact &&
         (comm::communicator_caps(*communicator).flags & ZR_COMM_QUANTIZED);
}

InexactCollectives inexact_collectives(const config::JobConfig& config, const plan::MemoryPlan& plan,
                                       const plugin::Instance* communicator, bool one_host, bool warn) {
  InexactCollectives chosen;
  const config::CommunicatorConfig& keys = config.communicator();
  if (!communicator || plan.input.world == 1) {
    for (const Request& request : warn ? requests_of(keys) : std::vector<Request>())
      log(ZR_LOG_WARN, request.what() + " has no effect, because the job has one rank");
    return chosen;
  }
  const uint32_t caps = comm::communicator_caps(*communicator).flags;
  for (const Request& request : requests_of(keys)) {
    const bool is_supported = (caps & request.needed) != 0;
    const char* const id = communicator->component().table->id;
    if (!is_supported && !one_host)
      fail_user(
          fmt::format("{}: communicator '{}', as it is configured, passes on exact values only; choose communicator = "
                      "\"auto\" without keys in [communicator.{}], or remove the key",
                      request.what(), id, id));
    // Values are rounded between hosts only, but sums may be added in any order on one host too.
    const bool has_effect = is_supported && !(one_host && request.needed == ZR_COMM_QUANTIZED);
    if (!has_effect && warn) log(ZR_LOG_WARN, request.what() + " has no effect, because all ranks are on one host");
    if (!has_effect) continue;
    (request.key == keys.weights.key ? chosen.weights : chosen.gradients) |= request.flag;
  }
  if (chosen.weights && plan.sharded_parameters().empty())
    fail_user(
        fmt::format("{} = \"int8\" ({}): every rank has all weights under this job's strategy, so none are "
                    "gathered for forward and backward; choose a strategy that shards weights of this model, or "
                    "a smaller persistence_threshold of the strategy, or remove the key",
                    keys.weights.key, keys.weights.origin.text()));
  return chosen;
}

}  // namespace zr::host::job
