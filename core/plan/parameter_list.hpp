// Parameters from elsewhere than a model in memory: a program's answer, or sizes alone.
#pragma once

#include <string>
#include <vector>

#include "plan/plan.hpp"

namespace zr::host {

/// One line: {"zeroth_parameters":1,...}, how a program tells `zeroth plan` what it would train.
std::string to_json(const std::vector<Parameter>& parameters);
/// The parameters in the last such line of a program's output. Throws Failure(user) naming `who` if there is none.
std::vector<Parameter> parameters_from_json(const std::string& output, const std::string& who);

/// A GPT of that many parameters, blocks and width: blocks of 12 width^2 + 13 width, the rest an embedding.
struct Sizes {
  int64_t parameters = 0, layers = 0, width = 0;
};
/// What is 0 follows from the others. Throws Failure(user) if they contradict one another.
Sizes complete(Sizes sizes);
/// Of sizes that are complete.
std::vector<Parameter> parameters_of(const Sizes& complete_sizes);

}  // namespace zr::host
