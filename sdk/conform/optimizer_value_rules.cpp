// ZR-O08 to O17: the values of updates, completions, errors, and services that step() leaves alone.
#include <array>
#include <cmath>
#include <limits>
#include <string>
#include <thread>

#include "conform/fused_multiply_add.hpp"
#include "conform/optimizer_rules.hpp"
#include "zr/float_cast.hpp"
#include "zr/names.hpp"

namespace zr::conform {

std::optional<std::pair<std::string, KeyValue>> other_group_value(const zr_component& component,
                                                                  const KeyValues& values) {
  for (uint32_t i = 0; i < component.n_keys; ++i) {
    const zr_key& key = *component.keys[i];
    const auto* value = std::get_if<double>(&values.at(key.name));
    if (!(key.flags & ZR_KEY_PER_GROUP) || !value) continue;
    for (const double other : {*value * 0.5, *value * 0.5 + 0.25, *value + 0.125})
      if (other != *value && other >= key.min && other <= key.max) return {{key.name, other}};
  }
  return {};
}

namespace {

uint16_t rounded(float value, zr_dtype dtype) { return dtype == ZR_BF16 ? to_bf16(value) : to_f16(value); }
float upcast(uint16_t value, zr_dtype dtype) { return dtype == ZR_BF16 ? from_bf16(value) : from_f16(value); }

void require_rounded(const ParameterArrays& arrays) {
  const zr_dtype dtype = arrays.layout.weight_dtype;
  for (int64_t i = 0; i < arrays.count; ++i) {
    const float master = arrays.master.as<float>()[i];
    const uint16_t expected = rounded(master, dtype), actual = arrays.weight16.as<uint16_t>()[i];
    require(expected == actual || (std::isnan(master) && std::isnan(upcast(actual, dtype))), "the ", name_of(dtype),
            " weight of the master ", master, " is 0x", std::hex, actual, ", not 0x", expected, " (nearest even)");
  }
}

void weights_are_rounded_masters(Case& test) {
  TestHost host;
  OptimizerRun run(test, host);
  for (const Shape& shape : run.supported(kShapes)) {
    ParameterArrays fp32 = run.arrays({.shape = shape}, test.random());
    three_steps({&run}, {{&fp32}});
    for (const zr_dtype dtype : k16BitDtypes) {
      const ParameterArrays::Layout layout{.shape = shape, .weight_dtype = dtype};
      ParameterArrays ties = run.arrays(layout, test.random()), large = run.arrays(layout, test.random()),
                      same = run.arrays(layout, test.random());
      // Halfway between two values of the 16-bit dtype, if the update changes little: ties show the rounding.
      for (int64_t i = 0; i < ties.count; i += 2) {
        const uint32_t bits = bits_of(ties.master.as<float>()[i]);
        if (i % 4 == 0) ties.grad.as<float>()[i] = 0;
        ties.master.as<float>()[i] =
            float_of(dtype == ZR_BF16 ? (bits & 0xffff0000u) | 0x8000u : (bits & 0xffffe000u) | 0x1000u);
      }
      run.update(ties, {.lr = 1e-9});
      require_rounded(ties);
      // Around the largest finite number: what is nearer to the next power of two becomes infinite.
      const std::array<float, 4> beyond = dtype == ZR_BF16 ? std::array{3.39e38f, -3.395e38f, 3.397e38f, -3.4e38f}
                                                           : std::array{65519.f, -65520.f, 65535.f, -1e6f};
      for (int64_t i = 0; i < large.count; i += 50)
        large.master.as<float>()[i] = beyond[static_cast<std::size_t>(i / 50 % 4)];
      run.update(large, {.lr = 1e-9});
      require_rounded(large);
      three_steps({&run}, {{&same}});
      require(same.master_bits() == fp32.master_bits(), "masters of ", name_of(dtype),
              " weights differ from fp32 weights, for a parameter of shape ", text_of(shape));
    }
  }
}

void weights_of_16_bits_are_not_read(Case& test) {
  for (const Shape& shape : supported_shapes(test, kShapes))
    for (const zr_dtype dtype : k16BitDtypes) {
      const std::string first = optimizer_result(test, {.shape = shape, .weight_dtype = dtype, .undefined = 0x99});
      require(optimizer_result(test, {.shape = shape, .weight_dtype = dtype, .undefined = 0x42}) == first,
              "the result depends on the content of the ", name_of(dtype), " weight on entry");
    }
}

// Every 2500 elements, three that are not finite or overflow when they are squared.
void make_extreme(const ParameterArrays& arrays) {
  constexpr std::array kExtremes{std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                                 -3e38f};
  for (int64_t i = 0; i < arrays.count; i += 2500)
    for (int64_t j = 0; j < 3 && i + 100 * j < arrays.count; ++j)
      arrays.grad.as<float>()[i + 100 * j] = kExtremes[static_cast<std::size_t>(j)];
}

void extreme_gradients(Case& test) {
  TestHost host, other_host;
  OptimizerRun run(test, host), other_run(test, other_host);
  for (const Shape& shape : run.supported(kShapes)) {
    ParameterArrays usual = run.arrays({.shape = shape}, test.random()),
                    extreme = run.arrays({.shape = shape}, test.random()),
                    other = run.arrays({.shape = shape}, test.random(1)),
                    reference = run.arrays({.shape = shape}, test.random(1));
    make_extreme(extreme);
    const int64_t block = usual.description.is_elementwise() ? 1 : usual.description.cut_block();
    std::vector<bool> affected(static_cast<std::size_t>(usual.count / block + 1));
    for (int64_t i = 0; i < usual.count; ++i)
      if (bits_of(usual.grad.as<float>()[i]) != bits_of(extreme.grad.as<float>()[i]))
        affected[static_cast<std::size_t>(i / block)] = true;
    other_run.update(usual);
    other_run.update(reference);
    if (const Answer answer = update_parameters({&run}, {{&extreme}, {&other}}); !answer.ok())
      fail("an update ", answer.said());
    require(other.bits() == reference.bits(),
            "a gradient that is not finite changes the update of another parameter of shape ", text_of(shape));
    if (!usual.description.has_independent_blocks()) continue;
    for (int64_t i = 0; i < usual.count; ++i)
      require(affected[static_cast<std::size_t>(i / block)] ||
                  bits_of(usual.master.as<float>()[i]) == bits_of(extreme.master.as<float>()[i]),
              "a gradient that is not finite changes the update of another ", block == 1 ? "element" : "block");
  }
}

void resolves_once(Case& test) {
  TestHost host;
  OptimizerRun run(test, host);
  bool steps = false;
  for (const Shape& shape : run.supported(kShapes)) {
    ParameterArrays with = run.arrays({.shape = shape}, test.random()),
                    without = run.arrays({.shape = shape}, test.random());
    if (!with.description.sums.empty()) continue;
    steps = true;
    Completion& done = host.new_completion();
    std::string when_resolved;
    done.on_resolve = [&] { when_resolved = with.bits(); };
    test.note("waiting for the completion of step()");
    const Answer answer = run.try_update(with, {.done = &done});
    require(answer.ok(), "step() with a completion ", answer.said());
    require(host.wait(done, 5), "step() with a completion never resolves it");
    require(done.code() == ZR_OK, "the completion of step() was resolved with ", code_text(done.code()));
    run.update(without);
    require(with.bits() == without.bits(), "step() with a completion gives another result than without");
    require(when_resolved == without.bits(), "step() resolves its completion before the update is complete");
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    run.instance().check_host();
  }
  if (!steps) skip("the host does not call step() for it: every parameter has passes, and update() has no completion");
}

void failed_step_changes_nothing(Case& test) {
  TestHost host;
  OptimizerRun run(test, host);
  std::mt19937_64 random = test.random(1);
  bool accepts = true;
  for (const Shape& shape : run.supported(kShapes)) {
    ParameterArrays arrays = run.arrays({.shape = shape}, test.random());
    const auto passes = static_cast<uint32_t>(arrays.description.sums.size());
    const Cuts cuts = passes ? Cuts{} : arrays.description.random_cuts(random);  // the last slice is invalid
    const std::string before = arrays.bits();
    Completion& done = host.new_completion();
    const Answer answer = run.try_update(arrays, {.cuts = cuts, .done = &done, .claimed_dtype = ZR_I8});
    if (answer.ok()) continue;
    accepts = false;
    done.forbid();
    require(!answer.text.empty(), "an update of int8 weights ", answer.said(), ", without a text");
    require(arrays.bits() == before, "an update failed, but changed weights or states",
            cuts.size() > 1 ? ": those of the slices before the invalid one" : "");
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    require(!done.is_resolved(), "step() failed, but resolved its completion");
    const std::string weights = arrays.master_bits();
    if (passes && !run.try_update(arrays, {.claimed_dtype = ZR_I8, .claimed_pass = passes}).ok())
      require(arrays.master_bits() == weights, "update() failed, but changed weights");
  }
  if (accepts) skip("step() accepts weights of int8");
}

void groups_use_their_own_values(Case& test) {
  const KeyValues values = Instance::values_for(test);
  TestHost host, other_host, default_host;
  OptimizerRun run(test, host, values);
  KeyValues other = values;
  const auto change = other_group_value(run.instance().component(), values);
  if (change) other[change->first] = change->second;
  for (const uint32_t group : {1u, 2u}) {
    const Answer answer = run.add_group(group, other);
    require(answer.ok(), "add_group(", group, ") ", answer.said());
  }
  const OptimizerRun alone(test, other_host, other), defaults(test, default_host, values);
  for (const Shape& shape : run.supported(kShapes))
    for (const uint32_t group : {2u, 1u, 0u}) {
      ParameterArrays in_group = run.arrays({.shape = shape}, test.random(), group),
                      reference = (group == 0 ? defaults : alone).arrays({.shape = shape}, test.random());
      three_steps({&run}, {{&in_group, {.group = group}}});
      three_steps({group == 0 ? &defaults : &alone}, {{&reference}});
      require(in_group.bits() == reference.bits(), "a parameter of group ", group,
              " is not updated with the values of its group", change ? " (key '" + change->first + "')" : "");
    }
}

void gradient_is_multiplied_once(Case& test) {
  TestHost host;
  OptimizerRun run(test, host);
  for (const Shape& shape : run.supported(kShapes)) {
    ParameterArrays whole = run.arrays({.shape = shape}, test.random()),
                    scaled = run.arrays({.shape = shape}, test.random());
    for (int64_t i = 0; i < scaled.count; ++i) scaled.grad.as<float>()[i] *= 8;  // exact
    run.update(whole, {.grad_mul = 0.25f});
    run.update(scaled, {.grad_mul = 0.25f / 8});
    require(whole.bits() == scaled.bits(), "a gradient 8 times as large with a grad_mul of 1/8 gives another result");
  }
}

void unknown_flags_are_ignored(Case& test) {
  TestHost host;
  OptimizerRun run(test, host);
  for (const Shape& shape : run.supported(kShapes)) {
    ParameterArrays plain = run.arrays({.shape = shape}, test.random()),
                    flagged = run.arrays({.shape = shape}, test.random());
    run.update(plain);
    require(run.describe(shape, {}, 0, 1u << 30).text() == run.describe(shape).text(),
            "describe() differs for an unknown flag");
    const Answer answer = run.try_update(flagged, {.unknown_flags = 1u << 30});
    require(answer.ok(), "an update of a slice with an unknown flag ", answer.said());
    require(plain.bits() == flagged.bits(), "an unknown flag of a slice changes the result");
  }
}

void uses_no_forbidden_service(Case& test) {
  TestHost host;
  OptimizerRun run(test, host);
  std::mt19937_64 random = test.random(1);
  for (const Shape& shape : run.supported(kShapes)) {
    ParameterArrays arrays = run.arrays({.shape = shape}, test.random());
    three_steps({&run}, {{&arrays, {.cuts = arrays.description.random_cuts(random)}}});
  }
  const std::string problem = host.problem(TestHost::Misuse::worker);
  require(problem.empty(), problem, ", which a [worker] function must not do");
}

void no_fused_multiply_add(Case& test) {
  TestHost host;
  OptimizerRun run(test, host);
  for (const Shape& shape : run.supported({{100}, {10, 12}, {3, 4, 5}})) {
    ParameterArrays arrays = run.arrays({.shape = shape}, test.random());
    run.update(arrays);  // what is prepared once is not traced
    test.note("running an update of a parameter of shape ", text_of(shape), " one instruction at a time");
    const std::string found = find_fused_multiply_add(test.library(), [&] { run.update(arrays, {.step = 2}); });
    require(found.empty(), found);
  }
}

constexpr Rule kRules[] = {
    {"ZR-O08", "optimizer", "A bf16 or fp16 weight is its master rounded once, to nearest even.",
     weights_are_rounded_masters},
    {"ZR-O09", "optimizer", "A bf16 or fp16 weight is not read: it is undefined on entry.",
     weights_of_16_bits_are_not_read},
    {"ZR-O10", "optimizer", "Gradients that are not finite affect only their own elements, blocks or parameters.",
     extreme_gradients},
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

std::span<const Rule> optimizer_value_rules() { return kRules; }

}  // namespace zr::conform
