#include "job/simulated_step.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <string_view>
#include <utility>
#include <vector>

#include "base/dtype.hpp"
#include "base/error.hpp"
#include "comm/done.hpp"
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

class Recorder {
 public:
  Recorder(plugin::PluginHost& host, const plugin::ResolvedJob& job, const plan::MemoryPlan& plan, SimulatedStep which,
           const CollectiveSink& sink)
      : host_(host),
        job_(job),
        plan_(plan),
        flags_(which == SimulatedStep::local_gradients ? uint32_t{ZR_USE_LOCAL_GRADS} : 0),
        sink_(sink),
        uses_(uses_of(plan)),
        instances_(make_instances(host, job, plan)),
        strategy_(pointers_of(instances_), plan) {}

  void run() {
    bind();
    update();
    for (int i = 0; i < kStepsBefore; ++i) step();
    records_ = true;
    step();
  }

 private:
  template <class Fn>
  void call(const char* name, Fn&& fn) {
    CallError error;
    const zr_code code = call_plugin(&error, [&] { return fn(&error); });
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
    if (code != ZR_OK) check(code, error, strategy_.call_text(name));
  }

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
  zr_comm_ref collectives() { return {&kCollectives, this, plan_.rank, plan_.input.world}; }
  bool is_local() const { return flags_ != 0; }

  using Instances = std::vector<std::unique_ptr<const plugin::Instance>>;
  static Instances make_instances(plugin::PluginHost& host, const plugin::ResolvedJob& job,
                                  const plan::MemoryPlan& plan) {
    Instances instances;
    for (uint32_t part = 0; part < plan.input.parts(); ++part) {
      instances.push_back(
          std::make_unique<const plugin::Instance>(host, job.strategy, job.config, table_of(job.strategy)));
      describe_part(*instances.back(), plan, part);  // this instance has not planned yet
    }
    return instances;
  }
  static std::vector<const plugin::Instance*> pointers_of(const Instances& instances) {
    std::vector<const plugin::Instance*> pointers;
    for (const auto& instance : instances) pointers.push_back(instance.get());
    return pointers;
  }

  void bind() {
    for (const plan::Buffer& buffer : plan_.rank_plan.buffers)
      views_.push_back(
          {addresses_.add(buffer.elements * size_of(buffer.dtype)), buffer.elements, buffer.dtype, 0, kHostMemory});
    call("bind", [&](zr_error* error) { return strategy_.bind(views_, collectives(), error); });
  }

  zr_use use_of(uint32_t phase, int micro = 0, uint32_t flags = 0) const {
    return {sizeof(zr_use), phase, static_cast<uint32_t>(micro), flags, nullptr, nullptr};
  }

  void event(uint32_t kind, const zr_use& use) {
    call("event", [&](zr_error* error) { return strategy_.event(kind, &use, error); });
  }

  void update(uint32_t flags = 0) {
    const zr_use use = use_of(ZR_UPDATE_PHASE, 0, flags);
    call("updated", [&](zr_error* error) { return strategy_.updated(&use, error); });
  }

  // Strategies see one micro-step if the engine accumulates gradients; forward and backward run in each of them.
  void step() {
    const plan::PlanInput& input = plan_.input;
    for (int micro = 0; micro < input.accumulation; ++micro) {
      const bool is_last = micro + 1 == input.accumulation;
      const int seen = input.accumulates_locally ? 0 : micro;
      const zr_use backward = use_of(ZR_BACKWARD, seen, flags_ | (is_last ? uint32_t{ZR_USE_LAST_MICRO} : 0u));
      for (const Use& params : uses_) with_weights(params, use_of(ZR_FORWARD, seen));
      if (micro == 0) event(ZR_STEP_BEGIN, backward);
      for (std::size_t i = uses_.size(); i-- > 0;) with_weights(uses_[i], use_of(ZR_BACKWARD, seen));
      if (!input.accumulates_locally || is_last) {
        for (uint32_t part = 0; part < strategy_.parts(); ++part) {
          if (!is_local()) deliver_all(part, backward);
          call("event", [&](zr_error* error) { return strategy_.event_of(part, ZR_BACKWARD_END, &backward, error); });
        }
      }
    }
    const zr_use use = use_of(ZR_UPDATE_PHASE, 0, flags_);
    call("grads_finish", [&](zr_error* error) { return strategy_.grads_finish(&use, error); });
    if (is_local() && records_) exchange();
    update(flags_);
    event(ZR_STEP_END, use);
  }

