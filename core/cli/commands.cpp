#include "cli/commands.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cmath>
#include <cstdlib>
#include <iostream>

#include "base/dtype.hpp"
#include "base/error.hpp"
#include "base/log.hpp"
#include "base/text.hpp"
#include "cli/checkpoint_commands.hpp"
#include "cli/completion.hpp"
#include "cli/explain_key.hpp"
#include "cli/job_file.hpp"
#include "cli/launch.hpp"
#include "cli/launch_hosts.hpp"
#include "cli/new_command.hpp"
#include "cli/plan_command.hpp"
#include "cli/tune_command.hpp"

namespace zr::host::cli {

namespace po = boost::program_options;

namespace {

std::filesystem::path bin_folder() {
  std::error_code error;
  const auto self = std::filesystem::canonical("/proc/self/exe", error);
  if (error)
    fail_environment(fmt::format(
        "zeroth cannot find its own folder: cannot resolve /proc/self/exe: {}; mount /proc: mount -t proc proc /proc",
        error.message()));
  return self.parent_path();
}

void add_hosts(po::options_description& options) {
  options.add_options()(
      "hosts,H", po::value<std::string>(),
      "start the ranks on these hosts with mpirun: HOST:RANKS,HOST:RANKS,... or @FILE, with a host per line");
}

void train_options(po::options_description& options) {
  options.add_options()("resume", "resume from the newest checkpoint in checkpoint.dir, if there is one")(
      "ranks,n", po::value<std::string>(), "number of ranks: short for job.ranks=...");
  add_hosts(options);
}

int train(const Command& command, const Parsed& parsed) { return train_job(command, parsed, bin_folder()); }

void add_no_run(po::options_description& options) {
  options.add_options()("no-run", "do not start the program that the file names");
}

// A key has no '/', and the name of a file usually ends in ".toml".
bool is_job_file(const std::string& word) {
  std::error_code error;
  return word.ends_with(".toml") || word.find('/') != word.npos || word.find('.') == word.npos ||
         std::filesystem::exists(word, error);
}

int explain_file(const Command& command, const Parsed& parsed) {
  const bool run = !parsed.has("no-run");
  std::string file;
  Arguments overrides, keys;
  for (const std::string& word : parsed.positionals) {
    if (word.find('=') != word.npos)
      overrides.push_back(word);
    else if (file.empty() && keys.empty() && is_job_file(word))
      file = word;
    else
      keys.push_back(word);
  }
  if (file.empty() && keys.empty()) fail_usage(command, "neither a TOML file nor a key is given");
  const plugin::Registry registry;
  const JobFile job = validate_file(file, overrides, registry, bin_folder(), run);
  for (const std::string& warning : job.config.warnings()) log(ZR_LOG_WARN, warning);
  if (!keys.empty()) {
    for (const std::string& key : keys) std::cout << (&key == &keys[0] ? "" : "\n") << explain_key(job, registry, key);
    return 0;
  }
  std::cout << explain(job) << std::flush;
  return explain_placement({file, overrides, {}, {}, 0, {}, run}, bin_folder());
}

// The value of an option as an integer from 1 to `maximum`, also written as "7.5e9"; 0 if the option is not given.
int64_t integer_option(const Command& command, const Parsed& parsed, const char* name, double maximum) {
  if (!parsed.has(name)) return 0;
  const auto text = parsed.value(name);
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  if (text.empty() || *end || !(value >= 1) || value > maximum || value != std::floor(value))
    fail_user(fmt::format("zeroth {}: --{} {}: must be a whole number from 1 to {}, such as {}", command.name, name,
                          text, shortest(maximum), maximum < 7.5e9 ? "4" : "7.5e9"));
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
  for (const std::string& word : parsed.positionals) {
    if (word.find('=') != word.npos) {
      options.overrides.push_back(word);
    } else if (!options.file.empty()) {
      fail_usage(command, fmt::format("only one TOML file is allowed, not {} and {}", options.file, word));
    } else {
      options.file = word;
    }
  }
  for (const auto& [name, path] : {std::pair{"dtype", "train.dtype"}, {"grad-dtype", "gradients.dtype"}})
    if (parsed.has(name)) options.overrides.push_back(fmt::format("{}={}", path, parsed.value(name)));
  options.tensors = parsed.value<Arguments>("safetensors");
  options.sizes = {integer_option(command, parsed, "params", 1e15), integer_option(command, parsed, "layers", 1e5),
                   integer_option(command, parsed, "hidden", 1e6)};
  options.ranks = static_cast<int>(integer_option(command, parsed, "ranks", 1e6));
  options.run = !parsed.has("no-run");
  return options;
}

void plan_options(po::options_description& options) {
  options.add_options()("compare", "compare all strategies in one table")(
      "hosts", po::value<std::string>(), "also the bytes between hosts: node01:4,node02:4, @FILE, or 2x4")(
      "link", po::value<std::string>(), "with --hosts: the speed of a host's network, such as 10Gbit");
  add_model_options(options);
}

int plan(const Command& command, const Parsed& parsed) {
  PlanOptions options{parsed.has("compare"), {}, {}};
  if (parsed.has("hosts")) options.hosts = parsed.value("hosts");
  if (parsed.has("link")) options.link = parsed.value("link");
  return print_plan(model_query_options(command, parsed), options, bin_folder());
}

int64_t size_of_option(const Command& command, const char* name, const std::string& text) {
  const std::optional<int64_t> bytes = parse_bytes(text);
  if (!bytes || *bytes <= 0)
    fail_user(fmt::format("zeroth {}: --{} {}: must be a size, such as 4GiB", command.name, name, text));
  return *bytes;
}

void tune_options(po::options_description& options) {
  options.add_options()("path", po::value<std::string>(), "a folder on the disk to measure")(
      "tier", po::value<std::string>(), "the offload tier to measure (default: the last of offload.tiers)")(
      "list", "print the stored measurements, and measure nothing")(
      "forget", po::value<std::string>(), "remove the stored measurements of this folder's file system")(
      "seconds", po::value<int>()->default_value(60), "duration of the measurement")(
      "bytes", po::value<std::string>()->default_value("1GiB"), "size of the test file");
  po::options_description model("estimate the time of a model's optimizer phase from the measurement");
  add_model_options(model);
  options.add(model);
}

int tune_disk(const Command& command, const Parsed& parsed) {
  if (parsed.has("list") || parsed.has("forget")) {
    if (parsed.has("path") || !parsed.positionals.empty() || (parsed.has("list") && parsed.has("forget")))
      fail_usage(command, "--list and --forget measure nothing; give one of them, without other arguments");
    parsed.has("list") ? list_measured_disks() : forget_measured_disk(parsed.value("forget"));
    return 0;
  }
  TuneOptions options;
  options.path = parsed.value("path");
  options.tier = parsed.value("tier");
  options.seconds = parsed.value<int>("seconds");
  if (options.path.empty()) fail_usage(command, "--path is missing; name a folder on the disk to measure");
  if (options.seconds < 1 || options.seconds > 3600)
    fail_user(fmt::format("zeroth tune: --seconds {}: must be from 1 to 3600", options.seconds));
  options.bytes = size_of_option(command, "bytes", parsed.value("bytes"));
  options.model = model_query_options(command, parsed);
  return tune(options, bin_folder());
}

std::string only_folder(const Command& command, const Arguments& positionals) {
  if (positionals.size() != 1) fail_usage(command, "give exactly one folder");
  return positionals[0];
}

std::string in_brackets(const std::string& text) { return text.empty() ? "" : fmt::format(" ({})", text); }

int plugins(const Command& command, const Parsed& parsed) {
  if (parsed.positionals.size() > 1) fail_usage(command, "only one file is allowed");
  if (parsed.positionals.empty()) {
    const plugin::Registry registry;
    std::vector<DevicePlugins> of_devices;
    for (const std::string& type : registry.device_types())
      of_devices.push_back({type, registry.of_device(type).list()});
    const std::string text = list_text(registry.list(), of_devices);
    std::cout << "looked in";
    for (const auto& folder : registry.directories())
      std::cout << " " << folder.string() << in_brackets(plugin::folder_problem(folder));
    std::cout << "\n" << (text.empty() ? "no plug-ins found\n" : text);
    return 0;
  }
  if (parsed.positionals[0].empty())
    fail_user("zeroth plugins: the file name is empty; name a plug-in file, or give no argument to list all plug-ins");
  const plugin::PluginValidation validation =
      plugin::Registry::validate(std::filesystem::absolute(parsed.positionals[0]));
  std::cout << list_text({validation});
  return validation.accepted ? 0 : exit_code::user;
}

int verify(const Command& command, const Parsed& parsed) {
  return verify_checkpoints(only_folder(command, parsed.positionals));
}

int show(const Command& command, const Parsed& parsed) {
  show_checkpoint(only_folder(command, parsed.positionals));
  return 0;
}

void export_options(po::options_description& options) {
  options.add_options()("dtype", po::value<std::string>(),
                        "fp32, bf16 or fp16, converted from the fp32 master weights (default: as trained)")(
      "file-size", po::value<std::string>()->default_value("4GiB"), "approximate size of each file if OUT is a folder")(
      "force", "replace files that exist; files of a checkpoint are never replaced");
}

int export_model(const Command& command, const Parsed& parsed) {
  if (parsed.positionals.size() != 2) fail_usage(command, "give the checkpoint and the output");
  ExportOptions options;
  options.dtype = parsed.value("dtype");
  if (!options.dtype.empty() && float_dtype_named(options.dtype) == ZR_NONE)
    fail_user(fmt::format("zeroth export: --dtype {}: must be fp32, bf16 or fp16", options.dtype));
  options.force = parsed.has("force");
  options.from = parsed.positionals[0];
  options.to = parsed.positionals[1];
  options.file_bytes = size_of_option(command, "file-size", parsed.value("file-size"));
  export_weights(options);
  return 0;
}

void launch_options(po::options_description& options) {
  options.add_options()("ranks,n", po::value<int>()->default_value(1), "number of ranks to start")(
      "threads,t", po::value<int>()->default_value(0), "threads per rank; 0: number of cores / ranks");
  add_hosts(options);
}

int launch_program(const Command& command, const Parsed& parsed) {
  if (!parsed.positionals.empty() || parsed.program.empty()) fail_usage(command, "give the program after `--`");
  LaunchOptions options;
  options.ranks = parsed.value<int>("ranks");
  options.threads = parsed.value<int>("threads");
  if (options.ranks < 1 || options.threads < 0)
    fail_user(fmt::format("zeroth launch: -n {} -t {}: there must be at least 1 rank, and 0 or more threads",
                          options.ranks, options.threads));
  options.program = parsed.program;
  if (!parsed.has("hosts")) return launch(options);
  if (!parsed.values["ranks"].defaulted())
    fail_usage(command, "give either -n or --hosts, which has the ranks of each host");
  return launch_on_hosts({parse_hosts(command.name, parsed.value("hosts")), options.threads, options.program, {}});
}

void new_options(po::options_description& options) { options.add_options()("c", "write it in C11 instead of C++17"); }

int new_project(const Command& command, const Parsed& parsed) {
  if (parsed.positionals.size() != 3) fail_usage(command, "give the role, the id and the folder");
  const NewProject project{parsed.positionals[0], parsed.positionals[1], parsed.positionals[2], parsed.has("c")};
  const std::vector<std::string> files = write_project(project, bin_folder());
  std::cout << fmt::format("wrote {} to {}; its README.md has the commands that build it and train with it\n",
                           fmt::join(files, ", "), printable(project.folder));
  return 0;
}

int doctor(const Command& command, const Parsed& parsed) { return examine_machine(command, parsed, bin_folder()); }

int complete(const Command& command, const Parsed& parsed);

constexpr const char *kRun = "train", *kPlan = "plan and configure", *kMachine = "machine",
                     *kCheckpoints = "checkpoints", *kAuthors = "write plug-ins", *kShell = "shell";

constexpr Command kCommands[] = {
    {kRun, "train", "train [--resume] [-n RANKS] [--hosts HOST:RANKS,...] FILE.toml [table.key=value ...]",
     "Validates the file and starts its program on job.ranks ranks.", "zeroth train job.toml train.steps=20",
     Positional::job, false, train_options, train},
    {kRun, "launch", "launch -n RANKS | --hosts HOST:RANKS,... [-t THREADS] -- PROGRAM [ARGUMENT ...]",
     "Starts the ranks of any program that uses zr::Engine, on this machine or on several hosts.",
     "zeroth launch -n 4 -- ./program job.toml", Positional::none, true, launch_options, launch_program},
    {kPlan, "plan", "plan [FILE.toml] [OPTION ...] [table.key=value ...]",
     "Prints the bytes per rank by kind and the communication per step, for any number of ranks, without training.",
     "zeroth plan --params 7.5e9 --ranks 64 --dtype bf16 --compare", Positional::job, false, plan_options, plan},
    {kPlan, "explain", "explain [--no-run] [FILE.toml] [KEY ...] [table.key=value ...]",
     "Prints every key with its effective value, its origin and its meaning, and the tiers of offloaded state; with "
     "KEY, explains that key, also without a file.",
     "zeroth explain job.toml train.gradient_clipping", Positional::job_and_keys, false, add_no_run, explain_file},
    {kPlan, "tune", "tune --path FOLDER | --list | --forget FOLDER [FILE.toml] [OPTION ...] [table.key=value ...]",
     "Measures a disk, stores the best settings for it, and estimates the time of a model's optimizer phase.",
     "zeroth tune --path /mnt/disk --seconds 30", Positional::job, false, tune_options, tune_disk},
    {kPlan, "plugins", "plugins [FILE.so]",
     "Lists the available and the rejected plug-ins, or validates one file (exit code 2: rejected).",
     "ZR_PLUGIN_PATH=$PWD/build zeroth plugins", Positional::plugin, false, nullptr, plugins},
    {kPlan, "conform", "conform FILE.so [OPTION ...]",
     "Checks a plug-in against the rules of the plug-in ABI, one process per case (exit code 2: a rule does not hold).",
     "zeroth conform build/plugins/zr_optimizer_lion.so", Positional::plugin, false, conform_options, conform_plugin},
    {kMachine, "doctor", "doctor [FILE.toml] [--json FILE] [table.key=value ...]",
     "Checks this machine and this installation, and what a file needs of them, and prints the command that fixes each "
     "problem (exit code 3: a job would fail).",
     "zeroth doctor job.toml", Positional::job, false, doctor_options, doctor},
    {kCheckpoints, "verify", "verify DIR",
     "Verifies every byte of a checkpoint, or of all checkpoints in a folder (exit code 2: one is damaged).",
     "zeroth verify checkpoints", Positional::checkpoint, false, nullptr, verify},
    {kCheckpoints, "show", "show DIR", "Prints the step, the configuration and the tensors of a checkpoint.",
     "zeroth show checkpoints/step-00000100", Positional::checkpoint, false, nullptr, show},
    {kCheckpoints, "export", "export DIR OUT [--dtype TYPE] [--file-size SIZE] [--force]",
     "Writes a checkpoint's weights to OUT.safetensors, or to several files in the folder OUT.",
     "zeroth export checkpoints weights.safetensors --dtype bf16", Positional::checkpoint, false, export_options,
     export_model},
    {kAuthors, "new", "new ROLE ID DIR [--c]",
     "Writes a project that builds a strategy, communicator, optimizer or offload plug-in and trains with it.",
     "zeroth new optimizer acme.lion lion", Positional::role_and_folder, false, new_options, new_project},
    {kShell, "completion", "completion bash", "Prints the script that completes command lines of zeroth in bash.",
     "source <(zeroth completion bash)", Positional::shell, true, nullptr, complete},
};

// `zeroth completion words -- WORD ...` is for the script.
int complete(const Command& command, const Parsed& parsed) {
  if (parsed.positionals == Arguments{"words"}) {
    for (const std::string& word : completions(kCommands, parsed.program)) std::cout << word << "\n";
    return 0;
  }
  if (parsed.positionals != Arguments{"bash"}) fail_usage(command, "name the shell; only bash is supported");
  std::cout << bash_completion();
  return 0;
}

void help() {
  std::cout << "zeroth " ZR_VERSION ": ZeRO as plug-ins for libtorch\n\nusage: zeroth COMMAND ...\n\n"
            << help_text(kCommands)
            << "\n  zeroth COMMAND --help    zeroth --version\n\n"
               "exit codes: 1 exception of the program, 2 wrong input, 3 environment (memory, disk, plug-in), 4 a rank "
               "was lost or failed, 70 bug\n";
}

}  // namespace

int run_command(const std::vector<std::string>& arguments) {
  const std::string name = arguments.empty() ? "--help" : arguments[0];
  if (name == "--help" || name == "-h" || name == "help") return help(), 0;
  if (name == "--version") {
    std::cout << "zeroth " ZR_VERSION " (plug-in ABI " << ZR_ABI_MAJOR << "." << ZR_ABI_MINOR << ")\n";
    return 0;
  }
  std::vector<std::string> names;
  for (const Command& command : kCommands) {
    if (name == command.name) return run(command, {arguments.begin() + 1, arguments.end()});
    names.push_back(command.name);
  }
  const std::string near = nearest(name, names);
  fail_user(fmt::format("unknown command '{}'{} (zeroth --help lists all commands)", name,
                        near.empty() ? "" : fmt::format("; did you mean '{}'?", near)));
}

}  // namespace zr::host::cli
