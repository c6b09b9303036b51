// The commands that README files and docs/ show, and how readme_test.cpp tries each of them.
#pragma once

#include <map>
#include <string>
#include <vector>

namespace zr::documented {

struct Try {
  std::string command;    // the command to run, in a scratch folder; {root}, {bin} and keys of kPrepared are replaced
  std::string says = "";  // a regular expression that its output must match
};
/// Folders that several commands use, and the commands that make them, each run once in an empty folder.
extern const std::map<std::string, std::string> kPrepared;
extern const std::map<std::string, Try> kTries;
/// Commands that no test can run, and why.
extern const std::map<std::string, std::string> kNotTried;

/// The commands of a Markdown file: lines of indented blocks and of shell blocks without their explanations, and text
/// in backticks. `every_line`: each line of an indented block is a command, as in docs/, and text in
/// backticks is a command only if it has arguments.
std::vector<std::string> commands_of(const std::string& text, bool every_line);

}  // namespace zr::documented
