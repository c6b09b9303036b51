// Sizes and names of element types, and names of collectives and messages: one table of each, for plug-ins and for the
// engine.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "zr/abi/base.h"
#include "zr/abi/communicator.h"

#pragma GCC visibility push(hidden)

namespace zr {
inline namespace sdk {

/// An element type of the ABI.
struct ElementType {
  std::string_view name;  ///< "fp32"
  int64_t size;           ///< bytes of one element
};
/// By ZR_NONE, ZR_F32 and so on.
inline constexpr ElementType kElementTypes[] = {{"none", 0}, {"fp32", 4},  {"bf16", 2},  {"fp16", 2}, {"fp64", 8},
                                                {"int8", 1}, {"uint8", 1}, {"int32", 4}, {"int64", 8}};
static_assert(ZR_NONE == 0 && ZR_F32 == 1 && ZR_BF16 == 2 && ZR_F16 == 3 && ZR_F64 == 4 && ZR_I8 == 5 && ZR_U8 == 6 &&
              ZR_I32 == 7 && ZR_I64 == 8);

/// The entry of a dtype in kElementTypes; that of ZR_NONE for an unknown dtype.
constexpr const ElementType& element_type(zr_dtype dtype) {
  return kElementTypes[dtype >= ZR_F32 && dtype <= ZR_I64 ? dtype : ZR_NONE];
}
/// Bytes of one element; 0 for ZR_NONE and unknown dtypes.
constexpr int64_t size_of(zr_dtype dtype) { return element_type(dtype).size; }
/// "fp32", "bf16", "fp16", "fp64", "int8", "uint8", "int32", "int64"; "none" for ZR_NONE and unknown dtypes.
constexpr std::string_view name_of(zr_dtype dtype) { return element_type(dtype).name; }

/// By ZR_ALL_REDUCE and so on; [0] is not an operation.
inline constexpr std::array<std::string_view, 12> kOperationNames{
    "nothing", "all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce",
    "gather",  "scatter",    "all_to_all",     "send",       "recv",      "barrier"};
static_assert(kOperationNames.size() == ZR_BARRIER + 1);

/// "all_reduce"; "unknown operation" for a number that no operation has.
constexpr std::string_view name_of_op(uint32_t op) {
  return op < kOperationNames.size() ? kOperationNames[op] : "unknown operation";
}

}  // namespace sdk
}  // namespace zr

#pragma GCC visibility pop
