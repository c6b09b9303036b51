// The cases of DESIGN.md 6: what may differ between two trainings, every combination of it, and a small part of these
// in which every pair of choices meets.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "multirank/parity/recipe.hpp"

namespace parity {

/// One value of an axis: how a job says it, and the reference. A new strategy, model or dtype is one more of these.
struct Choice {
  std::string name, overrides;
  std::function<void(Recipe&)> apply = [](Recipe&) {};
  bool in_full = true;  // false: in the cover only
};
struct Axis {
  std::string name;
  std::vector<Choice> choices;
};
/// In the order of a test case's name. Names of choices are unique over all axes.
const std::vector<Axis>& axes();
/// An axis by name.
std::size_t axis(const std::string& name);

struct TestCase {
  std::vector<std::size_t> at;  // by axis: the choice
  std::string overrides;        // of the job
  Recipe recipe;
  int ranks;
  std::string extra;  // what else of it differs from the choices, for its name
  std::string name() const;
};

/// The test case of these choices; of an axis that none is named of, the first.
TestCase test_case(const std::vector<std::string>& choices);
/// The same with more overrides, and what they mean for the reference; `extra` goes into its name.
TestCase with(
    TestCase test_case, const std::string& extra, const std::string& overrides,
    const std::function<void(Recipe&)>& apply = [](Recipe&) {});
/// Every test case that makes sense.
std::vector<TestCase> full();
/// Few cases that hold every pair of choices of any two axes that makes sense.
std::vector<TestCase> cover();

}  // namespace parity
