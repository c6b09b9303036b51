// ZR-S10 and up: strategies in a simulated job.
#include <string>

#include "conform/rule.hpp"
#include "conform/strategy_run.hpp"

namespace zr::conform {

namespace {

StrategyOptions options_of(Case& test, int world, int accumulation, uint32_t flags = 0) {
  StrategyOptions options;
  std::mt19937_64 random = test.random(static_cast<uint64_t>(world * 10 + accumulation) + flags * 1000);
  options.seed = random();
  options.request.params = random_model(random, 9, 20000);
  options.request.params.push_back({"large", {50000}, 50000, false});
  options.request.params.push_back({"frozen", {3000}, 3000, true});
  options.request.world = world;
  options.request.accumulation = accumulation;
  options.request.flags = flags;
  return options;
}

// Runs the job with default values of keys, and with the smallest sizes: other buckets, and more shards.
void run_with_all_sizes(Case& test, StrategyOptions options) {
  for (const bool smallest : {false, true}) {
    options.smallest_sizes = smallest;
    test.note(options.request.world, " ranks, ", options.request.accumulation, " micro-steps, ",
              text_of(options.request.params), smallest ? ", smallest sizes" : "");
    run_strategy(test, options);
  }
}

void sums_are_bit_equal(Case& test) {
  for (const int world : {1, 2, 3, 4})
    for (const int accumulation : {1, 4}) {
      StrategyOptions options = options_of(test, world, accumulation);
      options.checks_weights = false;
      run_with_all_sizes(test, options);
      options.request.grad_dtype = ZR_BF16;
      run_with_all_sizes(test, options);
    }
}

void weights_are_up_to_date(Case& test) {
  for (const int world : {1, 2, 3, 4})
    for (const zr_dtype dtype : {ZR_F32, ZR_BF16}) {
      StrategyOptions options = options_of(test, world, 1);
      options.request.weight_dtype = dtype;
      options.checks_sums = false;
      options.steps = 3;
      run_with_all_sizes(test, options);
    }
}

void sequence_is_independent(Case& test) {
  for (const int accumulation : {1, 4}) {
    StrategyOptions options = options_of(test, 3, accumulation);
    options.checks_sums = options.checks_weights = false;
    options.smallest_sizes = accumulation == 4;
    const auto expected = run_strategy(test, options).traces[0];
    std::mt19937_64 random = test.random(9);
    for (int round = 0; round < 5; ++round) {
      options.order = random();
      test.note("gradients in another order on each rank");
      for (const auto& trace : run_strategy(test, options).traces) {
        std::size_t at = 0;
        while (at < trace.size() && at < expected.size() && trace[at] == expected[at]) ++at;
        require(at == trace.size() && at == expected.size(), "the sequence of collectives depends on the order of ",
                "gradients: collective ", at, " is ", at < trace.size() ? trace[at] : "missing", ", not ",
                at < expected.size() ? expected[at] : "missing");
      }
    }
  }
}

void any_order_gives_the_sums(Case& test) {
  std::mt19937_64 random = test.random(5);
  for (const int accumulation : {1, 3}) {
    StrategyOptions options = options_of(test, 2, accumulation);
    options.checks_weights = false;
    options.order = random();
    options.lazy = true;
    run_with_all_sizes(test, options);
  }
}

void held_gradients(Case& test) {
  for (const int world : {1, 2, 3}) {
    StrategyOptions options = options_of(test, world, 3, ZR_PLAN_HOLD_GRADS);
    options.checks_weights = false;
    try {
      run_with_all_sizes(test, options);
    } catch (const Failure& failure) {
      if (failure.reason.find("ZR_AGAIN") == std::string::npos) throw;
      skip("the strategy has no buffers to hold gradients (it returns ZR_AGAIN with ZR_PLAN_HOLD_GRADS)");
    }
  }
}

void shared_weights(Case& test) {
  StrategyOptions options = options_of(test, 3, 1, ZR_PLAN_SHARE_WEIGHTS);
  options.checks_sums = false;
  run_with_all_sizes(test, options);
  options = options_of(test, 4, 1, ZR_PLAN_SEVERAL_HOSTS | ZR_PLAN_SHARE_ON_HOSTS);
  options.checks_sums = false;
  test.note("on two hosts");
  run_with_all_sizes(test, options);
}

void skipped_steps(Case& test) {
  StrategyOptions options = options_of(test, 3, 1);
  options.skips = true;
  options.checks_sums = false;
  options.steps = 4;
  options.evaluates = true;
  run_with_all_sizes(test, options);
}

void any_thread_may_call(Case& test) {
  StrategyOptions options = options_of(test, 2, 1);
  options.other_threads = true;
  test.note("calls from changing threads");
  run_strategy(test, options);
}

void resolves_once(Case& test) {
  StrategyOptions options = options_of(test, 2, 1);
  options.completions = true;
  test.note("waiting for the completion of a call");
  run_strategy(test, options);
}

void ignores_the_unknown(Case& test) {
  StrategyOptions options = options_of(test, 2, 1);
  options.unknown = true;
  test.note("an unknown event, phase or flag");
  run_strategy(test, options);
}

void failures_arrive(Case& test) {
  StrategyOptions options = options_of(test, 2, 2);
  options.checks_sums = options.checks_weights = false;
  options.steps = 1;
  const std::size_t n = run_strategy(test, options).traces[0].size();
  if (n == 0) skip("the strategy issues no collectives");
  for (const zr_code code : {ZR_COMM, ZR_CANCELLED, ZR_MISMATCH})
    for (const std::size_t at : {std::size_t{0}, n / 2, n - 1}) {
      options.fail_at = at;
      options.code = code;
      test.note("collective ", at, " of ", n, " fails with ", code_text(code));
      for (const auto& failed : run_strategy(test, options).failed_calls) {
        require(failed.has_value(), "collective ", at, " failed with ", code_text(code),
                ", but every call of the strategy returned ZR_OK");
        require(failed->code == code, "a collective failed with ", code_text(code), ", but ", failed->name,
                " returned ", code_text(failed->code));
      }
    }
}

void gradients_keep_their_values(Case& test) {
  for (const int world : {1, 2, 3})
    for (const int accumulation : {1, 3}) {
      StrategyOptions options = options_of(test, world, accumulation);
      options.checks_sums = options.checks_weights = false;
      options.checks_last_use = true;
      run_with_all_sizes(test, options);
    }
}

constexpr Rule kRules[] = {
    {"ZR-S10", "strategy", "After grads_finish(), REDUCED_GRAD pieces hold the sum of all gradients, in rank order.",
     sums_are_bit_equal},
    {"ZR-S11", "strategy", "After updated(), all weights are up to date on every rank; acquire() gives full ones.",
     weights_are_up_to_date},
    {"ZR-S12", "strategy", "The sequence of collectives does not depend on the order of grad_ready() calls.",
     sequence_is_independent},
    {"ZR-S13", "strategy", "The sums are right for any order of gradients, and if collectives advance late.",
     any_order_gives_the_sums},
    {"ZR-S14", "strategy", "With ZR_PLAN_HOLD_GRADS, destinations stay the same and are not modified in between.",
     held_gradients},
    {"ZR-S15", "strategy",
     "With ZR_PLAN_SHARE_WEIGHTS or ZR_PLAN_SHARE_ON_HOSTS, all weights are up to date after updated().",
     shared_weights},
    {"ZR-S16", "strategy", "A skipped step changes no weight, and training continues after it.", skipped_steps},
    {"ZR-S17", "strategy", "Calls may come from any thread, one at a time.", any_thread_may_call},
    {"ZR-S18", "strategy", "A call with a completion resolves it exactly once.", resolves_once},
    {"ZR-S19", "strategy", "Unknown events, phases and flags are ignored.", ignores_the_unknown},
    {"ZR-S20", "strategy", "If a collective fails, a call returns its code.", failures_arrive},
    {"ZR-S21", "strategy", "Reduced gradients do not change after the last collective of the step that uses them.",
     gradients_keep_their_values},
};

}  // namespace

std::span<const Rule> strategy_step_rules() { return kRules; }

}  // namespace zr::conform
