// The words that no text of the project uses: tests/arch/words.txt.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace zr::arch {

/// Lines of the sources, tests, documentation and build files below `root` that contain a word of `list`, as
/// "file:line: text". `list`: a word per line, which also matches with an added "s"; "#" begins a comment; a word after
/// "=" is matched with its case. Files named words.txt, CHANGELOG.md or manifest.json are not read.
std::vector<std::string> private_words(const std::filesystem::path& root, const std::filesystem::path& list);

}  // namespace zr::arch
