// The function declarations of a header, and which of them no comment explains. No C++ parser: it knows scopes, access
// and where a declaration ends, which is what the headers of this tree need.
#pragma once

#include <string>
#include <vector>

namespace zr::arch {

struct Declaration {
  std::string name, text;         // text: on one line, without comments
  std::size_t first, head, last;  // lines, from 0; head: the last one before a body
  bool says_itself;               // "int size() const { return size_; }", "int rank() const;"
};

/// The functions a reader of the header may call: at namespace scope or public. Not those that are defaulted, deleted
/// or documented elsewhere (overrides, definitions out of class), nor destructors.
std::vector<Declaration> functions_of(const std::vector<std::string>& lines);

/// "line: text" of each function that has no comment: none on its own lines, none that ends directly above it. One
/// comment may stand for several functions only where it heads a run of at most four, without a blank line or another
/// comment among them (a type's comment heads its first run), or for overloads that follow one another. `inside`: a
/// header of a room, where a one-line body, or a const function without parameters, is enough.
std::vector<std::string> undocumented(const std::vector<std::string>& lines, bool inside);

/// "line: text" of each function pointer of a C header (a slot, a callback's type, a callback parameter) whose own
/// comment, on its lines or directly above, has no thread tag.
std::vector<std::string> untagged(const std::vector<std::string>& lines);

}  // namespace zr::arch
