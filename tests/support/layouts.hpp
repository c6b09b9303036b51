// The layouts of weights that tests run on whose claims are not about strategies. Strategies, dtypes and ranks are
// combined by the parity matrix.
#pragma once

#include <string>
#include <vector>

namespace zr::test {

/// Overrides: each rank has a copy of all weights and updates a shard; the ranks of a host share one copy; each rank
/// has a shard only.
inline const std::vector<std::string> kLayouts{"strategy=zero2 communicator.share_weights=false", "strategy=zero1",
                                               "strategy=zero3 communicator.share_weights=false"};

}  // namespace zr::test
