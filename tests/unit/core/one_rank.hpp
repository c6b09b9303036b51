// A job of one rank in the test's own process: a control plane without sockets, a model that is only memory, and the
// parts of an engine on the real plug-ins.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "base/dtype.hpp"
#include "base/error.hpp"
#include "control/control.hpp"
#include "job/setup.hpp"
#include "job/started_job.hpp"
#include "state/sharded_state.hpp"
#include "support/host_model.hpp"
#include "support/scratch.hpp"

namespace zr::testing {

class OneRankControl final : public host::control::Control {
 public:
  int rank() const override { return 0; }
  int world() const override { return 1; }
  int local_rank() const override { return 0; }
  int local_world() const override { return 1; }
  const std::string& job_id() const override { return id_; }
  void put(const std::string& key, const std::string& value) override { words_[key] = value; }
  std::string get(const std::string& key, std::chrono::milliseconds) override {
    const auto found = words_.find(key);
    if (found == words_.end()) throw PeerLostError("no rank has put '" + key + "'");
    return found->second;
  }
  void drop(const std::string& key) override { words_.erase(key); }
  void set_activity(const host::control::Activity&) override {}
  bool broken() const override { return false; }
  std::string report(const std::string& mine) override { return mine; }
  void on_broken(const void*, std::function<void()>) override {}
  void leave(int64_t step, bool failed) override { left = {step, failed}; }

  std::pair<int64_t, bool> left{-1, false};  // by the last leave()

 private:
  std::string id_ = "one-rank";
  std::map<std::string, std::string> words_;
};

using FakeParameters = std::vector<std::pair<std::string, int64_t>>;  // name and elements

/// Each parameter has the values 0.5, 1, 1.5, ...; one float buffer. The test supplies the gradients.
class FakeModel final : public HostModel {
 public:
  explicit FakeModel(FakeParameters parameters) {
    for (auto& [name, count] : parameters) {
      host::plan::Parameter parameter;
      parameter.name = name;
      parameter.shape = {count};
      parameter.count = count;
      parameters_.push_back(parameter);
    }
    memory.resize(parameters_.size());
    attached.resize(parameters_.size());
    gradients.resize(parameters_.size());
  }
  static std::vector<float> initial(int64_t count) {
    std::vector<float> values;
    for (int64_t i = 0; i < count; ++i) values.push_back(static_cast<float>(i + 1) * 0.5f);
    return values;
  }

  /// For changes before a job is planned: aliases, the shape, or whether the parameter is frozen.
  host::plan::Parameter& parameter(uint32_t param) { return parameters_[param]; }

  const std::vector<host::plan::Parameter>& parameters() const override { return parameters_; }
  std::vector<host::model::ModelBuffer> buffers() override {
    return {{"statistics", statistics.data(), std::ssize(statistics) * 4, "F32", {std::ssize(statistics)}}};
  }
  std::vector<host::model::ModelBuffer> empty_buffers() const override { return without_elements; }
  void read(uint32_t param, float* out) override {
    const std::vector<float> values = initial(parameters_[param].count);
    std::copy(values.begin(), values.end(), out);
  }
  void bind(uint32_t param, void* at, zr_dtype) override { memory[param] = at; }
  void on_use(Uses use) override { uses = std::move(use); }
  void bind_shared(uint32_t param, const void* at, zr_dtype) override { memory[param] = const_cast<void*>(at); }
  void unbind(uint32_t param, zr_dtype) override { memory[param] = nullptr; }
  void attach(uint32_t param, void* at) override { attached[param] = at; }
  std::vector<uint32_t> written() override { return std::exchange(written_to, {}); }
  void return_parameters() override { ++released; }
  void on_gradient(Arrived callback) override { arrived = std::move(callback); }
  void copy_gradient(uint32_t param, int64_t first, const zr_view& dst) override {
    std::memcpy(dst.data, gradients[param].data() + first, static_cast<std::size_t>(dst.count) * 4);
  }
  void add_gradient(uint32_t param, int64_t first, const zr_view& dst) override {
    for (int64_t i = 0; i < dst.count; ++i)
      static_cast<float*>(dst.data)[i] += gradients[param][static_cast<std::size_t>(first + i)];
  }
  void drop_gradient(uint32_t param) override { dropped.push_back(param); }
  void hide_gradients(bool hidden) override { hides_gradients = hidden; }
  Temporaries temporaries() const override { return held; }
  host::model::DeviceBytes device_memory() const override { return on_device; }
  void limit_temporaries(int64_t bytes, const std::function<void(int64_t)>& over) override {
    limit = over ? bytes : -1;
    over_limit = over;
  }
  void deliver_on_thread(bool on) override { delivers_on_thread = on; }
  void seed(uint64_t value) override { seeds.push_back(value); }

