// Golden files: "== title", then parts "-- name" with their lines. ZR_UPDATE_GOLDEN=1 rewrites what differs.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace zr::golden {

/// True if the tests must write the golden files instead of comparing with them.
inline bool updates() { return std::getenv("ZR_UPDATE_GOLDEN") != nullptr; }

struct Case {
  std::string title;
  std::vector<std::pair<std::string, std::string>> parts;  // in the file's order, without the last newline

  const std::string& operator[](const std::string& name) const {
    static const std::string none;
    for (const auto& part : parts)
      if (part.first == name) return part.second;
    return none;
  }
  /// An empty text removes the part; a new part is added at the end.
  void set(const std::string& name, const std::string& text) {
    const auto at = std::find_if(parts.begin(), parts.end(), [&](const auto& part) { return part.first == name; });
    if (at == parts.end()) {
      if (!text.empty()) parts.emplace_back(name, text);
    } else if (text.empty()) {
      parts.erase(at);
    } else {
      at->second = text;
    }
  }
};

struct File {
  std::string preamble;  // the lines before the first case
  std::vector<Case> cases;
};

inline void trim_newlines(std::string& text) {
  while (!text.empty() && text.back() == '\n') text.pop_back();
}

inline File read_file(const std::string& path) {
  std::ifstream in(path);
  EXPECT_TRUE(in) << path << " cannot be read";
  File file;
  std::string* text = &file.preamble;
  for (std::string line; std::getline(in, line);) {
    if (line.rfind("== ", 0) == 0) {
      file.cases.push_back({line.substr(3), {}});
      text = nullptr;
    } else if (line.rfind("-- ", 0) == 0 && !file.cases.empty()) {
      text = &file.cases.back().parts.emplace_back(line.substr(3), "").second;
    } else if (text) {
      *text += (text->empty() ? "" : "\n") + line;
    }
  }
  trim_newlines(file.preamble);
  for (Case& one : file.cases)
    for (auto& part : one.parts) trim_newlines(part.second);
  return file;
}

inline void write_file(const std::string& path, const File& file) {
  std::string text = file.preamble + "\n";
  for (const Case& one : file.cases) {
    text += "\n== " + one.title + "\n";
    for (const auto& [name, lines] : one.parts) text += "-- " + name + "\n" + lines + "\n";
  }
  std::ofstream out(path, std::ios::trunc);
  out << text;
  EXPECT_TRUE(out.flush()) << path << " cannot be written";
}

/// A part with the program's current text; "" if the case has no such part.
struct ProducedPart {
  std::string name, text;
  std::function<std::string(const std::string&)> normal{};  // applied before the comparison, not before writing
};

inline bool expects_text(const Case& one, const std::vector<ProducedPart>& parts) {
  return std::any_of(parts.begin(), parts.end(), [&](const ProducedPart& part) { return !one[part.name].empty(); });
}

/// Compares every case of `path` with the parts that `produce` returns for it, or updates the file. A case that expects
/// no text in any of these parts fails, also in an update: it would pass whatever the program does wrong. `produce`
/// returns no parts for a case that it skips.
inline void check(const std::string& path, std::size_t least_cases,
                  const std::function<std::vector<ProducedPart>(const Case&)>& produce) {
  File file = read_file(path);
  ASSERT_GE(file.cases.size(), least_cases) << path;
  for (Case& one : file.cases) {
    const std::vector<ProducedPart> parts = produce(one);
    for (const ProducedPart& part : parts) {
      const auto normal = [&](const std::string& text) { return part.normal ? part.normal(text) : text; };
      if (normal(part.text) == normal(one[part.name])) continue;
      if (updates())
        one.set(part.name, part.text);
      else
        EXPECT_EQ(normal(part.text), normal(one[part.name]))
            << path << ", case: " << one.title << ", part: " << part.name
            << "; if the new text is right, run the test with ZR_UPDATE_GOLDEN=1";
    }
    EXPECT_TRUE(parts.empty() || expects_text(one, parts))
        << path << ", case: " << one.title << ": the case expects no text; let its command print a line";
  }
  if (updates()) write_file(path, file);
}

/// Compares or updates a golden file that is a single text.
inline void check_text(const std::string& path, const std::string& text) {
  if (updates()) {
    std::ofstream(path, std::ios::trunc) << text;
    return;
  }
  std::ifstream in(path);
  EXPECT_EQ(text, std::string(std::istreambuf_iterator<char>(in), {}))
      << path << "; if the new text is right, run the test with ZR_UPDATE_GOLDEN=1";
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
