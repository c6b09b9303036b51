// Rows that the programs for a GPU print: one line of JSON per figure. tests/gpu/run shows the rows in red whose mark
// is not reached.
#pragma once

#include <cstdio>
#include <string>

namespace zr::testing {

struct Mark {
  double value;
  bool at_most = false;  // else: at least
  bool reached(double ratio) const { return at_most ? ratio <= value : ratio >= value; }
};

/// Lines appear at once, so that those of a program that is ended are not lost. Call it first in main().
inline void print_each_line_at_once() { std::setvbuf(stdout, nullptr, _IOLBF, BUFSIZ); }

/// `fields`: the row's other fields in JSON, with its name.
inline void print_ratio(const std::string& fields, double ratio, const Mark& mark) {
  std::printf("{%s, \"ratio\": %.3f, \"mark\": %g, \"is\": \"%s\", \"reached\": %s}\n", fields.c_str(), ratio,
              mark.value, mark.at_most ? "at most" : "at least", mark.reached(ratio) ? "true" : "false");
}

}  // namespace zr::testing
