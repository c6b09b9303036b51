// The reference: one process, plain libtorch, a scalar optimizer. It shares no code with the host.
#pragma once

#include "multirank/parity/outcome.hpp"
#include "multirank/parity/recipe.hpp"

namespace parity {

/// Trains `recipe` with plain libtorch.
Outcome reference(const Recipe& recipe);

}  // namespace parity
