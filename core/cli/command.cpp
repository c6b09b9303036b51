#include "cli/command.hpp"

#include <algorithm>
#include <iostream>

#include "base/error.hpp"

namespace zr::host::cli {

namespace po = boost::program_options;

namespace {

po::options_description options_of(const Command& command) {
  return command.options ? command.options() : po::options_description();
}

Parsed parse(const Command& command, const Arguments& arguments) {
  auto end = arguments.end();
  if (command.takes_program) end = std::find(arguments.begin(), arguments.end(), "--");
  po::options_description all;
  all.add(options_of(command)).add_options()("help,h", "show this help")("words", po::value<Arguments>());
  po::positional_options_description words;
  words.add("words", -1);
  Parsed parsed;
  try {
    po::store(po::command_line_parser(Arguments(arguments.begin(), end)).options(all).positional(words).run(),
              parsed.values);
  } catch (const po::error& error) {
    fail_usage(command, error.what());
  }
  parsed.words = parsed.value<Arguments>("words");
  if (end != arguments.end()) parsed.program.assign(end + 1, arguments.end());
  return parsed;
}

}  // namespace

int run(const Command& command, const Arguments& arguments) {
  const Parsed parsed = parse(command, arguments);
  if (!parsed.has("help")) return command.run(command, parsed);
  std::cout << "usage: zeroth " << command.usage << "\n\n"
            << command.meaning << "\n\nexample:\n  " << command.example << "\n";
  if (command.options) std::cout << "\n" << command.options();
  return 0;
}

void fail_usage(const Command& command, const std::string& problem) {
  fail_user(std::string("zeroth ") + command.name + ": " + problem + "; usage: zeroth " + command.usage);
}

std::string help_text(std::span<const Command> commands) {
  std::string text, group;
  for (const Command& one : commands) {
    if (group != one.group) text += std::string(group.empty() ? "" : "\n") + one.group + ":\n";
    group = one.group;
    text += std::string("  zeroth ") + one.usage + "\n      " + one.meaning + "\n      example: " + one.example + "\n";
  }
  return text;
}

}  // namespace zr::host::cli
