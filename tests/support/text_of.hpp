// The contents of a file, for tests that compare or change texts.
#pragma once

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

namespace zr::testing {

inline std::string text_of(const std::filesystem::path& file) {
  std::ifstream in(file);
  return {std::istreambuf_iterator<char>(in), {}};
}

}  // namespace zr::testing
