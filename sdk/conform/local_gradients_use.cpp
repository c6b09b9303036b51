// A short use of an optimizer's functions for local gradients, for the rules of all roles.
#include <limits>
#include <memory>

#include "conform/local_gradients_run.hpp"

namespace zr::conform {

namespace {

constexpr int64_t kElements = 3000;

// What exchange() gets: the only parameter of a job of one rank.
struct Exchange {
  explicit Exchange(const Description& description) {
    for (const zr_slot& slot : description.slots)
      if (slot.flags & ZR_SLOT_RANK_PRIVATE) states.emplace_back(kElements * sizeof(float));
    for (const Array& state : states) std::memset(state.data(), 0, state.size());
    for (int64_t i = 0; i < kElements; ++i) grad.as<float>()[i] = static_cast<float>(i % 7) - 3;
  }
  Answer run(const OptimizerRun& optimizer, const zr_local_gradients_api& api, int64_t step, const Mode& mode) {
    ArgumentMemory arguments(mode);
    std::vector<zr_view> views;
    for (const Array& state : states) views.push_back(view_of(state.data(), kElements, ZR_F32));
    zr_local_gradient gradient{};
    gradient.name = arguments.text("layer.0.weight");
    gradient.flags = begins ? uint32_t{ZR_LOCAL_BEGINS} : 0;
    gradient.count = kElements;
    gradient.grad = view_of(grad.data(), kElements, ZR_F32);
    gradient.slots = arguments.list(views);
    gradient.ranges = arguments.list(std::vector<zr_served_range>{{0, kElements, 0, 0}});
    gradient.n_ranges = 1;
    begins = false;
    const zr_step* const job = arguments.sized(zr_step{0, 1, step, std::numeric_limits<double>::quiet_NaN()});
    const auto* const list = arguments.list(std::vector<const zr_local_gradient*>{arguments.sized(gradient)});
    const zr_view memory = view_of(scratch->data(), static_cast<int64_t>(scratch->size()), ZR_U8);
    const zr_view* const passed = arguments.list(std::vector<zr_view>{memory});
    return call("exchange()", [&](zr_error* error) {
      return api.exchange(optimizer.instance().self(), job, list, 1, passed, error);
    });
  }
  Array grad{kElements * sizeof(float)};
  std::vector<Array> states;
  std::optional<Array> scratch;
  bool begins = true;
};

uint64_t planned_scratch(const OptimizerRun& run, const zr_local_gradients_api& api, const Mode& mode) {
  ArgumentMemory arguments(mode);
  zr_exchange_plan plan{};
  plan.world = 1;
  plan.counts = plan.served = arguments.list(std::vector<int64_t>{kElements});
  plan.n_counts = plan.n_served = 1;
  zr_exchange_plan* const passed = arguments.sized(plan);
  must("plan()", [&](zr_error* error) { return api.plan(run.instance().self(), passed, error); });
  return passed->scratch;
}

}  // namespace

void use_local_gradients(const OptimizerRun& run, const Mode& mode) {
  const auto description = run.describe_if_supported({kElements}, mode);
  if (!description || !(description->desc.needs & ZR_OPT_NEEDS_LOCAL_GRADS)) return;
  const zr_local_gradients_api* const api = local_gradients_of(run.instance());
  if (!api || !api->gradients || !api->plan || !api->exchange) return;  // ZR-O25
  const auto first = first_local_step(run, *api, 1);
  if (!first) return;
  Exchange exchange(*description);
  const uint64_t scratch = planned_scratch(run, *api, mode);
  require(scratch < uint64_t{1} << 30, "plan() reports ", scratch, " bytes for messages");
  exchange.scratch.emplace(static_cast<std::size_t>(scratch) + kElements);
  std::memset(exchange.scratch->data(), 0, exchange.scratch->size());
  TestHost& host = run.instance().host();
  const auto world = std::make_shared<World>(World::Options{.size = 1, .longer_structs = mode.longer_structs});
  host.keep(world);  // until destroy()
  host.on_wait = [one = world.get()](Completion& completion) { return one->wait(completion); };
  if (api->bind)
    must("bind()", [&](zr_error* error) { return api->bind(run.instance().self(), world->ref(0), error); });
  for (int64_t i = 0; i < 2; ++i) {
    ArgumentMemory arguments(mode);
    const std::vector<int64_t> all{first->step - 1 + i}, local{first->local + i};
    const auto* updates = arguments.sized(zr_param_updates{0, 1, arguments.list(all), arguments.list(local)});
    uint32_t grads = ZR_GRADS_REDUCED;
    must("gradients()", [&](zr_error* error) {
      return api->gradients(run.instance().self(), first->step + i, updates, &grads, error);
    });
    const Answer answer = exchange.run(run, *api, first->step + i, mode);
    require(answer.ok(), "exchange() ", answer.said());
  }
}

}  // namespace zr::conform
