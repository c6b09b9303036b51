// What the rules of optimizers have in common.
#pragma once

#include <array>

#include "conform/optimizer_run.hpp"
#include "conform/rule.hpp"

namespace zr::conform {

inline constexpr std::array<zr_dtype, 3> kWeightDtypes{ZR_F32, ZR_BF16, ZR_F16};
inline constexpr std::array<zr_dtype, 2> k16BitDtypes{ZR_BF16, ZR_F16};  // their weights are rounded masters

/// Rules use those that the optimizer supports: parameters of one to four dimensions, with few and with many blocks,
/// and no square matrix, which would hide an exchange of its dimensions.
inline const std::vector<Shape> kShapes{{5000}, {24, 40}, {300, 40}, {20, 16, 25}, {8, 6, 3, 3}};

/// The bits of a parameter after three updates in a new instance.
std::string optimizer_result(Case& test, const ParameterArrays::Layout& layout, const UpdateOptions& options = {});
/// The shapes of `shapes` that the optimizer supports. Skips the rule if there are none.
std::vector<Shape> supported_shapes(Case& test, const std::vector<Shape>& shapes);
/// Another value of a key that groups may override; nothing if there is no such key.
std::optional<std::pair<std::string, KeyValue>> other_group_value(const zr_component& component,
                                                                  const KeyValues& values);

}  // namespace zr::conform
