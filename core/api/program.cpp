#include "zr/program.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <set>

#include "api/program_state.hpp"
#include "base/error.hpp"
#include "base/file.hpp"
#include "base/log.hpp"
#include "config/key_json.hpp"
#include "config/key_reader.hpp"
#include "control/program_request.hpp"
#include "job/checkpoint_paths.hpp"
#include "plugin/plugin_selection.hpp"

namespace zr {

void (*build_without_memory)() = nullptr;
void (*load_device_library)(const std::string& device, const std::string& library) = nullptr;

namespace {

using host::control::ProgramRequest;

std::vector<host::config::ConfigKey> config_keys_of(const std::vector<Key>& keys) {
  const auto bound = [](double value) { return std::fabs(value) >= 1e18 ? std::copysign(INFINITY, value) : value; };
  std::vector<host::config::ConfigKey> config_keys;
  for (const Key& key : keys) {
    const auto dot = key.path.rfind('.');
    const std::string table = dot == key.path.npos ? "" : key.path.substr(0, dot);
    config_keys.push_back({table, key.path.substr(table.empty() ? 0 : dot + 1), key.type, key.def, key.meaning,
                           bound(key.min), bound(key.max), key.choices});
    if (key.is_path) config_keys.back().path_kind = host::config::PathKind::path;
  }
  return config_keys;
}

std::string name_of_this_program() {
  std::error_code error;
  const std::string name = std::filesystem::read_symlink("/proc/self/exe", error).filename().string();
  return name.empty() ? "program" : name;
}

// A program that was started by hand or by another launcher may have another number of ranks than job.ranks. A launcher
// was given a number too, so that two of the user's numbers differ.
void report_ranks(const host::config::Setting<int>& ranks, int world) {
  if (ranks.origin.from == host::config::Origin::From::key_default || ranks == world) return;
  const std::string contradiction = ranks.origin.text() + ": job.ranks is " + ranks.written + ", but " +
                                    std::to_string(world) + (world == 1 ? " rank was" : " ranks were") + " started";
  if (world == 1) return host::log(ZR_LOG_INFO, contradiction + "; `zeroth train` starts job.ranks ranks");
  host::log(ZR_LOG_WARN, contradiction + ", so the job has " + std::to_string(world) +
                             " ranks; set job.ranks to that number, or let the launcher start " + ranks.written);
}

// How long a rank waits for the others to start: a minute, or longer if the job sets a longer time limit.
std::chrono::milliseconds time_to_join(const host::config::Setting<std::chrono::milliseconds>& timeout) {
  constexpr std::chrono::milliseconds least = std::chrono::minutes(1);
  return timeout.given() ? std::max(least, timeout.value) : least;
}

// Errors in the declarations are for the author of the program.
void check_keys(const std::vector<host::config::ConfigKey>& keys) {
  std::set<std::string> seen;
  for (const host::config::ConfigKey& key : keys) {
    const std::string path = key.path(), location = "zr::Key(\"" + path + "\"): ";
    if (key.table.empty()) host::fail_user(location + "the key has no table; give it a name like \"model.layers\"");
    if (const std::string problem = host::config::declaration_problem(key); !problem.empty())
      host::fail_user(location + problem + "; correct the declaration in the program");
    if (!seen.insert(path).second)
      host::fail_user(location + "the key is declared twice; remove one of the declarations");
    for (const host::config::ConfigKey& engine_key : host::config::host_keys())
      if (engine_key.path() == path)
        host::fail_user(location +
                        "Zeroth has a key of this name; choose another name, or read the value without declaring it");
  }
}

std::string usage_of(const std::string& program) { return "usage: " + program + " FILE.toml [table.key=value ...]"; }

// Ends a process that has printed what it was started for.
[[noreturn]] void request_exit() { throw ExitRequest{std::fflush(stdout) == 0 ? 0 : exit_code::environment}; }

// Prints the usage and the program's keys, with default, range and meaning.
[[noreturn]] void help(const std::string& program, const std::vector<host::config::ConfigKey>& keys) {
  std::string text = usage_of(program) + "\n       " + program + " --help\n";
  if (!keys.empty()) text += "\nkeys of this program:\n";
  for (const host::config::ConfigKey& key : keys) {
    std::string line = "  " + key.path() + " = " + (key.def.empty() ? "..." : key.def);
    if (line.size() < 34) line.resize(34, ' ');
    const std::string range = host::config::range_text(key);
    text += line + "  # " + key.meaning + (range.empty() ? "" : " (" + range + ")") + "\n";
  }
  text += "\nTo list all keys and their values, with those of Zeroth and of the plug-ins: zeroth explain FILE.toml\n";
  std::fputs(text.c_str(), stdout);
  request_exit();
}

// A reader of the configuration, after a check that it has the key with one of these types; `call` names the method in
// the error.
host::config::KeyReader with_key(const Program::State& state, const char* call, const std::string& path,
                                 std::initializer_list<uint32_t> types) {
  const host::config::JobConfig& config = state.setup().config;
  const host::config::KeyReader reader(config);
  const std::string location = std::string("program.") + call + "(\"" + path + "\"): ";
  if (!reader.has(path)) {
    std::vector<std::string> paths;
    for (const host::config::Entry& entry : config.entries()) paths.push_back(entry.key.path());
    const std::string near = host::nearest(path, paths);
    host::fail_user(location + "unknown key" + (near.empty() ? "" : "; did you mean \"" + near + "\"?") +
                    "; `zeroth explain FILE` prints all keys; declare keys of the program with zr::Key");
  }
  const host::config::Entry& entry = reader.entry(path);
  const auto holds = [&](uint32_t type) {
    switch (type) {
      case ZR_KEY_BOOL: return std::holds_alternative<bool>(entry.value);
      case ZR_KEY_INT: return std::holds_alternative<int64_t>(entry.value);
      case ZR_KEY_FLOAT: return std::holds_alternative<double>(entry.value);
      default: return std::holds_alternative<std::string>(entry.value);
    }
  };
  if (types.size() > 0 && std::none_of(types.begin(), types.end(), holds))
    host::fail_user(location + "the key has type " + std::string(host::config::type_text(entry.key.type)) +
                    "; read it with the method for that type");
  return reader;
}
}  // namespace

Key::Key(std::string p, bool d, std::string m)
    : path(std::move(p)), def(d ? "true" : "false"), type(ZR_KEY_BOOL), meaning(std::move(m)) {}
Key::Key(std::string p, int d, std::string m, double low, double high)
    : path(std::move(p)), def(std::to_string(d)), type(ZR_KEY_INT), meaning(std::move(m)), min(low), max(high) {}
Key::Key(std::string p, double d, std::string m, double low, double high)
    : path(std::move(p)),
      def(host::config::toml_text(d)),
      type(ZR_KEY_FLOAT),
      meaning(std::move(m)),
      min(low),
      max(high) {}
Key::Key(std::string p, const char* d, std::string m, std::vector<std::string> c)
    : path(std::move(p)),
      def(host::config::toml_text(std::string(d))),
      type(ZR_KEY_STRING),
      meaning(std::move(m)),
      choices(std::move(c)) {}

Key Key::of_path(std::string path, const char* def, std::string meaning) {
  Key key(std::move(path), def, std::move(meaning));
  key.is_path = true;
  return key;
}

Program::State::State(Load load, std::filesystem::path folder, const std::vector<std::string>& overrides,
                      const std::vector<Key>& keys, const std::optional<Rendezvous>& where)
    : folder_(std::move(folder)) {
  const auto program_keys = config_keys_of(keys);
  check_keys(program_keys);
  const auto request = host::control::request_of_process();
  if (request == ProgramRequest::schema) {
    std::puts(host::config::to_json(program_keys).c_str());
    request_exit();
  }
  host::report_file_size_limit();
  const bool without_memory = request == ProgramRequest::parameters;
  prints_parameters_ = without_memory || request == ProgramRequest::parameters_in_memory;
  if (without_memory && build_without_memory) build_without_memory();
  const host::config::Document document = load(overrides);
  const host::config::Setting<int> ranks = document.ranks();
  // `zeroth plan` asks; it may itself be one of several processes of a launcher.
  setup_.control = prints_parameters_
                       ? host::control::Control::alone()
                       : host::control::Control::join(time_to_join(document.timeout()), where ? &*where : nullptr);
  const int world = prints_parameters_ ? 0 : setup_.control->world();
  host::log_as_rank(setup_.control->rank());
  const bool several_hosts = setup_.control->local_world() < setup_.control->world();
  setup_.revalidate = [load = std::move(load), overrides, program_keys, several_hosts](
                          const std::vector<std::string>& extra_overrides, int job_world) {
    std::vector<std::string> all_overrides = overrides;
    all_overrides.insert(all_overrides.end(), extra_overrides.begin(), extra_overrides.end());
    host::config::Document document = load(all_overrides);
    if (several_hosts) document.set_several_hosts();
    return host::plugin::resolve_job(document, host::plugin::Registry(), program_keys, job_world);
  };
  static_cast<host::plugin::ResolvedJob&>(setup_) = setup_.revalidate({}, world);
  if (prints_parameters_) return;
  const host::config::RunConfig& job = setup_.config.job();
  if (load_device_library) load_device_library(job.device, job.device_library);
  if (setup_.control->rank() > 0) return;
  host::job::check_checkpoint_paths(setup_.config.checkpoint());  // before the program builds its model
  report_ranks(ranks, world);
  for (const std::string& warning : setup_.config.warnings()) host::log(ZR_LOG_WARN, warning);
  if (!setup_.communicator_choice.empty()) host::log(ZR_LOG_INFO, setup_.communicator_choice);
}

std::shared_ptr<Program::State> Program::state_of(const std::string& file, const std::vector<std::string>& overrides,
                                                  const std::vector<Key>& keys,
                                                  const std::optional<Rendezvous>& where) {
  const auto load = [file](const std::vector<std::string>& assignments) {
    return host::config::Document::load(file, assignments);
  };
  return std::make_shared<State>(load,
                                 file.empty() ? std::filesystem::path() : std::filesystem::absolute(file).parent_path(),
                                 overrides, keys, where);
}

Program::Program(int argc, char** argv, const std::vector<Key>& keys) {
  host::guard_host_call("zr::Program", [&] {
    const std::string name = argc > 0 ? std::filesystem::path(argv[0]).filename().string() : "program";
    const std::vector<std::string> words(argv + std::min(argc, 1), argv + argc);
    const auto is_help = [](const std::string& word) { return word == "--help" || word == "-h"; };
    if (std::any_of(words.begin(), words.end(), is_help)) help(name, config_keys_of(keys));
    if (words.empty() && host::control::request_of_process() != ProgramRequest::schema)
      host::fail_user("no TOML file is given; " + usage_of(name));
    for (const std::string& word : words)
      if (word.size() > 1 && word[0] == '-')
        host::fail_user("unknown option " + word + "; " + usage_of(name) + " (or --help)");
    state_ = state_of(words.empty() ? "" : words[0], {words.begin() + !words.empty(), words.end()}, keys);
  });
}

Program::Program(const std::string& file, const std::vector<std::string>& overrides, const std::vector<Key>& keys,
                 const std::optional<Rendezvous>& where)
    : state_(host::guard_host_call("zr::Program", [&] { return state_of(file, overrides, keys, where); })) {}

Program::Program(const Configuration& config, const std::vector<std::string>& overrides, const std::vector<Key>& keys,
                 const std::optional<Rendezvous>& where)
    : state_(host::guard_host_call("zr::Program", [&] {
        if (!config.file().empty() && !config.toml().empty())
          host::fail_user("zr::Configuration::add_group: the configuration is the file " +
                          host::printable(config.file()) + "; write [[optimizer.groups]] there");
        const auto load = [config](const std::vector<std::string>& assignments) {
          if (!config.file().empty()) return host::config::Document::load(config.file(), assignments, config.values());
          const std::string name = config.program_name().empty() ? name_of_this_program() : config.program_name();
          return host::config::Document::parse(config.toml(), "zr::Configuration", assignments, config.values(), name);
        };
        const std::filesystem::path folder = config.file().empty()
                                                 ? std::filesystem::current_path()
                                                 : std::filesystem::absolute(config.file()).parent_path();
        return std::make_shared<State>(load, folder, overrides, keys, where);
      })) {}

Program::~Program() = default;

bool Program::boolean(const std::string& path) const {
  return with_key(*state_, "boolean", path, {ZR_KEY_BOOL}).boolean(path);
}
int64_t Program::integer(const std::string& path) const {
  return with_key(*state_, "integer", path, {ZR_KEY_INT}).integer(path);
}
double Program::number(const std::string& path) const {
  return with_key(*state_, "number", path, {ZR_KEY_INT, ZR_KEY_FLOAT}).number(path);
}
std::string Program::text(const std::string& path) const {
  return with_key(*state_, "text", path, {ZR_KEY_STRING}).text(path);
}
std::string Program::origin(const std::string& path) const {
  return with_key(*state_, "origin", path, {}).origin(path).text();
}
std::string Program::folder() const { return state_->folder().string(); }
int Program::rank() const { return state_->setup().control->rank(); }
int Program::world() const { return state_->setup().config.job().ranks; }

}  // namespace zr
