// Rank bodies that every program of multi-rank tests has: they train, and the test reads the run folders.
#pragma once

#include "support/engine_run.hpp"
#include "support/multirank.hpp"

namespace engine_tests {

/// Trains to the end.
extern const zr::test::RankBodyOf<Run> trains;
/// Trains once per line of overrides in the file that the environment variable TRAINS_LIST names, with one engine after
/// another.
extern const zr::test::RankBodyOf<Run> trains_list;

}  // namespace engine_tests
