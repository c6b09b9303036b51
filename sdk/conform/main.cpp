// The program zeroth-conform: `zeroth conform` for authors who have only the SDK.
#include <cstdlib>
#include <cstring>
#include <exception>
#include <fstream>
#include <iostream>

#include "conform/conform.hpp"

namespace {

using namespace zr::conform;

constexpr const char* kHelp =
    "usage: zeroth-conform FILE.so [OPTION ...]\n\n"
    "Checks a plug-in against the rules of the ABI, one process per case.\n\n"
    "  --rule ID             check this rule only; may be repeated\n"
    "  --seed N              seed of the random cases (default 1)\n"
    "  --json FILE           also write the results to FILE as JSON; - instead of the text\n"
    "  --time-limit SECONDS  limit of each case (default 60)\n"
    "  --set KEY=VALUE       the value of a key of the plug-in, as TOML text; may be repeated\n"
    "  --list                print the rules\n\n"
    "exit codes: 0 every rule that was checked holds, 2 a rule does not hold, nothing was checked or an argument is\n"
    "wrong, 3 the machine lacks something\n";

constexpr int kRejected = 2, kEnvironment = 3;

struct Arguments {
  Options options;
  std::string json;
  bool list = false, help = false;
};

[[noreturn]] void fail_usage(const std::string& problem) {
  std::cerr << "zeroth-conform: " << problem << "; zeroth-conform --help lists the options\n";
  std::exit(kRejected);
}

void read_option(Arguments& arguments, const std::string& name, const std::string& value) {
  char* end = nullptr;
  if (name == "--rule") {
    if (!find_rule(value)) fail_usage("there is no rule " + value);
    arguments.options.rules.push_back(value);
  } else if (name == "--seed") {
    arguments.options.seed = std::strtoull(value.c_str(), &end, 10);
  } else if (name == "--json") {
    arguments.json = value;
  } else if (name == "--time-limit") {
    arguments.options.time_limit = std::strtod(value.c_str(), &end);
    if (!(arguments.options.time_limit > 0)) fail_usage("--time-limit must be more than 0");
  } else if (name == "--set") {
    if (value.find('=') == value.npos || value[0] == '=')
      fail_usage("--set " + value + " has no value; write KEY=VALUE");
    arguments.options.values[value.substr(0, value.find('='))] = value.substr(value.find('=') + 1);
  } else {
    fail_usage("unknown option " + name);
  }
  if (end && (*end != 0 || value.empty())) fail_usage(name + " needs a number, not '" + value + "'");
}

Arguments parse(int argc, char** argv) {
  Arguments arguments;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "--list" || word == "--help" || word == "-h") {
      (word == "--list" ? arguments.list : arguments.help) = true;
    } else if (word.rfind("--", 0) == 0) {
      if (i + 1 == argc) fail_usage(word + " needs a value");
      read_option(arguments, word, argv[++i]);
    } else if (!arguments.options.file.empty()) {
      fail_usage("only one file is allowed");
    } else {
      arguments.options.file = word;
    }
  }
  if (arguments.options.file.empty() && !arguments.list && !arguments.help) fail_usage("name a plug-in file");
  return arguments;
}

int run(const Arguments& arguments) {
  if (arguments.help || arguments.list) {
    std::cout << (arguments.help ? kHelp : list_of_rules());
    return 0;
  }
  if (const std::string problem = usage_problem(arguments.options); !problem.empty()) {
    std::cerr << "zeroth-conform: " << problem << "\n";
    return kRejected;
  }
  const bool prints_json = arguments.json == "-";
  const Report report = check_library(arguments.options, [&](const Result& result) {
    if (!prints_json) std::cout << text_of(result) << std::flush;
  });
  std::cout << (prints_json ? json_of(report) : summary_of(report)) << std::flush;
  if (!prints_json && !arguments.json.empty() && !(std::ofstream(arguments.json) << json_of(report) << std::flush)) {
    std::cerr << "zeroth-conform: cannot write " << arguments.json << ": " << std::strerror(errno) << "\n";
    return kEnvironment;
  }
  return report.passed() ? 0 : kRejected;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(parse(argc, argv));
  } catch (const std::exception& error) {
    std::cerr << "zeroth-conform: " << error.what() << "\n";
    return kEnvironment;
  }
}