  /// Autograd has a gradient of `value` everywhere.
  void give_gradient(uint32_t param, float value) {
    gradients[param].assign(static_cast<std::size_t>(parameters_[param].count), value);
    arrived(param);
  }
  float* values(uint32_t param) const { return static_cast<float*>(memory[param]); }

  std::vector<float> statistics{1, 2, 3};
  std::vector<host::model::ModelBuffer> without_elements;
  std::vector<void*> memory, attached;  // by parameter: bound; attached
  std::vector<std::vector<float>> gradients;
  std::vector<uint32_t> dropped, written_to;
  std::vector<uint64_t> seeds;
  Uses uses;
  Arrived arrived;
  bool hides_gradients = false, delivers_on_thread = false;
  int released = 0;
  Temporaries held;
  host::model::DeviceBytes on_device;
  int64_t limit = -1;  // -1: none
  std::function<void(int64_t)> over_limit;

 private:
  std::vector<host::plan::Parameter> parameters_;
};

/// The set-up of a one-rank job with adamw, whose runs are below `folder`; overrides as on the command line.
inline host::job::Setup one_rank_setup(const std::string& folder, const std::vector<std::string>& overrides,
                                       const std::shared_ptr<host::control::Control>& control) {
  const auto resolved = [=](const std::vector<std::string>& more, int world) {
    std::vector<std::string> all{"strategy=zero1", "optimizer=adamw", "train.micro_batch=1", "train.steps=3",
                                 "job.threads=1",  "job.name=unit",   "job.runs=" + folder};
    all.insert(all.end(), overrides.begin(), overrides.end());
    all.insert(all.end(), more.begin(), more.end());
    const host::plugin::Registry registry({ZR_BUILD_DIR "/plugins"});
    return host::plugin::resolve_job(host::config::Document::parse("", "job.toml", all), registry, {}, world);
  };
  host::job::Setup setup;
  static_cast<host::plugin::ResolvedJob&>(setup) = resolved({}, 1);
  setup.control = control;
  setup.revalidate = resolved;
  return setup;
}

/// A job that is planned.
class OneRankJob {
 public:
  /// `strategy`: in place of the component that the configuration names, whose keys it has.
  explicit OneRankJob(const std::vector<std::string>& overrides = {}, const zr_component* strategy = nullptr,
                      const FakeParameters& parameters = {{"a", 1500}, {"b", 40}})
      : model(parameters), job(setup(scratch_.folder().string(), overrides, strategy), model, nullptr) {}
  const host::job::StepContext& context() const { return job.context; }
  std::string folder() const { return scratch_.folder().string(); }

 private:
  static host::job::Setup setup(const std::string& folder, const std::vector<std::string>& overrides,
                                const zr_component* strategy) {
    host::job::Setup setup = one_rank_setup(folder, overrides, std::make_shared<OneRankControl>());
    if (strategy) setup.strategy.table = strategy;
    return setup;
  }
  const test::Scratch scratch_;

 public:
  FakeModel model;
  host::job::StartedJob job;
};

/// A full logical tensor of a parameter, as fp32.
inline std::vector<float> full_tensor(host::state::ShardedState& state, const FakeModel& model, uint32_t param,
                                      host::state::LogicalTensor role, const std::string& slot = "") {
  const int64_t count = model.parameters()[param].count;
  std::vector<float> values(static_cast<std::size_t>(count));
  state.read(param, role, slot, 0, count, values.data());
  return values;
}

/// What a call throws as Error; "" if it throws nothing.
inline std::string failure_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& failure) {
    return failure.what();
  }
  return "";
}

}  // namespace zr::testing
