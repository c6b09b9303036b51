// Descriptions of collectives, as describe() of comm/coll.hpp writes them, when the ranks issued different ones.
#pragma once

#include <string>
#include <string_view>

namespace zr::host {

/// Between a collective and the call that issued it: "broadcast 'w' (fp32, 64) in engine.get(\"w\")".
inline constexpr std::string_view kInCall = " in ";
/// What to do when ranks issued these two different collectives, as describe() names them: which call is collective, or
/// which keys keep parameters unsharded.
std::string mismatch_remedy(std::string_view a, std::string_view b);
/// "engine.get" if that is what the description of a collective names as its call, and the call is one that a program
/// makes outside the training loop's backward() and step(); else "".
std::string collective_call(std::string_view what);
/// The call of operators on sharded parameters, in descriptions: "an operator on 'w'".
inline constexpr std::string_view kOperatorOn = "an operator on ";

}  // namespace zr::host