  void exchange() {
    SimulatedMemory memory(kExchangeWindowBytes);
    try {
      simulate_exchange(host_, job_, plan_, collectives(), memory);
    } catch (const Error&) {
      if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
      throw;
    }
  }

  void with_weights(const Use& params, const zr_use& use) {
    std::vector<zr_view> full(params.size());
    const auto n = static_cast<uint32_t>(params.size());
    call("acquire", [&](zr_error* error) { return strategy_.acquire(params.data(), n, &use, full.data(), error); });
    call("release", [&](zr_error* error) { return strategy_.release(params.data(), n, &use, error); });
  }

  // The gradients of a part from the last parameter to the first, as backward computes them.
  void deliver_all(uint32_t part, const zr_use& use) {
    std::vector<uint32_t> pending;
    for (auto param = static_cast<uint32_t>(plan_.input.parameters.size()); param-- > 0;)
      if (!plan_.input.parameters[param].frozen && strategy_.part_of(param) == part) pending.push_back(param);
    std::vector<int64_t> delivered(plan_.input.parameters.size(), 0);
    while (!pending.empty()) {
      const auto is_complete = [&](uint32_t param) { return deliver(param, use, delivered[param]); };
      const int64_t before = sum_of(delivered);
      const std::size_t left = std::erase_if(pending, is_complete);
      if (left == 0 && sum_of(delivered) == before)
        fail_internal(fmt::format("{} has no free bucket slot for '{}' although no bucket is being filled",
                                  strategy_.call_text("grad_destination"),
                                  plan_.input.parameters[pending.front()].name));
    }
  }
  static int64_t sum_of(const std::vector<int64_t>& values) {
    int64_t sum = 0;
    for (const int64_t value : values) sum += value;
    return sum;
  }

  // False if the strategy has no memory for the rest of the gradient until others are complete.
  bool deliver(uint32_t param, const zr_use& use, int64_t& delivered) {
    const int64_t count = plan_.input.parameters[param].count;
    while (delivered < count) {
      zr_view destination{};
      int64_t first = delivered;
      bool is_full = false;
      call("grad_destination", [&](zr_error* error) {
        const zr_code code = strategy_.grad_destination(param, &first, &use, &destination, error);
        is_full = code == ZR_AGAIN;
        return is_full ? zr_code{ZR_OK} : code;
      });
      if (is_full && plan_.input.accumulates_locally)
        fail_not_held(strategy_.component().table->id, plan_.input.parameters[param].name);
      if (is_full) return false;
      if (destination.count <= 0 || destination.count > count - delivered)
        fail_internal(fmt::format("{} returned an invalid destination for '{}': {} elements from element {}",
                                  strategy_.call_text("grad_destination"), plan_.input.parameters[param].name,
                                  destination.count, first));
      call("grad_ready",
           [&](zr_error* error) { return strategy_.grad_ready(param, first, destination.count, &use, error); });
      delivered += destination.count;
    }
    return true;
  }

  static constexpr zr_collectives_api kCollectives{sizeof(zr_collectives_api), 0, submit, progress};

  plugin::PluginHost& host_;
  const plugin::ResolvedJob& job_;
  const plan::MemoryPlan& plan_;
  const uint32_t flags_;  // ZR_USE_LOCAL_GRADS, or 0
  const CollectiveSink& sink_;
  const std::vector<Use> uses_;
  SimulatedMemory addresses_{kWindowBytes};
  std::vector<zr_view> views_;
  bool records_ = false;
  std::exception_ptr failure_;  // of sink_
  const Instances instances_;   // destroyed first, but for the next: they may use all of the above
  StrategyParts strategy_;
};

}  // namespace

void record_step(plugin::PluginHost& host, const plugin::ResolvedJob& job, const plan::MemoryPlan& plan,
                 SimulatedStep which, const CollectiveSink& sink) {
  Recorder(host, job, plan, which, sink).run();
}

}  // namespace zr::host::job
