#include "config/problems.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <tuple>

#include "base/error.hpp"

namespace zr::host::config {

namespace {
constexpr std::size_t kMostShown = 20;
}

bool Problems::full() const { return problems_.size() >= kMostShown; }

void Problems::add(const Origin& origin, const std::string& text) {
  full() ? void(++omitted_) : problems_.push_back({origin, text});
}

void Problems::throw_if_any() {
  if (problems_.empty()) return;
  std::stable_sort(problems_.begin(), problems_.end(), [](const Problem& a, const Problem& b) {
    return std::tuple(a.origin.from, a.origin.line, a.origin.column) <
           std::tuple(b.origin.from, b.origin.line, b.origin.column);
  });
  std::string text;
  for (const Problem& problem : problems_) {
    const bool has_position = problem.origin.from != Origin::From::key_default;
    text +=
        fmt::format("{}{}: {}", text.empty() ? "" : "\n", has_position ? problem.origin.text() : file_, problem.text);
  }
  if (omitted_ > 0) text += fmt::format("\n{}: {} more problems", file_, omitted_);
  fail_user(text);
}

}  // namespace zr::host::config
