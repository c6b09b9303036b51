#include "job/simulated_step.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/dtype.hpp"
#include "base/error.hpp"
#include "comm/done.hpp"
#include "conform/strategy_step.hpp"
#include "job/job_checks.hpp"
#include "job/plan_inputs.hpp"
#include "job/simulated_exchange.hpp"
#include "job/simulated_memory.hpp"

namespace zr::host::job {

namespace {

constexpr int kStepsBefore = 1;  // in which a strategy learns the order of the parameters

// A strategy writes little to its planned buffers; the optimizer's exchange writes everything.
constexpr std::size_t kWindowBytes = std::size_t{1} << 30, kExchangeWindowBytes = std::size_t{1} << 26;

// Parameters that one module uses together.
using Use = std::vector<uint32_t>;

std::string_view module_of(const plan::Parameter& parameter) {
  const std::string_view name = parameter.name;
  return name.substr(0, std::min(name.rfind('.'), name.size()));
}

std::vector<Use> uses_of(const plan::MemoryPlan& plan) {
  const std::vector<plan::Parameter>& parameters = plan.input.parameters;
  std::vector<Use> uses;
  for (const uint32_t param : plan.sharded_parameters()) {
    const bool joins = !uses.empty() && module_of(parameters[uses.back().back()]) == module_of(parameters[param]);
    if (!joins) uses.emplace_back();
    uses.back().push_back(param);
  }
  return uses;
}

conform::StepShape shape_of(const plan::MemoryPlan& plan, const StrategyParts& strategy, SimulatedStep which) {
  conform::StepShape shape{.parts = strategy.parts(),
                           .accumulation = plan.input.accumulation,
                           .holds = plan.input.accumulates_locally,
                           .has_local_grads = which == SimulatedStep::local_gradients};
  for (uint32_t param = 0; param < plan.input.parameters.size(); ++param)
    shape.params.push_back(
        {plan.input.parameters[param].count, plan.input.parameters[param].frozen, strategy.part_of(param)});
  return shape;
}

using Instances = std::vector<std::unique_ptr<const plugin::Instance>>;

Instances make_instances(plugin::PluginHost& host, const plugin::ResolvedJob& job, const plan::MemoryPlan& plan) {
  Instances instances;
  for (uint32_t part = 0; part < plan.input.parts(); ++part) {
    instances.push_back(
        std::make_unique<const plugin::Instance>(host, job.strategy, job.config, table_of(job.strategy)));
    describe_part(*instances.back(), plan, part);  // this instance has not planned yet
  }
  return instances;
}

std::vector<const plugin::Instance*> pointers_of(const Instances& instances) {
  std::vector<const plugin::Instance*> pointers;
  for (const auto& instance : instances) pointers.push_back(instance.get());
  return pointers;
}

// The communicator of a plan: collectives complete at once.
class Recorder {
 public:
  Recorder(const plan::MemoryPlan& plan, const CollectiveSink& sink) : plan_(plan), sink_(sink) {}
  /// Valid as long as this object.
  zr_comm_ref collectives() { return {&kCollectives, this, plan_.rank, plan_.input.world}; }
  /// The sink receives collectives from now on.
  void begin() { records_ = true; }
  /// Throws what the sink threw in a collective.
  void check() {
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
  }

 private:
  static zr_code submit(void* self, const zr_coll* given, zr_stream*, zr_done* done, zr_error* error) noexcept {
    auto& recorder = *static_cast<Recorder*>(self);
    try {
      zr_coll coll;
      ZR_TAKE(&coll, given);
      if (recorder.records_) recorder.sink_(coll);
    } catch (const std::exception& failure) {
      recorder.failure_ = std::current_exception();
      return fill_error(error, ZR_INTERNAL, failure.what());
    }
    if (done) comm::done_resolve(done, ZR_OK, 0, nullptr);
    return ZR_OK;
  }
  static zr_code progress(void*, zr_error*) noexcept { return ZR_OK; }
  static constexpr zr_collectives_api kCollectives{sizeof(zr_collectives_api), 0, submit, progress};

  const plan::MemoryPlan& plan_;
  const CollectiveSink& sink_;
  bool records_ = false;
  std::exception_ptr failure_;  // of sink_
};

class Step final : private conform::StrategyStep {
 public:
  Step(StrategyParts& strategy, Recorder& recorder, const plan::MemoryPlan& plan, SimulatedStep which)
      : StrategyStep(shape_of(plan, strategy, which)),
        strategy_(strategy),
        recorder_(recorder),
        plan_(plan),
        uses_(uses_of(plan)) {}

