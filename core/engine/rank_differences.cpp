#include "engine/rank_differences.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/error.hpp"

namespace zr::host::engine {

std::string list_of(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i)
    text += fmt::format("{}{}", i == 0 ? "" : i + 1 == ranks.size() ? " and " : ", ", ranks[i]);
  return text;
}

// The largest group is assumed to be right; among groups of equal size, the one with the lowest rank.
std::string difference_between(const RanksByDigest& groups, bool of_writes) {
  const auto right = std::max_element(groups.begin(), groups.end(), [](const auto& a, const auto& b) {
    return std::pair(a.second.size(), -a.second[0]) < std::pair(b.second.size(), -b.second[0]);
  });
  std::vector<int> wrong;
  for (const auto& [digest, ranks] : groups)
    if (digest != right->first) wrong.insert(wrong.end(), ranks.begin(), ranks.end());
  std::sort(wrong.begin(), wrong.end());
  return fmt::format("{} {} different values than {}", list_of(wrong),
                     of_writes           ? "wrote"
                     : wrong.size() == 1 ? "has"
                                         : "have",
                     list_of(right->second));
}

void fail_weights_differ(const DifferentElements& elements, const std::string& found) {
  const bool may_be_embedding = elements.parameter.shape.size() == 2;
  fail_user(fmt::format(
      "weights differ between ranks: in '{}', {}, {} ({}); write the same values to a weight on all "
      "ranks (write on every rank, from generators with the same seed), or use engine.set(){}",
      elements.parameter.name,
      elements.count == 1 ? fmt::format("element {}", elements.first)
                          : fmt::format("elements {} to {}", elements.first, elements.first + elements.count - 1),
      elements.difference, found,
      may_be_embedding ? "; an Embedding with max_norm writes in forward, to the rows of each rank's own batch: build "
                         "it without max_norm, and call torch::embedding_renorm_ with the same indices on all ranks"
                       : ""));
}

}  // namespace zr::host::engine
