// ZR-O..: optimizers.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <string>
#include <thread>

#include "conform/fused_multiply_add.hpp"
#include "conform/optimizer_run.hpp"
#include "conform/rule.hpp"
#include "zr/float_cast.hpp"
#include "zr/names.hpp"

namespace zr::host::conform {

namespace {

constexpr int64_t kCount = 5000, kNormBlock = 1024;
constexpr uint32_t kDraftNeeds = 3;  // zr/abi/draft: bits that a library with a draft tag may set
constexpr std::array kWeightDtypes{ZR_F32, ZR_BF16, ZR_F16};
constexpr std::array kNarrowDtypes{ZR_BF16, ZR_F16};  // their weights are rounded masters

void describes_itself(Case& test) {
  TestHost host;
  OptimizerRun run(test, host);
  const zr_optimizer_desc desc = run.describe();
  require(desc.granularity >= ZR_ELEMENTWISE && desc.granularity <= 3, "granularity is ", desc.granularity);
  require(desc.needs <= kDraftNeeds, "needs is ", desc.needs, ", with unknown bits");
  require(desc.rsv == 0, "rsv is ", desc.rsv, ", not 0");
  require(desc.device_types & (1u << ZR_DEVICE_CPU), "device_types is ", desc.device_types, ", without CPU memory");
  require(desc.n_slots == 0 || desc.slots, "it has ", desc.n_slots, " states, but its list of states is NULL");
  for (uint32_t i = 0; i < desc.n_slots; ++i) {
    const zr_slot& slot = desc.slots[i];
    require(slot.name && *slot.name, "state ", i, " has no name");
    require(std::strlen(slot.name) <= 100, "the name of state ", i, " has more than 100 bytes");
    require(size_of(slot.dtype) > 0, "the dtype of state '", slot.name, "' is ", slot.dtype);
    require(slot.shape != ZR_SLOT_LIKE_PARAM || (slot.flags == 0 && slot.block == 0), "flags or block of state '",
            slot.name, "' is not 0");
  }
}

std::string text_of(const zr_optimizer_desc& desc) {
  std::string text =
      concat(desc.granularity, " ", desc.needs, " ", desc.n_slots, " ", desc.device_types, " ", desc.flags);
  for (uint32_t i = 0; i < desc.n_slots; ++i)
    text += concat(" ", desc.slots[i].name, " ", desc.slots[i].dtype, " ", desc.slots[i].shape);
  return text;
}

void description_is_stable(Case& test) {
  TestHost host;
  OptimizerRun run(test, host);
  const std::string first = text_of(run.describe());
  for (const int64_t count : {int64_t{0}, int64_t{1}, int64_t{1} << 40, int64_t{1000}}) {
    const std::string once = text_of(run.describe({}, count));
    require(text_of(run.describe({}, count)) == once, "describe() differs in its second call for a parameter of ",
            count, " elements");
  }
  ParameterArrays arrays({.count = kCount}, run.slots(kCount), test.random());
  run.update(arrays);
  require(text_of(run.describe()) == first, "describe() differs after step()");
  TestHost other_host;
  OptimizerRun other(test, other_host);
  require(text_of(other.describe()) == first, "describe() differs in another instance");
}

void writes_only_its_views(Case& test) {
  TestHost host;
  OptimizerRun run(test, host);
  for (const zr_dtype dtype : kWeightDtypes)
    for (const int64_t count : {int64_t{1}, int64_t{31}, int64_t{1023}, kCount}) {
      test.note("updating ", count, " elements with weights of ", name_of(dtype));
      ParameterArrays arrays({.count = count, .weight_dtype = dtype}, run.slots(count), test.random());
      const std::string gradient = arrays.grad.content();
      run.update(arrays);
      arrays.check_surroundings(gradient);
      // Of three slices, only the second is updated: the others are padding.
      if (count < 3) continue;
      const std::string master = arrays.master.content();
      run.update(arrays, {.cuts = {{count / 3, count / 3}}, .step = 2});
      const std::string now = arrays.master.content();
      const auto start = static_cast<std::size_t>(count / 3 * 4), end = static_cast<std::size_t>(count / 3 * 8);
      require(now.compare(0, start, master, 0, start) == 0 && now.compare(end, now.npos, master, end) == 0,
              "it wrote weights outside its slice");
    }
}

// Three steps, so that the states matter.
void three_steps(OptimizerRun& run, ParameterArrays& arrays, UpdateOptions options) {
  for (options.step = 1; options.step <= 3; ++options.step, arrays.new_gradient()) run.update(arrays, options);
}

std::string result_of(Case& test, const ParameterArrays::Layout& layout, const UpdateOptions& options) {
  TestHost host;
  OptimizerRun run(test, host);
  ParameterArrays arrays(layout, run.slots(layout.count), test.random());
  three_steps(run, arrays, options);
  return arrays.bits();
}

void require_elementwise(Case& test) {
  TestHost host;
  OptimizerRun run(test, host);
  if (run.describe().granularity != ZR_ELEMENTWISE) skip("the optimizer is not elementwise");
}

void cuts_change_nothing(Case& test) {
  require_elementwise(test);
  std::mt19937_64 random = test.random(1);
  for (const zr_dtype dtype : kWeightDtypes) {
    const ParameterArrays::Layout layout{.count = kCount, .weight_dtype = dtype};
    const std::string uncut = result_of(test, layout, {});
    for (int i = 0; i < 8; ++i) {
      const int64_t block = i % 2 ? 1 : kNormBlock;
      const Cuts cuts = random_cuts(kCount, block, random);
      require(result_of(test, layout, {.cuts = cuts, .one_call = i % 4 < 2}) == uncut,
              "the result differs if the parameter is cut into ", cuts.size(), " slices",
              block > 1 ? ", at borders of norm blocks" : "");
    }
  }
}

void results_are_deterministic(Case& test) {
  for (const zr_dtype dtype : kWeightDtypes) {
    const ParameterArrays::Layout layout{.count = kCount, .weight_dtype = dtype};
    const std::string first = result_of(test, layout, {});
    for (int i = 0; i < 3; ++i) require(result_of(test, layout, {}) == first, "the same update gives another result");
  }
}

void alignment_changes_nothing(Case& test) {
  const std::string aligned = result_of(test, {.count = kCount}, {});
  for (const std::size_t elements : {1, 3, 7, 8, 15})
    require(result_of(test, {.count = kCount, .shift = elements * 4}, {}) == aligned,
            "the result differs if the memory begins ", elements, " elements after a multiple of 64 bytes");
}

void threads_at_once(Case& test) {
  require_elementwise(test);
  const std::string alone = result_of(test, {.count = kCount}, {});
  TestHost host;
  OptimizerRun run(test, host);
  constexpr std::size_t kThreads = 4;
  std::vector<std::string> results(kThreads);
  std::vector<std::thread> threads;
  const auto& slots = run.slots(kCount);
  for (std::size_t t = 0; t < kThreads; ++t)
    threads.emplace_back([&, t] {
      try {
        for (int round = 0; round < 25; ++round) {
          ParameterArrays arrays({.count = kCount}, slots, test.random());
          three_steps(run, arrays, {});
          results[t] = arrays.bits();
          if (results[t] != alone) return;
        }
      } catch (const Failure& failure) {
        results[t] = failure.reason;
      }
    });
  for (std::thread& thread : threads) thread.join();
  for (const std::string& result : results)
    require(result == alone, "four threads at once give another result than one");
}

uint16_t rounded(float value, zr_dtype dtype) { return dtype == ZR_BF16 ? to_bf16(value) : to_f16(value); }

void weights_are_rounded_masters(Case& test) {
  TestHost host;
  OptimizerRun run(test, host);
  const std::string fp32 = [&] {
    ParameterArrays arrays({.count = kCount}, run.slots(kCount), test.random());
    three_steps(run, arrays, {});
    return arrays.master_bits();
  }();
  for (const zr_dtype dtype : kNarrowDtypes) {
    ParameterArrays arrays({.count = kCount, .weight_dtype = dtype}, run.slots(kCount), test.random());
    // Halfway between two values of the narrow dtype, if the update changes little: ties show the rounding.
    for (int64_t i = 0; i < kCount; i += 2) {
      const uint32_t bits = bits_of(arrays.master.as<float>()[i]);
      if (i % 4 == 0) arrays.grad.as<float>()[i] = 0;
      arrays.master.as<float>()[i] =
          float_of(dtype == ZR_BF16 ? (bits & 0xffff0000u) | 0x8000u : (bits & 0xffffe000u) | 0x1000u);
    }
    run.update(arrays);
    for (int64_t i = 0; i < kCount; ++i) {
      const float master = arrays.master.as<float>()[i];
      const uint16_t expected = rounded(master, dtype), actual = arrays.weight16.as<uint16_t>()[i];
      require(expected == actual, "the ", name_of(dtype), " weight of the master ", master, " is 0x", std::hex, actual,
              ", not 0x", expected, " (nearest even)");
    }
    ParameterArrays same({.count = kCount, .weight_dtype = dtype}, run.slots(kCount), test.random());
    three_steps(run, same, {});
    require(same.master_bits() == fp32, "masters of ", name_of(dtype), " weights differ from fp32 weights");
  }
}

void narrow_weights_are_not_read(Case& test) {
  for (const zr_dtype dtype : kNarrowDtypes) {
    const std::string first = result_of(test, {.count = kCount, .weight_dtype = dtype, .undefined = 0x99}, {});
    require(result_of(test, {.count = kCount, .weight_dtype = dtype, .undefined = 0x42}, {}) == first,
            "the result depends on the content of the ", name_of(dtype), " weight on entry");
  }
}

void extreme_gradients(Case& test) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity(), kNan = std::numeric_limits<float>::quiet_NaN();
  TestHost host;
  OptimizerRun run(test, host);
  const bool elementwise = run.describe().granularity == ZR_ELEMENTWISE;
  ParameterArrays usual({.count = kCount}, run.slots(kCount), test.random()),
      extreme({.count = kCount}, run.slots(kCount), test.random());
  for (int64_t i = 0; i < kCount; i += 100)
    extreme.grad.as<float>()[i] = i % 300 == 0 ? kNan : i % 300 == 100 ? kInfinity : -3e38f;
  run.update(usual);
  run.update(extreme);
  for (int64_t i = 0; elementwise && i < kCount; ++i)
    require(i % 100 == 0 || bits_of(usual.master.as<float>()[i]) == bits_of(extreme.master.as<float>()[i]),
            "a gradient that is not finite changes the update of another element");
}

void resolves_once(Case& test) {
  TestHost host;
  OptimizerRun run(test, host);
  ParameterArrays with({.count = kCount}, run.slots(kCount), test.random()),
      without({.count = kCount}, run.slots(kCount), test.random());
  Completion& done = host.new_completion();
  test.note("waiting for the completion of step()");
  const Answer answer = run.try_update(with, {.done = &done});
  require(answer.ok(), "step() with a completion ", answer.said());
  require(host.wait(done, 5), "step() with a completion never resolves it");
  require(done.code() == ZR_OK, "the completion of step() was resolved with ", code_text(done.code()));
  run.update(without);
  require(with.bits() == without.bits(), "step() with a completion gives another result than without");
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  run.instance().check_host();
}

void failed_step_changes_nothing(Case& test) {
  TestHost host;
  OptimizerRun run(test, host);
  ParameterArrays arrays({.count = 1000}, run.slots(1000), test.random());
  const std::string before = arrays.bits();
  Completion& done = host.new_completion();
  const Answer answer = run.try_update(arrays, {.cuts = {{0, 500}}, .done = &done, .claimed_dtype = ZR_I8});
  if (answer.ok()) skip("step() accepts weights of int8");
  done.forbid();
  require(!answer.text.empty(), "step() of int8 weights ", answer.said(), ", without a text");
  require(arrays.bits() == before, "step() failed, but changed weights or states");
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  require(!done.is_resolved(), "step() failed, but resolved its completion");
}

// Another value of a key that groups may override; nothing if there is no such key.
std::optional<std::pair<std::string, KeyValue>> other_value(const zr_component& component, const KeyValues& values) {
  for (uint32_t i = 0; i < component.n_keys; ++i) {
    const zr_key& key = *component.keys[i];
    const auto* value = std::get_if<double>(&values.at(key.name));
    if (!(key.flags & ZR_KEY_PER_GROUP) || !value) continue;
    for (const double other : {*value * 0.5, *value * 0.5 + 0.25, *value + 0.125})
      if (other != *value && other >= key.min && other <= key.max) return {{key.name, other}};
  }
  return {};
}

void groups_use_their_own_values(Case& test) {
  const KeyValues values = Instance::values_for(test);
  TestHost host, other_host;
  OptimizerRun run(test, host, values);
  KeyValues other = values;
  const auto change = other_value(run.instance().component(), values);
  if (change) other[change->first] = change->second;
  for (const uint32_t group : {1u, 2u}) {
    const Answer answer = run.add_group(group, other);
    require(answer.ok(), "add_group(", group, ") ", answer.said());
  }
  OptimizerRun alone(test, other_host, other);
  for (const uint32_t group : {2u, 1u, 0u}) {
    ParameterArrays in_group({.count = kCount}, run.slots(kCount), test.random()),
        reference({.count = kCount}, run.slots(kCount), test.random());
    three_steps(run, in_group, {.group = group});
    TestHost default_host;
    OptimizerRun defaults(test, default_host, values);
    three_steps(group == 0 ? defaults : alone, reference, {});
    require(in_group.bits() == reference.bits(), "a parameter of group ", group,
            " is not updated with the values of its group", change ? " (key '" + change->first + "')" : "");
  }
}

void gradient_is_multiplied_once(Case& test) {
  TestHost host;
  OptimizerRun run(test, host);
  ParameterArrays whole({.count = kCount}, run.slots(kCount), test.random()),
      scaled({.count = kCount}, run.slots(kCount), test.random());
  for (int64_t i = 0; i < kCount; ++i) scaled.grad.as<float>()[i] *= 8;  // exact
  run.update(whole, {.grad_mul = 0.25f});
  run.update(scaled, {.grad_mul = 0.25f / 8});
  require(whole.bits() == scaled.bits(), "a gradient 8 times as large with a grad_mul of 1/8 gives another result");
}

void unknown_flags_are_ignored(Case& test) {
  TestHost host;
  OptimizerRun run(test, host);
  ParameterArrays plain({.count = kCount}, run.slots(kCount), test.random()),
      flagged({.count = kCount}, run.slots(kCount), test.random());
  run.update(plain);
  const std::string before = text_of(run.describe());
  require(text_of(run.describe({}, 1000, 0, 1u << 30)) == before, "describe() differs for an unknown flag");
  const Answer answer = run.try_update(flagged, {.unknown_flags = 1u << 30});
  require(answer.ok(), "step() of a slice with an unknown flag ", answer.said());
  require(plain.bits() == flagged.bits(), "an unknown flag of a slice changes the result");
}

void uses_no_forbidden_service(Case& test) {
  TestHost host;
  OptimizerRun run(test, host);
  ParameterArrays arrays({.count = kCount}, run.slots(kCount), test.random());
  three_steps(run, arrays, {.cuts = {{0, kNormBlock}, {kNormBlock, kCount - kNormBlock}}});
  const std::string problem = host.problem(TestHost::Misuse::worker);
  require(problem.empty(), problem, ", which a [worker] function must not do");
}

void no_fused_multiply_add(Case& test) {
  TestHost host;
  OptimizerRun run(test, host);
  ParameterArrays arrays({.count = 100}, run.slots(100), test.random());
  const std::string found = find_fused_multiply_add(test.library(), [&] { run.update(arrays); });
  require(found.empty(), found);
}

constexpr Rule kRules[] = {
    {"ZR-O01", "optimizer", "describe() reports a known granularity, CPU memory, and states with names and dtypes.",
     describes_itself},
    {"ZR-O02", "optimizer", "describe() gives the same result for every parameter, at any time, in any instance.",
     description_is_stable},
    {"ZR-O03", "optimizer", "step() writes the weight, the master and the states of its slices, and nothing else.",
     writes_only_its_views},
    {"ZR-O04", "optimizer", "The result of an elementwise optimizer does not depend on how parameters are cut.",
     cuts_change_nothing},
    {"ZR-O05", "optimizer", "The same update gives the same bits, in every instance.", results_are_deterministic},
    {"ZR-O06", "optimizer", "The result does not depend on the alignment of the memory.", alignment_changes_nothing},
    {"ZR-O07", "optimizer", "Several threads may call step() at once on disjoint data.", threads_at_once},
    {"ZR-O08", "optimizer", "A bf16 or fp16 weight is its master rounded once, to nearest even.",
     weights_are_rounded_masters},
    {"ZR-O09", "optimizer", "A bf16 or fp16 weight is not read: it is undefined on entry.",
     narrow_weights_are_not_read},
    {"ZR-O10", "optimizer", "Gradients that are not finite affect only their own elements.", extreme_gradients},
    {"ZR-O11", "optimizer", "step() resolves its completion exactly once.", resolves_once},
    {"ZR-O12", "optimizer", "A step() that fails has a text, changes nothing, and does not resolve its completion.",
     failed_step_changes_nothing},
    {"ZR-O13", "optimizer", "A parameter is updated with the values of its group.", groups_use_their_own_values},
    {"ZR-O14", "optimizer", "step() multiplies the gradient by grad_mul exactly once.", gradient_is_multiplied_once},
    {"ZR-O15", "optimizer", "Unknown flags of parameters and slices are ignored.", unknown_flags_are_ignored},
    {"ZR-O16", "optimizer", "step() neither allocates host memory nor waits nor starts tasks.",
     uses_no_forbidden_service},
    {"ZR-O17", "optimizer", "step() executes no fused multiply-add instruction.", no_fused_multiply_add},
};

}  // namespace

std::span<const Rule> optimizer_rules() { return kRules; }

}  // namespace zr::host::conform
