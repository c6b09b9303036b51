#include "control/job_services.hpp"

#include <fmt/format.h>

#include <cstring>

#include "base/error.hpp"
#include "control/protocol.hpp"

namespace zr::host::control {

struct JobServices::State {
  std::string run_folder;
  std::chrono::milliseconds timeout;
  zr_job_service job{};
  zr_store_service store{};
};

namespace {

JobServices::State& state_of(const zr_host* host) {
  return *plugin::PluginHost::from_abi(host).context<JobServices::State>();
}
Control& control_of(const zr_host* host) { return *plugin::PluginHost::from_abi(host).context<Control>(); }

zr_code put(const zr_host* host, const char* key, const void* value, uint64_t bytes, zr_error* error) try {
  for (const std::string& problem : {protocol::key_problem(key), protocol::value_problem(key, bytes)})
    if (!problem.empty()) return fill_error(error, ZR_INVALID, problem);
  control_of(host).put(key, std::string(static_cast<const char*>(value), bytes));
  return ZR_OK;
} catch (const std::exception& failure) {
  return fill_error(error, ZR_COMM, failure.what());
}

zr_code get(const zr_host* host, const char* key, int64_t timeout_ns, void* out, uint64_t* bytes, zr_error* error) try {
  if (const std::string problem = protocol::key_problem(key); !problem.empty())
    return fill_error(error, ZR_INVALID, problem);
  const std::string value = control_of(host).get(
      key, timeout_ns < 0 ? state_of(host).timeout : std::chrono::milliseconds(timeout_ns / 1000000));
  if (value.size() > *bytes)
    return fill_error(error, ZR_INVALID,
                      fmt::format("the value of '{}' has {} bytes, but the buffer has {}", key, value.size(), *bytes));
  std::memcpy(out, value.data(), value.size());
  *bytes = value.size();
  return ZR_OK;
} catch (const std::exception& failure) {
  return fill_error(error, ZR_COMM, failure.what());
}

}  // namespace

JobServices::JobServices(plugin::PluginHost& host, Control& control, std::string run_folder,
                         std::chrono::milliseconds timeout)
    : state_(std::make_unique<State>()) {
  state_->timeout = timeout;
  control.set_silence_limit(timeout);
  state_->run_folder = std::move(run_folder);
  state_->job = {sizeof(zr_job_service),   control.rank(),
                 control.world(),          control.local_rank(),
                 control.local_world(),    0,
                 control.job_id().c_str(), state_->run_folder.c_str()};
  state_->store = {sizeof(zr_store_service), 0, put, get};
  host.set_context(&control);
  host.set_context(state_.get());
  host.offer("zr.host.job/1", &state_->job);
  host.offer("zr.host.store/1", &state_->store);
}

JobServices::~JobServices() = default;

}  // namespace zr::host::control
