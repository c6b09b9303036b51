// The layouts of weights that tests run on whose claims are not about strategies. Strategies, dtypes and ranks are
// combined by the parity matrix.
#pragma once

#include <string>
#include <vector>

namespace zr::test {

/// Overrides: every rank has all weights; the ranks of a host share one copy; each rank has a shard.
inline const std::vector<std::string> kLayouts{"strategy=zero0", "strategy=zero1",
                                               "strategy=zero3 communicator.share_weights=false"};

}  // namespace zr::test
