// `zeroth conform`: checks a plug-in against the rules of the ABI.
#include <fmt/format.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <iostream>

#include "base/error.hpp"
#include "cli/commands.hpp"
#include "conform/conform.hpp"

namespace zr::host::cli {

namespace po = boost::program_options;

void conform_options(po::options_description& options) {
  options.add_options()("rule", po::value<Arguments>()->composing(),
                        "check this rule only, such as ZR-O04; may be repeated")(
      "seed", po::value<uint64_t>()->default_value(1), "seed of the random cases")(
      "json", po::value<std::string>(), "also write the results to this file as JSON; - instead of the text")(
      "time-limit", po::value<double>()->default_value(60), "seconds per case")(
      "set", po::value<Arguments>()->composing(),
      "KEY=VALUE: the value of a key of the plug-in, as TOML; may be repeated")("list", "print the rules");
}

namespace {

conform::Options options_of(const Command& command, const Parsed& parsed) {
  if (parsed.positionals.size() != 1 || parsed.positionals[0].empty()) fail_usage(command, "name one plug-in file");
  conform::Options options;
  options.file = parsed.positionals[0];
  options.rules = parsed.value<Arguments>("rule");
  options.seed = parsed.value<uint64_t>("seed");
  options.time_limit = parsed.value<double>("time-limit");
  for (const std::string& rule : options.rules)
    if (!conform::find_rule(rule))
      fail_user(fmt::format("zeroth conform: there is no rule {}; zeroth conform --list prints the rules", rule));
  if (!(options.time_limit > 0))
    fail_user(fmt::format("zeroth conform: --time-limit {}: must be more than 0 seconds", options.time_limit));
  for (const std::string& one : parsed.value<Arguments>("set")) {
    const std::size_t equals = one.find('=');
    if (equals == one.npos || equals == 0)
      fail_usage(command, fmt::format("--set {} has no value; write KEY=VALUE", one));
    options.values[one.substr(0, equals)] = one.substr(equals + 1);
  }
  if (const std::string problem = conform::usage_problem(options); !problem.empty())
    fail_user("zeroth conform: " + problem);
  return options;
}

}  // namespace

int conform_plugin(const Command& command, const Parsed& parsed) {
  if (parsed.has("list")) {
    std::cout << conform::list_of_rules();
    return 0;
  }
  const conform::Options options = options_of(command, parsed);
  const std::string json = parsed.value("json");
  const conform::Report report = conform::check_library(options, [&](const conform::Result& result) {
    if (json != "-") std::cout << conform::text_of(result) << std::flush;
  });
  std::cout << (json == "-" ? conform::json_of(report) : conform::summary_of(report));
  if (!json.empty() && json != "-" && !(std::ofstream(json) << conform::json_of(report) << std::flush))
    fail_environment(fmt::format("cannot write {}: {}; choose another file for --json", json, std::strerror(errno)));
  return report.passed() ? 0 : exit_code::user;
}

}  // namespace zr::host::cli
