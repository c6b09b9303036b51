// The names of collectives and messages between ranks.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "zr/abi/communicator.h"

namespace zr::host {

/// By ZR_ALL_REDUCE and so on; [0] is no operation.
inline constexpr std::array<std::string_view, 12> kOperationNames{
    "nothing", "all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce",
    "gather",  "scatter",    "all_to_all",     "send",       "recv",      "barrier"};
static_assert(kOperationNames.size() == ZR_BARRIER + 1);

/// "all_reduce"; "unknown operation" for a number that no operation has.
constexpr std::string_view name_of_op(uint32_t op) {
  return op < kOperationNames.size() ? kOperationNames[op] : "unknown operation";
}

}  // namespace zr::host
