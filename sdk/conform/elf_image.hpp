// What an ELF library says about itself, read without running it.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace zr::conform {

struct ElfSymbol {
  std::string name;
  bool defined;  // exported, not imported
  bool unique;   // STB_GNU_UNIQUE
};

struct ElfImage {
  std::string problem;  // why the file is not a shared library of this machine; "" if it is one
  std::vector<ElfSymbol> symbols;
  std::vector<std::string> needed;    // names of libraries
  std::vector<std::string> versions;  // of symbols of other libraries: "GLIBC_2.17"
  bool text_relocations = false, executable_stack = false;
};

/// Reads the file's program headers, dynamic section, dynamic symbols and their versions.
ElfImage read_elf(const std::filesystem::path& file);

}  // namespace zr::conform
