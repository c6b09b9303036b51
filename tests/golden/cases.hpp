// Golden cases in a text file: "== title", then parts "-- name" with their lines.
#pragma once

#include <fstream>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

namespace zr::golden {

struct Case {
  std::string title;
  std::map<std::string, std::string> parts;  // without the last newline
  const std::string& operator[](const std::string& name) const {
    static const std::string none;
    const auto at = parts.find(name);
    return at == parts.end() ? none : at->second;
  }
};

inline std::vector<Case> read_cases(const std::string& file) {
  std::ifstream in(file);
  if (!in) throw std::runtime_error(file + " cannot be read");
  std::vector<Case> cases;
  std::string* part = nullptr;
  for (std::string line; std::getline(in, line);) {
    if (line.rfind("== ", 0) == 0) {
      cases.push_back({line.substr(3), {}});
      part = nullptr;
    } else if (line.rfind("-- ", 0) == 0 && !cases.empty()) {
      part = &cases.back().parts[line.substr(3)];
    } else if (part) {
      *part += (part->empty() ? "" : "\n") + line;
    }
  }
  for (Case& one : cases)
    for (auto& [name, text] : one.parts)
      while (!text.empty() && text.back() == '\n') text.pop_back();
  return cases;
}

inline std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  for (std::size_t at = 0; at < text.size();) {
    const auto end = std::min(text.find('\n', at), text.size());
    if (end > at) lines.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  return lines;
}

}  // namespace zr::golden
