// One rank's plug-in host with a communicator plug-in, set up as the engine does it.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "base/ledger.hpp"
#include "base/thread_pool.hpp"
#include "comm/comm_runtime.hpp"
#include "comm/done.hpp"
#include "control/job_services.hpp"
#include "plugin/plugin_host.hpp"
#include "support/shared_control.hpp"

namespace zr::testing {

struct RigOptions {
  std::string id = "shm";
  std::string keys = {};    // TOML lines of the plug-in's table
  std::string device = {};  // "sim": a library for memory of this device
  int threads = 1;
  std::chrono::milliseconds timeout = std::chrono::seconds(30);
};

class CommRig {
 public:
  CommRig(std::shared_ptr<host::control::Control> control, RigOptions options = {})
      : control_(std::move(control)),
        options_(std::move(options)),
        pool_(options_.threads),
        host_(ledger_, pool_),
        services_(host_, *control_, "") {
    host::comm::offer_async(host_);
    const host::plugin::Registry all({ZR_BUILD_DIR "/plugins", ZR_BUILD_DIR "/tests/plugins"});
    const host::plugin::Registry registry = options_.device.empty() ? all : all.of_device(options_.device);
    const host::plugin::Component component =
        registry.load(host::plugin::Role::communicator, options_.id, "rig.toml:1:1");
    const std::string table = "communicator." + options_.id;
    const auto document =
        host::config::Document::parse("[train]\nmicro_batch = 1\ngradient_accumulation = 1\n[communicator]\nuse = \"" +
                                          options_.id + "\"\n[" + table + "]\n" + options_.keys,
                                      "rig.toml", {});
    config_ =
        document.check(host::config::keys_of(component.table->keys, component.table->n_keys, table), control_->world());
    instance_ = std::make_unique<host::plugin::Instance>(host_, component, config_, table);
  }
  host::plugin::PluginHost& host() { return host_; }
  host::Ledger& ledger() { return ledger_; }
  const host::plugin::Instance& instance() const { return *instance_; }
  const std::shared_ptr<host::control::Control>& control() const { return control_; }
  /// Opens the host's communicator, which wraps the plug-in. Collective.
  std::unique_ptr<host::comm::CommRuntime> open() {
    return std::make_unique<host::comm::CommRuntime>(host_, control_, instance_.get(),
                                                     host::comm::CommRuntime::Options{options_.timeout});
  }

 private:
  std::shared_ptr<host::control::Control> control_;
  RigOptions options_;
  host::Ledger ledger_;
  host::ThreadPool pool_;
  host::plugin::PluginHost host_;
  host::control::JobServices services_;
  host::config::JobConfig config_;
  std::unique_ptr<host::plugin::Instance> instance_;
};

/// The plug-in without the host's communicator, called through its C table.
class RawComm {
 public:
  explicit RawComm(CommRig& rig, const zr_device& device = host::kHostMemory)
      : rig_(rig), api_(rig.instance().api<zr_communicator_api>()) {
    static int opened = 0;  // communicators that this process opened; equal on all ranks
    const std::string store_prefix = "raw." + std::to_string(++opened) + ".";
    const zr_comm_open how{sizeof(zr_comm_open), rig.control()->rank(), rig.control()->world(), 0, device, "data",
                           store_prefix.c_str()};
    host::CallError error;
    host::check(api_->open(rig.instance().self(), &how, &comm_, &error), error, "open");
  }
  ~RawComm() { api_->close(comm_); }
  RawComm(const RawComm&) = delete;
  const zr_communicator_api& api() const { return *api_; }
  const zr_shared_weights_api& shared() const { return *host::comm::shared_weights_of(rig_.instance().component()); }
  void* comm() const { return comm_; }
  int rank() const { return rig_.control()->rank(); }
  int world() const { return rig_.control()->world(); }
  /// Submits one operation and returns its code; said() returns the error text.
  zr_code submit(const zr_coll& coll, zr_done* done = nullptr, zr_stream* stream = nullptr) {
    error_ = host::CallError();
    return api_->submit(comm_, &coll, stream, done, &error_);
  }
  std::string said() const { return error_.msg; }
  void run(const zr_coll& coll, zr_stream* stream = nullptr) {
    if (submit(coll, nullptr, stream) != ZR_OK) throw std::runtime_error("submit: " + said());
  }
  void* allocate(int64_t bytes) {
    zr_view memory{};
    host::CallError error;
    host::check(api_->mem_alloc(comm_, static_cast<uint64_t>(bytes), 64, 0, &memory, &error), error, "mem_alloc");
    allocated_.emplace(memory.data, memory);
    return memory.data;
  }
  void free(void* memory) {
    const zr_view view = allocated_.at(memory);
    allocated_.erase(memory);
    api_->mem_free(comm_, &view);
  }
  host::plugin::PluginHost& host() { return rig_.host(); }
  /// Calls progress() until `done` is resolved and returns its code, or the code of a failed progress().
  zr_code finish(zr_done* done) {
    error_ = host::CallError();
    zr_code code;
    while ((code = host::comm::done_poll(done, &error_)) == ZR_AGAIN)
      if (const zr_code failed = api_->progress ? api_->progress(comm_, &error_) : ZR_OK) return failed;
    return code;
  }

 private:
  CommRig& rig_;
  const zr_communicator_api* api_;
  void* comm_ = nullptr;
  std::map<void*, zr_view> allocated_;
  host::CallError error_;
};

}  // namespace zr::testing
