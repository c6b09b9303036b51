#include "config/problems.hpp"

#include <algorithm>
#include <tuple>

#include "base/error.hpp"

namespace zr::host::config {

namespace {
constexpr std::size_t kMax = 20;
}

bool Problems::full() const { return problems_.size() >= kMax; }

void Problems::add(const Origin& origin, const std::string& text) {
  full() ? void(++more_) : problems_.push_back({origin, text});
}

void Problems::throw_if_any() {
  if (problems_.empty()) return;
  std::stable_sort(problems_.begin(), problems_.end(), [](const Problem& a, const Problem& b) {
    return std::tuple(a.origin.from, a.origin.line, a.origin.column) <
           std::tuple(b.origin.from, b.origin.line, b.origin.column);
  });
  std::string all;
  for (const Problem& one : problems_) {
    const bool placed = one.origin.from != Origin::From::key_default;
    all += (all.empty() ? "" : "\n") + (placed ? one.origin.text() : file_) + ": " + one.text;
  }
  if (more_ > 0) all += "\n" + file_ + ": " + std::to_string(more_) + " more problems";
  fail_user(all);
}

}  // namespace zr::host::config
