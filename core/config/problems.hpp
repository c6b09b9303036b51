// Collects the problems of a file, so that they are reported together. Internal to core/config.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "config/setting.hpp"

namespace zr::host::config {

class Problems {
 public:
  /// `file`: the name of the file in messages.
  explicit Problems(std::string file) : file_(std::move(file)) {}
  /// Adds a problem. After the first 20, problems are only counted, so that a file full of mistakes is reported
  /// quickly.
  void add(const Origin& origin, const std::string& text);
  bool empty() const { return problems_.empty(); }
  /// True if add() would only count, so that the text is not needed.
  bool full() const;
  /// Throws UserError with all problems in the order of the file, one per line; returns if there are none.
  void throw_if_any();

 private:
  struct Problem {
    Origin origin;
    std::string text;
  };
  const std::string file_;
  std::vector<Problem> problems_;
  std::size_t omitted_ = 0;
};

}  // namespace zr::host::config
