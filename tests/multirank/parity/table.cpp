// `make matrix`: runs every case of the parity matrix and prints one table.
//   parity_matrix [WORD ...]     only cases whose names contain one of the words, which may have * and [...]; if the
//                                matrix has none, those of the tests, which have more choices for each axis
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "multirank/parity/device.hpp"
#include "multirank/parity/matrix.hpp"
#include "multirank/parity/run_cases.hpp"

namespace {

using parity::TestCase;

std::string words_of(const TestCase& test_case, const std::vector<std::size_t>& of) {
  std::string words;
  for (const std::size_t a : of) words += (words.empty() ? "" : " ") + parity::axes()[a].choices[test_case.at[a]].name;
  return words;
}

// One row per model, dtype, optimizer and reduction; one column per strategy and number of ranks; each entry has one
// character per accumulation.
void print(const std::vector<TestCase>& cases, const std::vector<std::string>& problems) {
  const std::vector<std::size_t> across{parity::axis("strategy"), parity::axis("ranks")},
      down{parity::axis("model"), parity::axis("dtype"), parity::axis("optimizer"), parity::axis("reduce")};
  std::vector<std::string> rows, columns;
  std::map<std::pair<std::string, std::string>, std::string> table;
  const auto note = [](std::vector<std::string>& list, const std::string& name) {
    if (std::find(list.begin(), list.end(), name) == list.end()) list.push_back(name);
  };
  for (std::size_t i = 0; i < cases.size(); ++i) {
    const std::string row = words_of(cases[i], down), column = words_of(cases[i], across);
    note(rows, row);
    note(columns, column);
    table[{row, column}] += problems[i].empty() ? "=" : "X";
  }
  std::size_t width = 0;
  for (const std::string& row : rows) width = std::max(width, row.size());
  // The first line has the strategies, each above its first number of ranks.
  std::string above(width, ' '), below(width, ' '), strategy;
  for (const std::string& column : columns) {
    const auto cut = column.find(' ');
    above.resize(std::max(above.size(), below.size()), ' ');
    if (column.substr(0, cut) != strategy) above += " " + (strategy = column.substr(0, cut));
    below += " " + column.substr(cut + 1);
  }
  std::printf("%s\n%s\n", above.c_str(), below.c_str());
  for (const std::string& row : rows) {
    std::printf("%-*s", static_cast<int>(width), row.c_str());
    for (const std::string& column : columns) std::printf(" %-2s", table[{row, column}].c_str());
    std::printf("\n");
  }
}

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

constexpr std::size_t kGroup = 300;  // cases that one launch of the ranks trains
constexpr std::size_t kShown = 50;   // cases that differ

// Runs the cases in groups with a common number of ranks, and prints each group when it is complete: output that is cut
// off says which cases ran. Returns the problems, by case.
std::vector<std::string> run_in_groups(const std::vector<TestCase>& cases, const std::string& folder) {
  std::map<int, std::vector<std::size_t>> by_ranks;
  for (std::size_t i = 0; i < cases.size(); ++i) by_ranks[cases[i].ranks].push_back(i);
  std::vector<std::string> problems(cases.size());
  std::size_t shown = 0;
  for (const auto& [ranks, indices] : by_ranks)
    for (std::size_t first = 0; first < indices.size(); first += kGroup) {
      const std::size_t end = std::min(first + kGroup, indices.size());
      std::vector<TestCase> group;
      for (std::size_t i = first; i < end; ++i) group.push_back(cases[indices[i]]);
      const auto start = Clock::now();
      const auto found = parity::run_cases(group, folder);
      std::size_t different = 0;
      for (std::size_t i = first; i < end; ++i) {
        const std::string& problem = problems[indices[i]] = found[i - first];
        if (problem.empty()) continue;
        ++different;
        if (++shown <= kShown) std::printf("%s: %s\n", cases[indices[i]].name().c_str(), problem.c_str());
      }
      std::printf("n%d: cases %zu to %zu of %zu: %zu exact, %zu different, %.0f s; %s to %s\n", ranks, first + 1, end,
                  indices.size(), group.size() - different, different, seconds_since(start),
                  group.front().name().c_str(), group.back().name().c_str());
    }
  return problems;
}

}  // namespace

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);  // also in a file or a pipe
  parity::choose_device();
  const auto chosen_from = [&](std::vector<TestCase> all) {
    std::erase_if(all, [&](const TestCase& test_case) {
      return argc > 1 && std::none_of(argv + 1, argv + argc, [&](const char* word) { return test_case.matches(word); });
    });
    return all;
  };
  std::vector<TestCase> cases = chosen_from(parity::full());
  if (cases.empty()) cases = chosen_from(parity::cover());  // choices that only these have, such as cpu_states
  if (cases.empty()) {
    std::fprintf(stderr, "matrix: no test case name contains any of the given words; an example of a name is '%s'\n",
                 parity::full().front().name().c_str());
    return 2;
  }
  const auto start = Clock::now();
  const auto folder = std::filesystem::temp_directory_path() / ("matrix-" + std::to_string(::getpid()));
  const auto problems = run_in_groups(cases, folder.string());
  std::filesystem::remove_all(folder);
  print(cases, problems);
  const auto exact = static_cast<std::size_t>(std::count(problems.begin(), problems.end(), ""));
  std::printf(
      "= bit-identical to plain libtorch; X different; first accumulation 1, then 4\n"
      "%zu cases, %zu exact, %zu different, %.0f s\n",
      cases.size(), exact, cases.size() - exact, seconds_since(start));
  return exact == cases.size() ? 0 : 1;
}
