// The remedy when ranks issued different collectives, derived from the descriptions that describe() in comm/coll.hpp
// writes.
#pragma once

#include <string>
#include <string_view>

namespace zr::host::control {

/// Separates a collective from the call that issued it: "broadcast 'w' (fp32, 64) in engine.get(\"w\")".
inline constexpr std::string_view kInCall = " in ";
/// What to do when two ranks issued the collectives with these descriptions: the message names the call that is
/// collective, or the keys that keep parameters unsharded. "" if there is no specific remedy.
std::string mismatch_remedy(std::string_view a, std::string_view b);
/// The call that a description names, for example "engine.get"; "" if it names none, or names backward() or step() of
/// the training loop.
std::string collective_call(std::string_view what);
/// How descriptions name an operator on a sharded parameter: "an operator on 'w'".
inline constexpr std::string_view kOperatorOn = "an operator on ";

}  // namespace zr::host::control
