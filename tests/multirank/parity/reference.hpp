// The reference: one process, plain libtorch, a scalar optimizer. Written from docs/numerics.md alone; shares no code with
// the host.
#pragma once

#include "multirank/parity/outcome.hpp"
#include "multirank/parity/recipe.hpp"

namespace parity {

Outcome reference(const Recipe& recipe);

}  // namespace parity
