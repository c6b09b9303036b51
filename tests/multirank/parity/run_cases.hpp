// Trains cases in real ranks and compares each with the reference, bit for bit.
#pragma once

#include <string>
#include <vector>

#include "multirank/parity/matrix.hpp"

namespace parity {

/// Returns per test case: "" if every rank is bit-identical to the reference; else the output of the ranks that failed,
/// or the first step that differs, with parameter and element. One launch trains all cases with the same number of
/// ranks, unless a case makes its ranks fail. Cases that differ are trained again and compared after every step. The
/// processes exchange files in `folder`. The environment variable ZR_PARITY_HOSTS is a number of hosts that ranks
/// pretend to be on: mpirun starts them, and the communicator is mpi, for all sizes of collectives with its hierarchy.
std::vector<std::string> run_cases(const std::vector<TestCase>& cases, const std::string& folder);

}  // namespace parity