  /// memory: of the planned buffers.
  void bind(SimulatedMemory& memory) {
    std::vector<zr_view> views;
    for (const plan::Buffer& buffer : plan_.rank_plan.buffers)
      views.push_back(
          {memory.add(buffer.elements * size_of(buffer.dtype)), buffer.elements, buffer.dtype, 0, kHostMemory});
    call("bind", [&](zr_error* error) { return strategy_.bind(views, recorder_.collectives(), error); });
    update({sizeof(zr_use), ZR_UPDATE_PHASE, 0, 0, nullptr, nullptr});
  }

  /// exchange: what the optimizer does with local gradients.
  void run(const std::function<void()>& exchange) {
    reduce_gradients();
    exchange();
    update(update_use());
    event(ZR_STEP_END, update_use());
  }

 private:
  template <class Fn>
  void call(const char* name, Fn&& fn) const {
    CallError error;
    const zr_code code = call_plugin(&error, [&] { return fn(&error); });
    recorder_.check();
    if (code != ZR_OK) check(code, error, strategy_.call_text(name));
  }
  void event(uint32_t kind, const zr_use& use) {
    call("event", [&](zr_error* error) { return strategy_.event(kind, &use, error); });
  }
  void update(const zr_use& use) {
    call("updated", [&](zr_error* error) { return strategy_.updated(&use, error); });
  }
  void with_weights(const Use& params, const zr_use& use) {
    std::vector<zr_view> full(params.size());
    const auto n = static_cast<uint32_t>(params.size());
    call("acquire", [&](zr_error* error) { return strategy_.acquire(params.data(), n, &use, full.data(), error); });
    call("release", [&](zr_error* error) { return strategy_.release(params.data(), n, &use, error); });
  }

  void use_weights(const zr_use& use) override {
    for (std::size_t i = 0; i < uses_.size(); ++i)
      with_weights(uses_[use.phase == ZR_FORWARD ? i : uses_.size() - 1 - i], use);
  }
  zr_code grad_destination(uint32_t param, int64_t* first, const zr_use& use, zr_view* dst) override {
    zr_code answer = ZR_OK;
    call("grad_destination", [&](zr_error* error) {
      answer = strategy_.grad_destination(param, first, &use, dst, error);
      return answer == ZR_AGAIN ? zr_code{ZR_OK} : answer;
    });
    if (answer == ZR_AGAIN && plan_.input.accumulates_locally)
      fail_not_held(strategy_.component().table->id, name_of(param));
    return answer;
  }
  void grad_ready(uint32_t param, int64_t first, int64_t count, const zr_use& use) override {
    call("grad_ready", [&](zr_error* error) { return strategy_.grad_ready(param, first, count, &use, error); });
  }
  void step_begin(const zr_use& use) override { event(ZR_STEP_BEGIN, use); }
  void backward_end(uint32_t part, const zr_use& use) override {
    call("event", [&](zr_error* error) { return strategy_.event_of(part, ZR_BACKWARD_END, &use, error); });
  }
  void grads_finish(const zr_use& use) override {
    call("grads_finish", [&](zr_error* error) { return strategy_.grads_finish(&use, error); });
  }
  std::string text_of(uint32_t param) const override { return "'" + name_of(param) + "'"; }
  void fail_destination(const std::string& problem) const override {
    fail_internal(strategy_.call_text("grad_destination") + " " + problem);
  }
  const std::string& name_of(uint32_t param) const { return plan_.input.parameters[param].name; }

  StrategyParts& strategy_;
  Recorder& recorder_;
  const plan::MemoryPlan& plan_;
  const std::vector<Use> uses_;
};

void run_exchange(plugin::PluginHost& host, const plugin::ResolvedJob& job, const plan::MemoryPlan& plan,
                  Recorder& recorder) {
  SimulatedMemory memory(kExchangeWindowBytes);
  try {
    simulate_exchange(host, job, plan, recorder.collectives(), memory);
  } catch (const Error&) {
    recorder.check();
    throw;
  }
}

}  // namespace

void simulate_step(plugin::PluginHost& host, const plugin::ResolvedJob& job, const plan::MemoryPlan& plan,
                   SimulatedStep which, const CollectiveSink& sink) {
  Recorder recorder(plan, sink);
  SimulatedMemory memory(kWindowBytes);
  const Instances instances = make_instances(host, job, plan);  // destroyed before what they use
  StrategyParts strategy(pointers_of(instances), plan);
  Step step(strategy, recorder, plan, which);
  step.bind(memory);
  for (int i = 0; i < kStepsBefore; ++i) step.run([] {});
  recorder.begin();
  step.run([&] {
    if (which == SimulatedStep::local_gradients) run_exchange(host, job, plan, recorder);
  });
}

}  // namespace zr::host::job
