// ZR-S22: strategies that accept streams. They only issue collectives, so that a device that the checks simulate
// suffices.
#include "conform/rule.hpp"
#include "conform/simulated_device.hpp"
#include "conform/strategy_run.hpp"

namespace zr::conform {

namespace {

void strategy_uses_its_stream(Case& test) {
  StrategyOptions options;
  {
    TestHost host;
    Instance instance(test, host);
    const zr_strategy_desc desc = describe(instance);
    if (!(desc.flags & ZR_STRATEGY_STREAMS))
      skip("describe() does not report ZR_STRATEGY_STREAMS: it gets host memory, without a stream");
    options.device_type = simulated_type(desc.device_types);
    require(options.device_type >= 0, "describe() reports ZR_STRATEGY_STREAMS, but device_types is ", desc.device_types,
            ", with CPU memory only");
  }
  std::mt19937_64 random = test.random();
  for (const int world : {1, 2, 3})
    for (const int accumulation : {1, 3}) {
      options.seed = random();
      options.order = accumulation > 1 ? random() : 0;
      options.request.params = random_model(random, 9, 20000);
      options.request.params.push_back({"large", {50000}, 50000, false});
      options.request.params.push_back({"frozen", {3000}, 3000, true});
      options.request.world = world;
      options.request.accumulation = accumulation;
      for (const bool smallest : {false, true}) {
        options.smallest_sizes = smallest;
        test.note("memory of a device, which only collectives may access; world size ", world);
        run_strategy(test, options);
      }
    }
}

constexpr Rule kRules[] = {
    {"ZR-S22", "strategy", "With ZR_STRATEGY_STREAMS, only collectives on the call's stream access the memory.",
     strategy_uses_its_stream},
};
}  // namespace

std::span<const Rule> strategy_device_rules() { return kRules; }

}  // namespace zr::conform
