// Trains cases in real ranks and compares each with the reference, bit for bit.
#pragma once

#include <string>
#include <vector>

#include "multirank/parity/matrix.hpp"

namespace parity {

/// By test case: "" where every rank gave the reference's bits; else what ended the ranks, or the first step that
/// differs, with parameter and element. One launch for all cases of a number of ranks, unless one ends its ranks; cases
/// that differ are trained once more, step by step. `folder` is for what travels between processes.
std::vector<std::string> run_cases(const std::vector<TestCase>& cases, const std::string& folder);

}  // namespace parity
