// Parameters without a model in memory: from a program's answer, or from sizes.
#pragma once

#include <string>
#include <vector>

#include "plan/plan.hpp"

namespace zr::host::plan {

/// One line, {"zeroth_parameters":1,...}: a program reports its parameters to `zeroth plan`.
std::string to_json(const std::vector<Parameter>& parameters);
/// The parameters in the last such line of a program's output. Throws UserError naming `program` if the output has
/// no such line.
std::vector<Parameter> parameters_from_json(const std::string& output, const std::string& program);

/// The size of a GPT: `layers` blocks of 12 width^2 + 13 width parameters; the rest is an embedding.
struct Sizes {
  int64_t parameters = 0, layers = 0, width = 0;
};
/// Derives the sizes that are 0 from the others. Throws UserError if they contradict each other.
Sizes complete(Sizes sizes);
/// The parameters of a GPT of these complete sizes.
std::vector<Parameter> parameters_of(const Sizes& complete_sizes);

}  // namespace zr::host::plan
