// The rank-ordered fold in plain loops: what a communicator plug-in does in place, done here on gathered copies.
#pragma once

#include <vector>

#include "zr/abi/communicator.h"

namespace zr::host {

/// dst = (dst if accumulate, else the neutral element) + sources[0] + sources[1] + ..., element by element (or min, max). Narrow floats add in
/// fp32 and are rounded once. All sources have dst.count elements of `src_dtype`; dst may be one of them. False: the dtypes are not offered.
bool fold(const zr_view& dst, const std::vector<const void*>& sources, zr_dtype src_dtype, uint32_t reduce, bool accumulate);

}  // namespace zr::host
