#include "control/call_mismatch.hpp"

#include <fmt/format.h>

#include "base/operation.hpp"

namespace zr::host::control {

namespace {
// The call at the end of a description; "" if the description names none.
std::string_view call_in(std::string_view what) {
  for (const std::string_view name : {"engine.", "zr::"})
    if (what.starts_with(name)) return what;
  const auto at = what.rfind(kInCall);
  return at == what.npos ? std::string_view() : what.substr(at + kInCall.size());
}
std::string_view name_of_call(std::string_view call) { return call.substr(0, call.find_first_of("( ")); }
}  // namespace

std::string collective_call(std::string_view what) {
  const std::string_view call = call_in(what), name = name_of_call(call);
  if (!call.starts_with("engine.") && !call.starts_with("zr::")) return "";
  return name == "engine.backward" || name == "engine.step" ? "" : std::string(name);
}

std::string mismatch_remedy(std::string_view a, std::string_view b) {
  const std::string first = collective_call(a), second = collective_call(b);
  if (!first.empty() && first == second)
    return first + " is collective: call it on all ranks with the same arguments and in the same order";
  if (!first.empty() && !second.empty())
    return fmt::format("{} and {} are collective: call them on all ranks in the same order", first, second);
  if (!first.empty() || !second.empty())
    return fmt::format("{}{} is collective: call it on all ranks, at the same point in the program", first, second);
  for (const std::string_view what : {a, b})
    if (call_in(what).starts_with("an in-place write to "))
      return "in-place writes to parameters are collective: make the same write on all ranks";
  const auto gathers_weights = [](std::string_view what) {
    return call_in(what).starts_with(kOperatorOn) ||
           (what.starts_with(name_of_op(ZR_ALL_GATHER)) && !call_in(what).empty());
  };
  if (gathers_weights(a) || gathers_weights(b))
    return "operators on sharded parameters are collective: run the same operators in the same order on all ranks, or "
           "keep parameters unsharded (communicator.share_weights = true on one node, a larger persistence_threshold "
           "of the strategy, or a strategy that keeps full parameters on every rank)";
  return "";
}

}  // namespace zr::host::control
