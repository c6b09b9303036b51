#include "job/optimizer_description.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>
#include <string_view>

#include "base/draft_abi.hpp"  // IWYU pragma: keep
#include "base/dtype.hpp"
#include "base/error.hpp"
#include "base/text.hpp"
#include "base/unknown_bits.hpp"

namespace zr::host::job {

namespace {

constexpr uint64_t kCpuMemory = uint64_t{1} << ZR_DEVICE_CPU;

// Checkpoints identify the states of a parameter by their names.
void check_names(const std::vector<zr_slot>& slots, const std::string& call) {
  constexpr std::size_t kLongestName = 100;  // checkpoints have files of this name
  std::set<std::string_view> names;
  for (const zr_slot& slot : slots)
    if (slot.name && (find_not_utf8(slot.name) != std::string_view::npos || std::strlen(slot.name) > kLongestName))
      fail_internal(fmt::format(
          "{}: the name of state '{}' must be UTF-8 and have at most {} bytes: this is a bug in the plug-in", call,
          printable(slot.name), kLongestName));
  for (const zr_slot& slot : slots)
    if (!slot.name || !names.insert(slot.name).second)
      fail_user(fmt::format(
          "{}: {}; correct the plug-in, or choose another optimizer", call,
          slot.name ? fmt::format("two states have the name '{}'", printable(slot.name)) : "a state has no name"));
}

// Values that only a newer zeroth knows.
std::string unknown_value(const zr_slot& slot) {
  const std::string name = fmt::format("state '{}': ", printable(slot.name));
  if (slot.shape < ZR_SLOT_LIKE_PARAM || slot.shape > ZR_SLOT_PER_COLUMN)
    return fmt::format("{}shape {} is not a shape that this zeroth knows; install a newer zeroth", name, slot.shape);
  if (size_of(slot.dtype) == 0)
    return fmt::format("{}dtype {} is not a dtype that this zeroth knows; install a newer zeroth", name, slot.dtype);
  if (std::string bits = unknown_bits_problem(name + "flags", slot.flags,
                                              uint64_t{ZR_SLOT_RANK_PRIVATE} | ZR_SLOT_TRANSIENT | ZR_SLOT_UNSHARDED);
      !bits.empty())
    return bits;
  return slot.shape == ZR_SLOT_LIKE_PARAM ? reserved_problem(name + "block", slot.block) : "";
}

std::string unknown_value(const zr_optimizer_desc& desc, const std::vector<zr_slot>& slots) {
  if (desc.granularity < ZR_ELEMENTWISE || desc.granularity > ZR_TENSORWISE)
    return fmt::format("granularity {} is not a granularity that this zeroth knows; install a newer zeroth",
                       desc.granularity);
  if (std::string problem =
          unknown_bits_problem("needs", desc.needs, uint64_t{ZR_OPT_NEEDS_COMM} | ZR_OPT_NEEDS_LOCAL_GRADS);
      !problem.empty())
    return problem;
  if (std::string problem = reserved_problem("rsv", desc.rsv); !problem.empty()) return problem;
  for (const zr_slot& slot : slots)
    if (std::string problem = unknown_value(slot); !problem.empty()) return problem;
  return "";
}

// Of a description without unknown values.
std::string problem_of(const zr_optimizer_desc& desc, const std::vector<zr_slot>& slots,
                       const plan::Parameter& parameter) {
  if (!(desc.device_types & kCpuMemory))
    return fmt::format("device_types is {:#x}, without CPU memory ({:#x}), which every optimizer must accept",
                       desc.device_types, kCpuMemory);
  const int64_t row = std::max<int64_t>(plan::row_elements(parameter), 1);
  for (const zr_slot& slot : slots) {
    if (slot.shape == ZR_SLOT_LIKE_PARAM) continue;
    const std::string name = fmt::format("state '{}': ", printable(slot.name));
    if (slot.block == 0) return name + "block is 0, must be at least 1";
    if (slot.shape == ZR_SLOT_PER_COLUMN && slot.block % row != 0)
      return fmt::format("{}block is {}, must be a multiple of the {} elements of a row", name, slot.block, row);
  }
  if (!(desc.cost >= 0) || !std::isfinite(desc.cost))
    return fmt::format("cost is {}, must be finite and at least 0", desc.cost);
  return "";
}

// True if the description has values of the draft headers.
bool uses_drafts(const zr_optimizer_desc& desc, const std::vector<zr_slot>& slots) {
  return desc.granularity != ZR_ELEMENTWISE || desc.needs != 0 ||
         std::any_of(slots.begin(), slots.end(),
                     [](const zr_slot& slot) { return slot.shape != ZR_SLOT_LIKE_PARAM || slot.flags != 0; });
}

// Fills in the passes of an optimizer with the extension for partial sums.
void add_passes(const plugin::Instance& optimizer, const zr_partial_sums_api* api, const zr_param& param,
                plan::OptimizerDescription& description) {
  if (!api) return;
  uint32_t n_passes = 0, n_sums[ZR_MAX_PASSES] = {};
  optimizer.call("passes",
                 [&](zr_error* error) { return api->passes(optimizer.self(), &param, &n_passes, n_sums, error); });
  if (n_passes > ZR_MAX_PASSES || std::count(n_sums, n_sums + n_passes, 0u) > 0)
    fail_plugin_bug(fmt::format("{} of '{}'", optimizer.call_text("passes"), param.name),
                    fmt::format("{} passes, but there may be at most {}, each with at least one sum", n_passes,
                                int{ZR_MAX_PASSES}));
  description.sums.assign(n_sums, n_sums + n_passes);
}

plan::OptimizerDescription describe(const plugin::Instance& optimizer, const zr_partial_sums_api* partial_sums,
                                    const plan::Parameter& parameter) {
  const zr_param param{sizeof(zr_param),
                       parameter.frozen ? uint32_t{ZR_PARAM_FROZEN} : 0u,
                       parameter.name.c_str(),
                       parameter.shape.data(),
                       static_cast<int32_t>(parameter.shape.size()),
                       parameter.optimizer_group,
                       parameter.count,
                       0,
                       0};
  zr_optimizer_desc desc{};
  desc.size = sizeof desc;
  CallError error;
  const std::string call = optimizer.call_text("describe");
  const auto describe = [&] {
    return optimizer.api<zr_optimizer_api>()->describe(optimizer.self(), &param, &desc, &error);
  };
  const zr_code code = call_plugin(&error, describe);
  check(code == ZR_UNSUPPORTED ? ZR_INVALID : code, error, call);  // the file chose the optimizer for this parameter
  if (desc.n_slots > 0 && !desc.slots)
    fail_plugin_bug(call, fmt::format("it has {} states, but their list is null", desc.n_slots));
  std::vector<zr_slot> slots(desc.slots, desc.slots + desc.n_slots);
  check_names(slots, call);
  const std::string where = fmt::format("{} of '{}': ", call, parameter.name);
  if (const std::string problem = unknown_value(desc, slots); !problem.empty()) fail_environment(where + problem);
  if (const std::string problem = problem_of(desc, slots, parameter); !problem.empty())
    fail_internal(where + problem + ": this is a bug in the plug-in");
  if (uses_drafts(desc, slots) && !optimizer.component().drafts)
    fail_environment(
        fmt::format("{}it has values of draft headers, but the library has no tag zr_tag_draft_{}_{}; include the "
                    "header from zr/abi/draft that declares them",
                    where, ZR_ABI_MAJOR, ZR_ABI_MINOR));
  const auto is_private = [](const zr_slot& slot) { return (slot.flags & ZR_SLOT_RANK_PRIVATE) != 0; };
  const auto first_private = std::ranges::find_if(slots, is_private);
  if (!std::all_of(first_private, slots.end(), is_private))
    fail_internal(
        fmt::format("{}states with ZR_SLOT_RANK_PRIVATE must follow all others: this is a bug in the plug-in", where));
  std::vector<zr_slot> private_slots(first_private, slots.end());
  slots.erase(first_private, slots.end());
  plan::OptimizerDescription description{desc.granularity,
                                         desc.needs,
                                         std::move(slots),
                                         std::move(private_slots),
                                         {},
                                         desc.cost,
                                         (desc.flags & ZR_OPT_IGNORES_NORM) != 0,
                                         desc.flags & ZR_OPT_STREAMS ? desc.device_types : 0};
  add_passes(optimizer, partial_sums, param, description);
  return description;
}

}  // namespace

OptimizerDescriptions describe_parameters(const Optimizers& optimizers,
                                          const std::vector<plan::Parameter>& parameters) {
  OptimizerDescriptions found;
  for (const plan::Parameter& parameter : parameters) {
    plan::OptimizerDescription description =
        describe(optimizers[parameter.optimizer], optimizers.partial_sums(parameter.optimizer), parameter);
    const auto same = std::find(found.descriptions.begin(), found.descriptions.end(), description);
    found.description_of.push_back(static_cast<uint32_t>(same - found.descriptions.begin()));
    if (same == found.descriptions.end()) found.descriptions.push_back(std::move(description));
  }
  if (found.descriptions.empty()) found.descriptions.emplace_back();
  return found;
}

}  // namespace zr::host::job
