// Collectives made of all-gathers and local folds: for what a communicator plug-in lacks, and for a world of one.
#pragma once

#include <functional>
#include <string>

#include "zr/abi/communicator.h"

namespace zr::host {

/// Runs an all-gather of equal parts to completion: dst.count = world * src.count.
using AllGather = std::function<void(const zr_view& src, const zr_view& dst)>;

/// Performs `coll`. Needs memory for every rank's source while it runs. Returns "" or why it cannot (send and recv among many ranks, dtypes).
std::string compose(const zr_coll& coll, int rank, int world, const AllGather& gather);

}  // namespace zr::host
