// Finds the function declarations of a header and those without a comment. This is not a full C++ parser: it handles
// scopes, access specifiers and ends of declarations, which is enough for the headers of this repository.
#pragma once

#include <string>
#include <vector>

namespace zr::arch {

struct Declaration {
  std::string name, text;         // text: on one line, without comments
  std::size_t first, head, last;  // line numbers from 0; head: the last line before a body
  bool says_itself;               // "int size() const { return size_; }", "int rank() const;"
};

/// The functions that a user of the header can call: at namespace scope or public. Excludes defaulted and deleted
/// functions, destructors, and functions that are documented elsewhere (overrides, definitions out of class).
std::vector<Declaration> functions_of(const std::vector<std::string>& lines);

/// "line: text" of each function without a comment, neither on its own lines nor directly above it. One comment covers
/// several functions only if it precedes a run of at most four without a blank line or another comment between them (a
/// type's comment precedes its first run), or consecutive overloads. `inside`: a header of a subsystem, where a
/// function with a one-line body or a const function without parameters needs no comment.
std::vector<std::string> undocumented(const std::vector<std::string>& lines, bool inside);

/// "line: text" of each function pointer of a C header (a table entry, a callback type, a callback parameter) whose
/// comment, on its lines or directly above, has no thread tag.
std::vector<std::string> untagged(const std::vector<std::string>& lines);

}  // namespace zr::arch
