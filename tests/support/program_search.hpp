// Searches for a random program whose two executions differ, and removes the statements that the difference does not
// need. A language gives a generator of statements, and a check that runs a program both ways.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <functional>
#include <optional>
#include <random>
#include <string>
#include <vector>

namespace zr::test {

/// Random numbers that depend on the seed alone, on every machine: the distributions of <random> may differ between
/// standard libraries.
class SearchRandom {
 public:
  explicit SearchRandom(uint64_t seed) : bits_(seed) {}
  /// In [0, n); 0 if n is 0.
  std::size_t below(std::size_t n) { return n ? static_cast<std::size_t>(bits_() % n) : 0; }
  bool chance(std::size_t percent) { return below(100) < percent; }
  template <class T>
  const T& pick(const std::vector<T>& values) {
    return values[below(values.size())];
  }

 private:
  std::mt19937_64 bits_;
};

/// The language of a search. A statement refers to earlier values by a number that is reduced modulo the values there
/// are, so that a program stays valid when statements are removed from it.
template <class Statement>
struct ProgramLanguage {
  std::string name;
  std::function<std::vector<Statement>(SearchRandom& random)> generate;
  /// What is wrong with the program; nullopt if both executions agree.
  std::function<std::optional<std::string>(const std::vector<Statement>& program)> fault;
  std::function<std::string(const Statement& statement)> print;
};

struct SearchResult {
  std::size_t programs = 0;            // that ran
  std::optional<std::string> failure;  // seed, difference and shortest program found
};

/// The number of programs of a search: ZR_SEARCH_PROGRAMS, or `standard`.
inline std::size_t search_programs(std::size_t standard) {
  const char* set = std::getenv("ZR_SEARCH_PROGRAMS");
  return set ? std::strtoull(set, nullptr, 10) : standard;
}
/// The seed of the first program: ZR_SEARCH_SEED, or 1. Program i has the seed of the first plus i.
inline uint64_t search_seed() {
  const char* set = std::getenv("ZR_SEARCH_SEED");
  return set ? std::strtoull(set, nullptr, 10) : 1;
}

/// Removes ever smaller runs of statements, as long as the program keeps a fault.
template <class Statement>
std::vector<Statement> shrink(const ProgramLanguage<Statement>& language, std::vector<Statement> program) {
  for (std::size_t length = program.size() / 2; length > 0;) {
    bool removed = false;
    for (std::size_t first = 0; first + length <= program.size();) {
      std::vector<Statement> shorter = program;
      const auto begin = shorter.begin() + static_cast<std::ptrdiff_t>(first);
      shorter.erase(begin, begin + static_cast<std::ptrdiff_t>(length));
      if (language.fault(shorter)) {
        program = std::move(shorter);
        removed = true;
      } else {
        ++first;
      }
    }
    if (!removed || length > program.size()) length /= 2;
  }
  return program;
}

/// Runs `programs` random programs and stops at the first with a fault, which it shrinks.
template <class Statement>
SearchResult search(const ProgramLanguage<Statement>& language, std::size_t programs, uint64_t first_seed) {
  SearchResult result;
  for (; result.programs < programs; ++result.programs) {
    const uint64_t seed = first_seed + result.programs;
    SearchRandom random(seed);
    const std::vector<Statement> program = language.generate(random);
    if (!language.fault(program)) continue;
    const std::vector<Statement> shortest = shrink(language, program);
    std::string text = language.name + ", seed " + std::to_string(seed) + ": " + language.fault(shortest).value();
    for (const Statement& statement : shortest) text += "\n  " + language.print(statement);
    result.failure = text;
    ++result.programs;
    return result;
  }
  return result;
}

}  // namespace zr::test
