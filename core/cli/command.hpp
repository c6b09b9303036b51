// A command of `zeroth`: its help, its options, and its arguments.
#pragma once

#include <boost/program_options.hpp>
#include <span>
#include <string>
#include <vector>

namespace zr::host::cli {

using Arguments = std::vector<std::string>;

/// The positional arguments of a command, for shell completion.
enum class Positional { none, job, job_and_keys, plugin, checkpoint, role_and_folder, shell };

struct Parsed;

struct Command {
  const char *group, *name, *usage, *meaning, *example;
  Positional positionals;
  bool takes_program;  // the arguments after `--` are another program's
  void (*add_options)(boost::program_options::options_description& options);  // null: no options except --help
  int (*run)(const Command&, const Parsed&);                                  // returns the exit code; throws Error
};

/// The options and the positional arguments of a command.
struct Parsed {
  boost::program_options::variables_map values;
  Arguments positionals;
  Arguments program;  // if the command takes a program: the arguments after `--`
  bool has(const char* option) const { return values.count(option) > 0; }
  /// The value of an option, or a default-constructed one.
  template <class T = std::string>
  T value(const char* option) const {
    return has(option) ? values[option].template as<T>() : T();
  }
};

/// The options of the command, except --help.
boost::program_options::options_description options_of(const Command& command);

/// Parses the arguments and runs the command; with --help, prints its help. Returns the exit code; throws Error.
int run(const Command& command, const Arguments& arguments);

/// Throws UserError: "zeroth train: PROBLEM; usage: zeroth train ...".
[[noreturn]] void fail_usage(const Command& command, const std::string& problem);

/// The text of `zeroth --help`: all commands by group, each with an example.
std::string help_text(std::span<const Command> commands);

}  // namespace zr::host::cli
