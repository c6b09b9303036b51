// The rank-ordered fold (zr/ordered_reduce.hpp) over gathered copies, and for a world of one.
#pragma once

#include <vector>

#include "base/thread_pool.hpp"
#include "zr/abi/communicator.h"

namespace zr::host {

/// dst = (dst, or +0) + sources[0] + sources[1] + ... by coll's reduction, flags and src type. Every source has
/// dst.count elements; dst may be one of them. The types are such as problem_of() accepts.
void ordered_reduce(ThreadPool& pool, const zr_coll& coll, const zr_view& dst, const std::vector<const void*>& sources);

}  // namespace zr::host
