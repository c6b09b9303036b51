#include "cli/commands.hpp"

#include <unistd.h>

#include <algorithm>
#include <boost/program_options.hpp>
#include <cmath>
#include <cstdlib>
#include <iostream>

#include "base/dtype.hpp"
#include "base/failure.hpp"
#include "base/text.hpp"
#include "cli/checkpoint_commands.hpp"
#include "cli/job_file.hpp"
#include "cli/launch.hpp"
#include "cli/plan_command.hpp"
#include "cli/trainer.hpp"
#include "cli/tune_command.hpp"

namespace zr::host {

namespace po = boost::program_options;

namespace {

using Arguments = std::vector<std::string>;

struct Command {
  const char* name;
  const char* usage;
  const char* meaning;
  int (*run)(const Command&, const Arguments&);
};

// The options and the positional arguments of a command.
struct Parsed {
  po::variables_map values;
  Arguments words;
  bool helped = false;  // --help was given and parse() has printed the help
};

Parsed parse(const Command& command, const Arguments& arguments, const po::options_description& options = {}) {
  po::options_description all;
  all.add(options).add_options()("help,h", "show this help")("words", po::value<Arguments>());
  po::positional_options_description words;
  words.add("words", -1);
  Parsed parsed;
  try {
    po::store(po::command_line_parser(arguments).options(all).positional(words).run(), parsed.values);
  } catch (const po::error& error) {
    fail_user(std::string("zeroth ") + command.name + ": " + error.what() + "; usage: zeroth " + command.usage);
  }
  if (parsed.values.count("words")) parsed.words = parsed.values["words"].as<Arguments>();
  if ((parsed.helped = parsed.values.count("help") > 0)) {
    std::cout << "usage: zeroth " << command.usage << "\n\n" << command.meaning << "\n";
    if (!options.options().empty()) std::cout << "\n" << options;
  }
  return parsed;
}

std::filesystem::path bin_folder() {
  std::error_code error;
  const auto self = std::filesystem::canonical("/proc/self/exe", error);
  if (error)
    fail_environment("zeroth cannot find its own folder: cannot resolve /proc/self/exe: " + error.message() +
                     "; mount /proc: mount -t proc proc /proc");
  return self.parent_path();
}

JobFile validated_job(const Command& command, const Arguments& words, bool run = true) {
  if (words.empty())
    fail_user(std::string("zeroth ") + command.name + ": no TOML file is given; usage: zeroth " + command.usage);
  return validate_file(words[0], {words.begin() + 1, words.end()}, Registry(), bin_folder(), run);
}

// The argv of the training program. Throws Failure(user) if the file names no program.
Arguments trainer_of(const JobFile& job) {
  const auto program = find_trainer(job.config.entry("job.program"), job.file, bin_folder());
  Arguments argv{program.string(), job.file};
  argv.insert(argv.end(), job.overrides.begin(), job.overrides.end());
  return argv;
}

int train(const Command& command, const Arguments& arguments) {
  po::options_description how("options");
  how.add_options()("resume", "resume from the newest checkpoint in checkpoint.dir, if there is one");
  Parsed parsed = parse(command, arguments, how);
  if (parsed.helped) return 0;
  if (parsed.values.count("resume")) parsed.words.emplace_back("checkpoint.resume=true");
  const JobFile job = validated_job(command, parsed.words);
  LaunchOptions options;
  options.ranks = static_cast<int>(job.config.integer("job.ranks"));
  options.threads = static_cast<int>(job.config.integer("job.threads"));
  options.program = trainer_of(job);
  options.environment = {{"ZR_PROGRESS", ::isatty(STDOUT_FILENO) ? "tty" : "plain"}};
  return launch(options);
}

void add_no_run(po::options_description& options) {
  options.add_options()("no-run", "do not start the program that the file names");
}

int explain_file(const Command& command, const Arguments& arguments) {
  po::options_description how("options");
  add_no_run(how);
  const Parsed parsed = parse(command, arguments, how);
  if (parsed.helped) return 0;
  const bool run = parsed.values.count("no-run") == 0;
  std::cout << explain(validated_job(command, parsed.words, run)) << std::flush;
  return explain_placement({parsed.words[0], {parsed.words.begin() + 1, parsed.words.end()}, {}, {}, 0, run},
                           bin_folder());
}

// The value of an option as an integer from 1 to `most`, also written as "7.5e9"; 0 if the option is not given.
int64_t integer_option(const Command& command, const po::variables_map& values, const char* name, double most) {
  if (!values.count(name)) return 0;
  const std::string text = values[name].as<std::string>();
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  if (text.empty() || *end || !(value >= 1) || value > most || value != std::floor(value))
    fail_user(std::string("zeroth ") + command.name + ": --" + name + " " + text +
              ": must be a whole number from 1 to " + shortest(most) + ", such as 7.5e9");
  return static_cast<int64_t>(value);
}

// Adds the options that name a job and a model.
void add_model_options(po::options_description& options) {
  options.add_options()("ranks,n", po::value<std::string>(), "number of ranks (default: job.ranks)")(
      "dtype", po::value<std::string>(), "short for train.dtype=...")("grad-dtype", po::value<std::string>(),
                                                                      "short for gradients.dtype=...")(
      "safetensors", po::value<Arguments>()->composing(), "the model: the tensors in this file; may be repeated")(
      "params", po::value<std::string>(), "the model: a GPT with this number of parameters, such as 7.5e9")(
      "layers", po::value<std::string>(), "number of layers of the GPT")("hidden", po::value<std::string>(),
                                                                         "hidden size of the GPT");
  add_no_run(options);
}
ModelQueryOptions model_query_options(const Command& command, const Parsed& parsed) {
  ModelQueryOptions options;
  for (const std::string& word : parsed.words) {
    if (word.find('=') != word.npos) {
      options.overrides.push_back(word);
    } else if (!options.file.empty()) {
      fail_user(std::string("zeroth ") + command.name + ": only one TOML file is allowed, not " + options.file +
                " and " + word + "; usage: zeroth " + command.usage);
    } else {
      options.file = word;
    }
  }
  for (const auto& [name, path] : {std::pair{"dtype", "train.dtype"}, {"grad-dtype", "gradients.dtype"}})
    if (parsed.values.count(name))
      options.overrides.push_back(std::string(path) + "=" + parsed.values[name].as<std::string>());
  if (parsed.values.count("safetensors")) options.tensors = parsed.values["safetensors"].as<Arguments>();
  options.sizes = {integer_option(command, parsed.values, "params", 1e15),
                   integer_option(command, parsed.values, "layers", 1e5),
                   integer_option(command, parsed.values, "hidden", 1e6)};
  options.ranks = static_cast<int>(integer_option(command, parsed.values, "ranks", 1e6));
  options.run = parsed.values.count("no-run") == 0;
  return options;
}

int plan(const Command& command, const Arguments& arguments) {
  po::options_description all("options");
  all.add_options()("compare", "compare all strategies in one table");
  add_model_options(all);
  const Parsed parsed = parse(command, arguments, all);
  return parsed.helped
             ? 0
             : print_plan(model_query_options(command, parsed), parsed.values.count("compare") > 0, bin_folder());
}

int64_t size_of_option(const Command& command, const char* name, const std::string& text) {
  const std::optional<int64_t> bytes = parse_bytes(text);
  if (!bytes || *bytes <= 0)
    fail_user(std::string("zeroth ") + command.name + ": --" + name + " " + text + ": must be a size, such as 4GiB");
  return *bytes;
}

int tune_disk(const Command& command, const Arguments& arguments) {
  TuneOptions options;
  std::string size;
  po::options_description how("options");
  how.add_options()("path", po::value(&options.path), "a folder on the disk to measure")(
      "tier", po::value(&options.tier), "the offload tier to measure (default: the last of offload.tiers)")(
      "seconds", po::value(&options.seconds)->default_value(60), "duration of the measurement")(
      "bytes", po::value(&size)->default_value("1GiB"), "size of the test file");
  po::options_description model("estimate the time of a model's optimizer phase from the measurement");
  add_model_options(model);
  how.add(model);
  Parsed parsed = parse(command, arguments, how);
  if (parsed.helped) return 0;
  po::notify(parsed.values);
  if (options.path.empty())
    fail_user(std::string("zeroth tune: --path is missing; name a folder on the disk to measure; usage: zeroth ") +
              command.usage);
  if (options.seconds < 1 || options.seconds > 3600)
    fail_user("zeroth tune: --seconds " + std::to_string(options.seconds) + ": must be from 1 to 3600");
  options.bytes = size_of_option(command, "bytes", size);
  options.model = model_query_options(command, parsed);
  return tune(options, bin_folder());
}

std::string only_folder(const Command& command, const Arguments& words) {
  if (words.size() != 1)
    fail_user(std::string("zeroth ") + command.name + ": give exactly one folder; usage: zeroth " + command.usage);
  return words[0];
}

std::string in_brackets(const std::string& text) { return text.empty() ? "" : " (" + text + ")"; }

int plugins(const Command& command, const Arguments& arguments) {
  const Parsed parsed = parse(command, arguments);
  if (parsed.helped) return 0;
  if (parsed.words.size() > 1)
    fail_user(std::string("zeroth plugins: only one file is allowed; usage: zeroth ") + command.usage);
  if (parsed.words.empty()) {
    const Registry registry;
    const std::string text = list_text(registry.list());
    std::cout << "looked in";
    for (const auto& folder : registry.directories())
      std::cout << " " << folder.string() << in_brackets(folder_problem(folder));
    std::cout << "\n" << (text.empty() ? "no plug-ins found\n" : text);
    return 0;
  }
  if (parsed.words[0].empty())
    fail_user("zeroth plugins: the file name is empty; name a plug-in file, or give no argument to list all plug-ins");
  const PluginValidation validation = Registry::validate(std::filesystem::absolute(parsed.words[0]));
  std::cout << list_text({validation});
  return validation.accepted ? 0 : static_cast<int>(Exit::user);
}

int verify(const Command& command, const Arguments& arguments) {
  const Parsed parsed = parse(command, arguments);
  return parsed.helped ? 0 : verify_checkpoints(only_folder(command, parsed.words));
}

int show(const Command& command, const Arguments& arguments) {
  const Parsed parsed = parse(command, arguments);
  if (!parsed.helped) show_checkpoint(only_folder(command, parsed.words));
  return 0;
}

int export_model(const Command& command, const Arguments& arguments) {
  ExportOptions options;
  std::string size;
  po::options_description how("options");
  how.add_options()("dtype", po::value(&options.dtype),
                    "fp32, bf16 or fp16, converted from the fp32 master weights (default: as trained)")(
      "file-size", po::value(&size)->default_value("4GiB"), "approximate size of each file if OUT is a folder")(
      "force", "replace files that exist; files of a checkpoint are never replaced");
  Parsed parsed = parse(command, arguments, how);
  if (parsed.helped) return 0;
  po::notify(parsed.values);
  if (parsed.words.size() != 2)
    fail_user(std::string("zeroth export: give the checkpoint and the output; usage: zeroth ") + command.usage);
  if (!options.dtype.empty() && float_dtype_named(options.dtype) == ZR_NONE)
    fail_user("zeroth export: --dtype " + options.dtype + ": must be fp32, bf16 or fp16");
  options.force = parsed.values.count("force") > 0;
  options.from = parsed.words[0];
  options.to = parsed.words[1];
  options.file_bytes = size_of_option(command, "file-size", size);
  export_weights(options);
  return 0;
}

int launch_program(const Command& command, const Arguments& arguments) {
  const auto dashes = std::find(arguments.begin(), arguments.end(), "--");
  LaunchOptions options;
  po::options_description ranks("options");
  ranks.add_options()("ranks,n", po::value(&options.ranks)->default_value(1), "number of ranks to start")(
      "threads,t", po::value(&options.threads)->default_value(0), "threads per rank; 0: number of cores / ranks");
  Parsed parsed = parse(command, {arguments.begin(), dashes}, ranks);
  if (parsed.helped) return 0;
  po::notify(parsed.values);
  if (!parsed.words.empty() || dashes == arguments.end() || dashes + 1 == arguments.end())
    fail_user(std::string("zeroth launch: give the program after `--`; usage: zeroth ") + command.usage);
  if (options.ranks < 1 || options.threads < 0)
    fail_user("zeroth launch: -n " + std::to_string(options.ranks) + " -t " + std::to_string(options.threads) +
              ": there must be at least 1 rank, and 0 or more threads");
  options.program.assign(dashes + 1, arguments.end());
  return launch(options);
}

constexpr Command kCommands[] = {
    {"train", "train [--resume] FILE.toml [table.key=value ...]",
     "Validates the file and starts its program on job.ranks ranks.", train},
    {"plan", "plan [FILE.toml] [OPTION ...] [table.key=value ...]",
     "Prints the bytes per rank by kind and the communication per step, for any number of ranks, without training.",
     plan},
    {"tune", "tune --path FOLDER [FILE.toml] [OPTION ...] [table.key=value ...]",
     "Measures a disk, stores the best settings for it, and estimates the time of a model's optimizer phase.",
     tune_disk},
    {"explain", "explain [--no-run] FILE.toml [table.key=value ...]",
     "Prints every key with its effective value, its origin and its meaning, and the tiers of offloaded state.",
     explain_file},
    {"plugins", "plugins [FILE.so]",
     "Lists the available and the rejected plug-ins, or validates one file (exit code 2: rejected).", plugins},
    {"verify", "verify DIR",
     "Verifies every byte of a checkpoint, or of all checkpoints in a folder (exit code 2: one is damaged).", verify},
    {"show", "show DIR", "Prints the step, the configuration and the tensors of a checkpoint.", show},
    {"export", "export DIR OUT [--dtype TYPE] [--file-size SIZE] [--force]",
     "Writes a checkpoint's weights to OUT.safetensors, or to several files in the folder OUT.", export_model},
    {"launch", "launch -n RANKS [-t THREADS] -- PROGRAM [ARGUMENT ...]",
     "Starts the ranks of any program that uses zr::Engine.", launch_program},
};

void help() {
  std::cout << "zeroth " ZR_VERSION ": ZeRO as plug-ins for libtorch\n\nusage: zeroth COMMAND ...\n\n";
  for (const Command& one : kCommands) std::cout << "  zeroth " << one.usage << "\n      " << one.meaning << "\n";
  std::cout << "\n  zeroth COMMAND --help    zeroth --version\n\n"
               "exit codes: 1 exception of the program, 2 wrong input, 3 environment (memory, disk, plug-in), 4 a rank "
               "was lost, 70 bug\n";
}

}  // namespace

int run_command(const Arguments& arguments) {
  const std::string name = arguments.empty() ? "--help" : arguments[0];
  if (name == "--help" || name == "-h" || name == "help") return help(), 0;
  if (name == "--version") {
    std::cout << "zeroth " ZR_VERSION " (plug-in ABI " << ZR_ABI_MAJOR << "." << ZR_ABI_MINOR << ")\n";
    return 0;
  }
  probe_before_loading();
  std::vector<std::string> names;
  for (const Command& one : kCommands) {
    if (name == one.name) return one.run(one, {arguments.begin() + 1, arguments.end()});
    names.push_back(one.name);
  }
  const std::string near = nearest(name, names);
  fail_user("unknown command '" + name + "'" + (near.empty() ? "" : "; did you mean '" + near + "'?") +
            " (zeroth --help lists all commands)");
}

}  // namespace zr::host
