// ZR-O25 to O31: optimizers that need gradients which are not reduced over ranks (zr/abi/draft/local_gradients.h).
#include <algorithm>
#include <string>

#include "conform/local_gradients_run.hpp"
#include "conform/optimizer_rules.hpp"
#include "conform/rule.hpp"

namespace zr::conform {

namespace {

constexpr int kSteps = 3;

struct Sizes {
  uint64_t scratch, received;
  bool operator==(const Sizes&) const = default;
};

void declares_local_gradients(Case& test) {
  TestHost host, other_host;
  const OptimizerRun run(test, host), other(test, other_host);
  const uint32_t needs = needs_of_local_optimizer(run);
  for (const Shape& shape : run.supported(kShapes)) {
    const Description description = run.describe(shape);
    const std::string of = concat("describe() of a parameter of shape ", text_of(shape));
    require(description.desc.needs == needs, of, " reports other needs than for other parameters");
    require(description.is_elementwise(), of, " reports ZR_OPT_NEEDS_LOCAL_GRADS, but it is not elementwise");
    bool was_private = false;
    for (const zr_slot& slot : description.slots) {
      const bool is_private = (slot.flags & ZR_SLOT_RANK_PRIVATE) != 0;
      require(slot.flags == 0 || slot.dtype == ZR_F32, of, ": state '", slot.name, "' has flags, but is not fp32");
      require(is_private || !was_private, of, ": state '", slot.name, "' follows states with ZR_SLOT_RANK_PRIVATE");
      was_private = is_private;
    }
  }
  const zr_local_gradients_api* const api = local_gradients_of(run.instance());
  require(api, "it has no zr.optimizer.local_gradients/1, although describe() reports ZR_OPT_NEEDS_LOCAL_GRADS");
  require(api->size >= sizeof *api && api->gradients && api->plan && api->exchange,
          "its table of zr.optimizer.local_gradients/1 is incomplete");
  require(api->bind || !(needs & ZR_OPT_NEEDS_COMM), "describe() reports ZR_OPT_NEEDS_COMM, but bind is NULL");
  require(!api->state_sum || api->summed_state, "it has state_sum, but summed_state is NULL");
  const auto sizes_of = [&](const OptimizerRun& one, int world) {
    const int64_t counts[] = {5000, 1, 1024, 70000}, served[] = {2048, 1, 904};
    zr_exchange_plan plan{sizeof plan, world, counts, served, 4, 3, 0, 0};
    must("plan()", [&](zr_error* error) { return api->plan(one.instance().self(), &plan, error); });
    return Sizes{plan.scratch, plan.received};
  };
  for (const int world : {1, 2, 16}) {
    const Sizes first = sizes_of(run, world);
    require(sizes_of(run, world) == first && sizes_of(other, world) == first, "plan() of ", world,
            " ranks gives other sizes in another call or instance");
  }
}

// The gradients and private states of all ranks, by rank.
struct JobResult {
  std::vector<std::string> gradients, states;
};

// Some steps of all parameters; gradients are those after each step.
JobResult run_job(Case& test, const LocalStart& start, const LocalOptions& options) {
  const auto n = static_cast<std::size_t>(options.world);
  JobResult result{std::vector<std::string>(n), std::vector<std::string>(n)};
  on_local_ranks(test, start, options, [&](LocalRank& rank) {
    const auto r = static_cast<std::size_t>(rank.rank());
    for (int step = 0; step < kSteps; ++step) {
      rank.exchange();
      result.gradients[r] += rank.gradients();
    }
    result.states[r] = rank.private_states();
  });
  return result;
}

// Worlds of 1 to 3 ranks with several divisions of the elements among them.
void for_each_job(Case& test, const std::function<void(const LocalStart&, const LocalOptions&)>& body) {
  for (const int world : {1, 2, 3})
    for (uint64_t ranges = 0; ranges < (world == 1 ? 2 : 4); ++ranges) {
      test.note("exchange() on ", world, " ranks");
      const LocalStart start(test, world, ranges * 7 + static_cast<uint64_t>(world) * (ranges > 0));
      body(start, {.world = world});
    }
}

void ranks_get_equal_gradients(Case& test) {
  for_each_job(test, [&](const LocalStart& start, const LocalOptions& options) {
    const JobResult result = run_job(test, start, options);
    for (std::size_t r = 1; r < result.gradients.size(); ++r)
      require(result.gradients[r] == result.gradients[0], "after exchange(), ranks 0 and ", r, " of ", options.world,
              " have different gradients");
  });
}

void exchange_is_deterministic(Case& test) {
  for_each_job(test, [&](const LocalStart& start, const LocalOptions& options) {
    const JobResult first = run_job(test, start, options);
    for (int run = 0; run < 3; ++run) {
      const JobResult again = run_job(test, start, options);
      require(again.gradients == first.gradients, "the same exchange() on ", options.world,
              " ranks gives other gradients");
      require(again.states == first.states, "the same exchange() on ", options.world,
              " ranks gives other private states");
    }
  });
}

void exchange_fits_its_plan(Case& test) {
  for_each_job(test, [&](const LocalStart& start, LocalOptions options) {
    options.exact_scratch = true;
    std::vector<uint64_t> received(static_cast<std::size_t>(options.world)), planned(received);
    on_local_ranks(test, start, options, [&](LocalRank& rank) {
      rank.exchange();
      const auto r = static_cast<std::size_t>(rank.rank());
      received[r] = rank.received();
      planned[r] = rank.plan().received;
      require(rank.scratch().surroundings_are_intact(), "exchange() writes outside the memory for messages, which has ",
              "the size of plan()");
    });
    uint64_t total = 0;
    for (const uint64_t bytes : received) total += bytes;
    require(std::count(planned.begin(), planned.end(), planned[0]) == options.world,
            "plan() reports other received bytes on another rank");
    require(total <= planned[0], "the ranks receive ", total, " bytes in a step, but plan() reports ", planned[0]);
  });
}

// Content of arrays that exchange() did not get.
std::string rest_of(const LocalRank& rank, const std::vector<std::size_t>& given) {
  std::string rest;
  for (std::size_t p = 0; p < rank.arrays().size(); ++p) {
    const auto& [own, private_states] = rank.arrays()[p];
    for (const std::string& content : own.contents()) rest += content;
    if (std::find(given.begin(), given.end(), p) != given.end()) continue;
    rest += own.grad.content();
    for (const Array& state : private_states) rest += state.content();
  }
  return rest;
}

void exchange_writes_only_its_parameters(Case& test) {
  for_each_job(test, [&](const LocalStart& start, const LocalOptions& options) {
    on_local_ranks(test, start, options, [&](LocalRank& rank) {
      rank.exchange();
      for (const std::size_t left_out : {0, 1, 2}) {
        std::vector<std::size_t> some;
        for (std::size_t p = 0; p < rank.arrays().size(); ++p)
          if (p % 3 != left_out) some.push_back(p);
        const std::string before = rest_of(rank, some);
        const Answer answer = rank.exchange(some);
        require(answer.ok(), "exchange() of some parameters ", answer.said());
        require(rest_of(rank, some) == before, "exchange() changes weights, public states, or what belongs to a ",
                "parameter that is not in its list");
      }
      for (const auto& [own, private_states] : rank.arrays()) {
        require(own.grad.surroundings_are_intact(), "exchange() writes outside the view of a gradient");
        own.check_surroundings(own.grad.content());
        for (const Array& state : private_states)
          require(state.surroundings_are_intact(), "exchange() writes outside the view of a private state");
      }
    });
  });
}

void returns_errors_of_collectives(Case& test) {
  constexpr uint64_t kMost = 64;  // collectives of two steps that are checked
  const LocalStart start(test, 2, 1);
  std::vector<std::size_t> all;
  for (std::size_t p = 0; p < start.parameters.size(); ++p) all.push_back(p);
  for (const zr_code code : {ZR_COMM, ZR_CANCELLED})
    for (uint64_t at = 0; at < kMost; ++at) {
      std::vector<int> failed(2, 0);
      test.note("exchange() whose collective ", at, " fails");
      on_local_ranks(test, start, {.world = 2, .fail_at = at, .code = code}, [&](LocalRank& rank) {
        for (int step = 0; step < 2; ++step) {
          const Answer answer = rank.exchange(all);
          if (answer.ok()) continue;
          require(answer.code == code, "a collective of exchange() fails with ", code_text(code), ", but exchange() ",
                  answer.said());
          require(!answer.text.empty(), "exchange() ", answer.said(), ", without a text");
          failed[static_cast<std::size_t>(rank.rank())] = 1;
          return;
        }
        require(!rank.had_failure(), "a collective of exchange() fails, but exchange() returns ZR_OK");
      });
      if (failed[0] + failed[1] == 0) {
        if (at == 0) skip("exchange() issues no collective");
        break;
      }
    }
}

void other_ranks_elements_are_updated(Case& test) {
  for_each_job(test, [&](const LocalStart& start, const LocalOptions& options) {
    std::vector<std::string> weights(static_cast<std::size_t>(options.world));
    on_local_ranks(test, start, options, [&](LocalRank& rank) {
      for (int step = 0; step < kSteps; ++step) {
        rank.exchange();
        rank.set_equal_gradients();
        std::vector<std::vector<std::string>> before;
        for (const auto& arrays : rank.arrays()) before.push_back(arrays.own.contents());
        rank.update();
        for (std::size_t p = 0; p < rank.arrays().size(); ++p) rank.check_states_of_others(p, before[p]);
      }
      for (const auto& arrays : rank.arrays())
        weights[static_cast<std::size_t>(rank.rank())] += arrays.own.master_bits() + arrays.own.weight16.content();
    });
    for (std::size_t r = 1; r < weights.size(); ++r)
      require(weights[r] == weights[0], "after step() with local gradients, ranks 0 and ", r, " of ", options.world,
              " have different weights: elements of other ranks are updated differently");
  });
}

constexpr Rule kRules[] = {
    {"ZR-O25", "optimizer",
     "With ZR_OPT_NEEDS_LOCAL_GRADS, an optimizer is elementwise and has the functions for it; its plan() is pure.",
     declares_local_gradients},
    {"ZR-O26", "optimizer", "exchange() gives all ranks the same gradients, whichever elements they serve.",
     ranks_get_equal_gradients},
    {"ZR-O27", "optimizer", "The same exchange() gives the same bits, in every job.", exchange_is_deterministic},
    {"ZR-O28", "optimizer", "exchange() needs no more memory and receives no more bytes than plan() reports.",
     exchange_fits_its_plan},
    {"ZR-O29", "optimizer", "exchange() writes the gradients and private states of its list, and nothing else.",
     exchange_writes_only_its_parameters},
    {"ZR-O30", "optimizer", "If a collective fails, exchange() returns its code.", returns_errors_of_collectives},
    {"ZR-O31", "optimizer",
     "step() with local gradients updates elements of other ranks as their owner, and leaves their states.",
     other_ranks_elements_are_updated},
};

}  // namespace

std::span<const Rule> local_gradients_rules() { return kRules; }

}  // namespace zr::conform
