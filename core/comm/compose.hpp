// Collectives made of all-gathers and local folds: for what a communicator plug-in lacks.
#pragma once

#include <functional>
#include <string>

#include "base/thread_pool.hpp"
#include "zr/abi/communicator.h"

namespace zr::host {

/// What compositions are made of.
struct Primitives {
  int rank, world;
  bool all_to_all;  // is offered too
  char* staging;    // memory the plug-in can use for src and dst, for this call
  int64_t staging_bytes;
  ThreadPool& pool;
  /// Runs an all_gather of any type, or an all_to_all if offered, to completion; throws to end the composition.
  std::function<void(const zr_coll&)> run;
};

/// Performs `coll`, which problem_of() accepts, in runs that fit the staging; every rank alike. Returns "" or why it
/// cannot: messages between two ranks are not made of operations of all.
std::string compose(const zr_coll& coll, const Primitives& with);

}  // namespace zr::host
