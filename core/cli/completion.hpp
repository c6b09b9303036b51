// Shell completion: the words that can follow on a command line. completion.bash calls `zeroth completion words`.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "cli/command.hpp"

namespace zr::host::cli {

/// The words that the last of `words` can become; `words` follow the program's name on the command line, without
/// quotes. A word that ends with "=" or "." is not complete. ":files PATTERN" means the names of files that match, and
/// of all folders; ":folders" for the names of all folders; if the last word is "--option=...", they begin after its
/// "=". Reads the keys of the engine and of all plug-ins, and keys of a program that the TOML file on the command line
/// sets; does not start that program. Does not throw because of a damaged TOML file.
std::vector<std::string> completions(std::span<const Command> commands, const Arguments& words);

/// The script that bash sources (completion.bash).
std::string_view bash_completion();

}  // namespace zr::host::cli
