#include "engine/optimizer_description.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <string_view>

#include "base/draft_abi.hpp"  // IWYU pragma: keep
#include "base/dtype.hpp"
#include "base/error.hpp"
#include "base/text.hpp"
#include "base/unknown_bits.hpp"

namespace zr::host::engine {

namespace {

constexpr uint64_t kCpuMemory = uint64_t{1} << ZR_DEVICE_CPU;

// Checkpoints identify the states of a parameter by their names.
void check_names(const std::vector<zr_slot>& slots, const std::string& call) {
  constexpr std::size_t kLongestName = 100;  // checkpoints have files of this name
  std::set<std::string_view> names;
  for (const zr_slot& slot : slots)
    if (slot.name && (find_not_utf8(slot.name) != std::string_view::npos || std::strlen(slot.name) > kLongestName))
      fail_environment(
          fmt::format("{}: the name of state '{}' must be UTF-8 and have at most {} bytes: this is a bug in "
                      "the plug-in",
                      call, printable(slot.name), kLongestName));
  for (const zr_slot& slot : slots)
    if (!slot.name || !names.insert(slot.name).second)
      fail_user(fmt::format(
          "{}: {}; correct the plug-in, or choose another optimizer", call,
          slot.name ? fmt::format("two states have the name '{}'", printable(slot.name)) : "a state has no name"));
}

std::string slot_problem(const zr_slot& slot) {
  const std::string name = fmt::format("state '{}': ", printable(slot.name));
  if (slot.shape != ZR_SLOT_LIKE_PARAM && slot.shape != ZR_SLOT_PER_BLOCK)
    return fmt::format("{}shape {} is not a shape that this zeroth knows; install a newer zeroth", name, slot.shape);
  if (size_of(slot.dtype) == 0)
    return fmt::format("{}dtype {} is not a dtype that this zeroth knows; install a newer zeroth", name, slot.dtype);
  const std::string bits = unknown_bits_problem(name + "flags", slot.flags,
                                                uint64_t{ZR_SLOT_RANK_PRIVATE} | ZR_SLOT_TRANSIENT | ZR_SLOT_UNSHARDED);
  return bits.empty() && slot.shape == ZR_SLOT_LIKE_PARAM ? reserved_problem(name + "block", slot.block) : bits;
}

// True if the description has values of the draft headers.
bool uses_drafts(const zr_optimizer_desc& desc, const std::vector<zr_slot>& slots) {
  return desc.granularity != ZR_ELEMENTWISE || desc.needs != 0 ||
         std::any_of(slots.begin(), slots.end(),
                     [](const zr_slot& slot) { return slot.shape != ZR_SLOT_LIKE_PARAM || slot.flags != 0; });
}

std::string problem_of(const zr_optimizer_desc& desc, const std::vector<zr_slot>& slots) {
  if (desc.granularity < ZR_ELEMENTWISE || desc.granularity > ZR_TENSORWISE)
    return fmt::format("granularity {} is not a granularity that this zeroth knows; install a newer zeroth",
                       desc.granularity);
  if (std::string problem =
          unknown_bits_problem("needs", desc.needs, uint64_t{ZR_OPT_NEEDS_COMM} | ZR_OPT_NEEDS_LOCAL_GRADS);
      !problem.empty())
    return problem;
  if (std::string problem = reserved_problem("rsv", desc.rsv); !problem.empty()) return problem;
  if (!(desc.device_types & kCpuMemory))
    return fmt::format("device_types is {:#x}, without CPU memory ({:#x}), where the engine updates parameters",
                       desc.device_types, kCpuMemory);
  for (const zr_slot& slot : slots)
    if (std::string problem = slot_problem(slot); !problem.empty()) return problem;
  return "";
}

bool same(const OptimizerDescription& a, const OptimizerDescription& b) {
  const auto same_slot = [](const zr_slot& x, const zr_slot& y) {
    return std::string_view(x.name) == y.name && x.dtype == y.dtype && x.shape == y.shape && x.flags == y.flags &&
           x.block == y.block;
  };
  return a.granularity == b.granularity && a.needs == b.needs &&
         std::equal(a.slots.begin(), a.slots.end(), b.slots.begin(), b.slots.end(), same_slot);
}

OptimizerDescription describe(const plugin::Instance& optimizer, const plan::Parameter& parameter) {
  const zr_param param{
      sizeof(zr_param),       parameter.frozen ? uint32_t{ZR_PARAM_FROZEN} : 0u, parameter.name.c_str(),
      parameter.shape.data(), static_cast<int32_t>(parameter.shape.size()),      parameter.group,
      parameter.count};
  zr_optimizer_desc desc{};
  desc.size = sizeof desc;
  CallError error;
  const std::string call = optimizer.call_text("describe");
  const auto describe = [&] {
    return optimizer.api<zr_optimizer_api>()->describe(optimizer.self(), &param, &desc, &error);
  };
  check(call_plugin(&error, describe), error, call);
  if (desc.n_slots > 0 && !desc.slots)
    fail_internal(
        fmt::format("{}: it has {} states, but their list is null: this is a bug in the plug-in", call, desc.n_slots));
  std::vector<zr_slot> slots(desc.slots, desc.slots + desc.n_slots);
  check_names(slots, call);
  if (const std::string problem = problem_of(desc, slots); !problem.empty())
    fail_environment(fmt::format("{} of '{}': {}", call, parameter.name, problem));
  if (uses_drafts(desc, slots) && !optimizer.component().drafts)
    fail_environment(
        fmt::format("{} of '{}': it has values of draft headers, but the library has no tag zr_tag_draft_{}_{}; "
                    "include the header from "
                    "zr/abi/draft that declares them",
                    call, parameter.name, ZR_ABI_MAJOR, ZR_ABI_MINOR));
  return {desc.granularity, desc.needs, std::move(slots)};
}

}  // namespace

OptimizerDescription describe_optimizer(const plugin::Instance& optimizer,
                                        const std::vector<plan::Parameter>& parameters) {
  OptimizerDescription common;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    OptimizerDescription description = describe(optimizer, parameters[i]);
    if (i == 0)
      common = std::move(description);
    else if (!same(common, description))
      fail_environment(fmt::format(
          "{}: '{}' and '{}' have different states, needs or granularities, which this zeroth does not support; choose "
          "another optimizer",
          optimizer.call_text("describe"), parameters[0].name, parameters[i].name));
  }
  return common;
}

}  // namespace zr::host::engine
