#include "cli/command.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <iostream>

#include "base/error.hpp"
#include "base/path.hpp"

namespace zr::host::cli {

namespace po = boost::program_options;

namespace {

// An argument "~/x" or "--option=~/x" with the home folder; shells expand only the first. Keys have their own rule.
std::string home_expanded(const std::string& argument) {
  const auto equals = argument.starts_with("--") ? argument.find("=~") : std::string::npos;
  return equals == std::string::npos ? with_home(argument)
                                     : argument.substr(0, equals + 1) + with_home(argument.substr(equals + 1));
}

Parsed parse(const Command& command, const Arguments& given) {
  const auto program = command.takes_program ? std::find(given.begin(), given.end(), "--") : given.end();
  Arguments arguments(given.begin(), program);
  std::transform(arguments.begin(), arguments.end(), arguments.begin(), home_expanded);
  po::options_description options;
  options.add(options_of(command)).add_options()("help,h", "show this help")("words", po::value<Arguments>());
  po::positional_options_description positionals;
  positionals.add("words", -1);
  Parsed parsed;
  try {
    po::store(po::command_line_parser(arguments).options(options).positional(positionals).run(), parsed.values);
  } catch (const po::error& error) {
    fail_usage(command, error.what());
  }
  parsed.positionals = parsed.value<Arguments>("words");
  if (program != given.end()) parsed.program.assign(program + 1, given.end());
  return parsed;
}

}  // namespace

po::options_description options_of(const Command& command) {
  po::options_description options("options");
  if (command.add_options) command.add_options(options);
  return options;
}

int run(const Command& command, const Arguments& arguments) {
  const Parsed parsed = parse(command, arguments);
  if (!parsed.has("help")) return command.run(command, parsed);
  std::cout << "usage: zeroth " << command.usage << "\n\n"
            << command.meaning << "\n\nexample:\n  " << command.example << "\n";
  if (command.add_options) std::cout << "\n" << options_of(command);
  return 0;
}

void fail_usage(const Command& command, const std::string& problem) {
  fail_user(fmt::format("zeroth {}: {}; usage: zeroth {}", command.name, problem, command.usage));
}

std::string help_text(std::span<const Command> commands) {
  std::string text, group;
  for (const Command& command : commands) {
    if (group != command.group) text += fmt::format("{}{}:\n", group.empty() ? "" : "\n", command.group);
    group = command.group;
    text += fmt::format("  zeroth {}\n      {}\n      example: {}\n", command.usage, command.meaning, command.example);
  }
  return text;
}

}  // namespace zr::host::cli
