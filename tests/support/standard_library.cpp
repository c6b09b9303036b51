// Linked first into every program of tests: see zr_test_standard_library in tests/CMakeLists.txt.
#include <regex>
#include <string>

template class std::basic_string<char>;

namespace zr::test {

// Never called. The search in a string, with and without its results, is what std::regex instantiates.
std::string uses_regular_expressions(const std::string& text, const std::regex& expression) {
  std::smatch match;
  std::string found;
  if (std::regex_match(text, expression) || std::regex_match(text, match, expression)) found += match.str();
  if (std::regex_search(text, expression) || std::regex_search(text, match, expression)) found += match[0].str();
  for (std::sregex_iterator at(text.begin(), text.end(), expression); at != std::sregex_iterator(); ++at)
    found += at->str();
  return std::regex_replace(text + found, expression, found);
}

}  // namespace zr::test
