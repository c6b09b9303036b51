// The rank-ordered reduction (zr/ordered_reduce.hpp) of gathered copies; also used for a world of one.
#pragma once

#include <vector>

#include "base/thread_pool.hpp"
#include "zr/abi/communicator.h"

namespace zr::host::comm {

/// dst = (dst, or +0) + sources[0] + sources[1] + ... with the reduction, flags and src dtype of `coll`. Every source
/// has dst.count elements; dst may be one of the sources. problem_of() must have accepted the dtypes.
void ordered_reduce(ThreadPool& pool, const zr_coll& coll, const zr_view& dst, const std::vector<const void*>& sources);

}  // namespace zr::host::comm
