// One row of a benchmark: our value and a reference measured at the same time. Absolute values depend on the machine;
// the ratio is compared with a target.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

namespace zr::bench {

struct Row {
  std::string name;  // "adamw_step_fp32_1t"
  double value;      // ours, median
  std::string unit;
  std::string reference;  // the name of the reference
  double reference_value;
  double ratio;   // above 1: ours is better
  double target;  // the required ratio; 0: none
};

inline double median(std::vector<double> values) {
  if (values.empty()) throw std::invalid_argument("median of an empty list");
  std::sort(values.begin(), values.end());
  const std::size_t half = values.size() / 2;
  return values.size() % 2 ? values[half] : (values[half - 1] + values[half]) / 2;
}

/// A row from rounds in which both were measured one after the other. The ratio is the median of the rounds' ratios, so
/// that a change of the machine's speed between rounds cancels. `less_is_better`: for times; else for rates.
inline Row compare(const std::string& name, const std::string& unit, const std::vector<double>& ours,
                   const std::string& reference, const std::vector<double>& theirs, double target,
                   bool less_is_better = true) {
  std::vector<double> ratios;
  for (std::size_t i = 0; i < ours.size() && i < theirs.size(); ++i) {
    ratios.push_back(less_is_better ? theirs[i] / ours[i] : ours[i] / theirs[i]);
  }
  return {name, median(ours), unit, reference, median(theirs), median(ratios), target};
}

/// One aligned line on standard output; red on a terminal if the ratio is below the target, unless NO_COLOR is set.
inline void print(const Row& row) {
  const char *no_colour = std::getenv("NO_COLOR"), *terminal = std::getenv("TERM");
  const bool colours =
      isatty(STDOUT_FILENO) && !(no_colour && *no_colour) && std::string(terminal ? terminal : "") != "dumb";
  const bool red = row.ratio < row.target && colours;
  std::printf("%s%-26s %10.4g %-9s %-26s %10.4g   ratio %7.4f", red ? "\x1b[31m" : "", row.name.c_str(), row.value,
              row.unit.c_str(), row.reference.c_str(), row.reference_value, row.ratio);
  if (row.target > 0) std::printf("   target %6.4g%s", row.target, row.ratio < row.target ? "   MISSED" : "");
  std::printf("%s\n", red ? "\x1b[0m" : "");
  std::fflush(stdout);
}

/// Appends rows to the JSON array in `file`, which is created if it does not exist.
inline void append(const std::string& file, const std::vector<Row>& rows) {
  nlohmann::json all = nlohmann::json::array();
  if (std::ifstream in(file); in) all = nlohmann::json::parse(in);
  for (const Row& row : rows) {
    all.push_back({{"name", row.name},
                   {"value", row.value},
                   {"unit", row.unit},
                   {"reference", row.reference},
                   {"reference_value", row.reference_value},
                   {"ratio", row.ratio},
                   {"target", row.target}});
  }
  std::ofstream out(file);
  out << all.dump(1) << "\n";
  if (!out.flush()) throw std::runtime_error(file + ": cannot write the rows");
}

}  // namespace zr::bench
