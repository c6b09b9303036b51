// The cases of the parity matrix: the axes in which training runs may differ, every combination of their choices, and a
// small set of combinations that covers every pair of choices.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "multirank/parity/recipe.hpp"

namespace parity {

/// One value of an axis: its overrides for the job, and its effect on the recipe of the reference. Add one for each new
/// strategy, model or dtype.
struct Choice {
  std::string name, overrides;
  std::function<void(Recipe&)> apply = [](Recipe&) {};
  bool in_full = true;  // false: only in cover()
};
struct Axis {
  std::string name;
  std::vector<Choice> choices;
};
/// All axes, in the order of the parts of a test case's name. Names of choices are unique over all axes.
const std::vector<Axis>& axes();
/// The index of an axis, by name; throws if there is no such axis.
std::size_t axis(const std::string& name);

struct TestCase {
  std::vector<std::size_t> at;  // index of the choice, per axis
  std::string overrides;        // of the job
  Recipe recipe;
  int ranks;
  std::string extra;  // appended to the name: names the overrides that are not choices
  std::string name() const;
  /// Whether the name contains `word`, in which * and [...] match as in names of files.
  bool matches(const std::string& word) const;
};

/// The test case with these choices, and the first choice of every axis that is not named.
TestCase test_case(const std::vector<std::string>& choices);
/// `test_case` with more overrides and their effect on the reference; `extra` is appended to its name.
TestCase with(
    TestCase test_case, const std::string& extra, const std::string& overrides,
    const std::function<void(Recipe&)>& apply = [](Recipe&) {});
/// Every valid combination of choices.
std::vector<TestCase> full();
/// A small set of cases that covers every valid pair of choices of any two axes.
std::vector<TestCase> cover();

}  // namespace parity
