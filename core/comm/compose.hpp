// Composes the collectives that a communicator plug-in lacks, from all_gathers, all_to_alls and local reductions.
#pragma once

#include <functional>
#include <string>

#include "base/thread_pool.hpp"
#include "zr/abi/communicator.h"

namespace zr::host::comm {

/// The operations and buffers from which a collective is composed.
struct Primitives {
  int rank, world;
  bool all_to_all;  // the plug-in supports all_to_all
  char* staging;    // memory that the plug-in can use for src and dst during this call
  int64_t staging_bytes;
  ThreadPool& pool;
  /// Runs an all_gather of any dtype, or an all_to_all if supported, to completion. Throws to end the composition.
  std::function<void(const zr_coll&)> run;
};

/// Performs `coll`, which problem_of() has accepted, in pieces that fit the staging buffer, identically on every rank.
/// Returns "", or why `coll` cannot be composed: sends and receives cannot be composed of collectives.
std::string compose(const zr_coll& coll, const Primitives& primitives);

}  // namespace zr::host::comm
