#include "cli/completion.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "cli/job_file.hpp"
#include "zr/error.hpp"

namespace zr::host::cli {

namespace po = boost::program_options;

namespace {

constexpr const char *kTomlFiles = ":files *.toml", *kAllFiles = ":files *", *kFolders = ":folders";

bool is_toml(const std::string& word) {
  return word.size() > 5 && word.compare(word.size() - 5, 5, ".toml") == 0 && word.find('=') == word.npos;
}

// The paths of keys that the file sets and that belong neither to the host nor to a plug-in, but to the job's program.
std::vector<std::string> program_keys(const std::string& file, const std::vector<config::ConfigKey>& of_plugins) {
  std::vector<config::UncheckedValue> unchecked;
  try {
    config::Document::load(file, {}).check(of_plugins, 0, {}, &unchecked);
  } catch (const Error&) {  // completion does not report what is wrong with the file
  }
  std::vector<std::string> paths;
  for (const config::UncheckedValue& value : unchecked) paths.push_back(value.path);
  return paths;
}

std::vector<std::string> values_of(const std::string& path, const std::vector<config::ConfigKey>& keys,
                                   const plugin::Registry& registry) {
  for (const plugin::Role role : {plugin::Role::strategy, plugin::Role::communicator, plugin::Role::optimizer})
    if (path == name_of(role)) return registry.ids(role);
  for (const config::ConfigKey& key : keys) {
    if (key.path() != path) continue;
    if (key.type == ZR_KEY_BOOL) return {"true", "false"};
    return key.choices;
  }
  return {};
}

// table.key=value, in three steps: "train.", "train.dtype=", "train.dtype=bf16". `assigns` is false for the names of
// keys without "=".
std::vector<std::string> overrides(const std::string& word, const std::string& file, bool assigns) {
  const plugin::Registry registry;
  std::vector<config::ConfigKey> keys = plugin_keys(registry);
  std::vector<std::string> paths, words;
  if (!file.empty()) paths = program_keys(file, keys);
  keys.insert(keys.end(), config::host_keys().begin(), config::host_keys().end());
  if (const auto equals = word.find('='); equals != word.npos) {
    const std::string path = word.substr(0, equals);
    for (const std::string& value : values_of(path, keys, registry)) words.push_back(fmt::format("{}={}", path, value));
    return words;
  }
  for (const config::ConfigKey& key : keys) paths.push_back(key.path());
  if (!assigns) paths.insert(paths.end(), {"optimizer.groups", "checkpoint.rename"});  // tables
  for (const std::string& path : paths) {
    const auto dot = path.find('.');
    const bool in_table = dot != path.npos && word.find('.') == word.npos;
    words.push_back(in_table ? path.substr(0, dot + 1) : path + (assigns ? "=" : ""));
  }
  return words;
}

// The words that can be the value of an option.
std::vector<std::string> values_of_option(const std::string& name) {
  if (name == "path") return {kFolders};
  if (name == "json") return {kAllFiles};
  if (name == "safetensors") return {":files *.safetensors"};
  if (name == "dtype" || name == "grad-dtype") return {"fp32", "bf16", "fp16"};
  return {};
}

// Of `zeroth new ROLE ID DIR`: `words` are the words before the one to complete, with the command's name.
std::vector<std::string> words_of_new(const Arguments& words) {
  const auto position =
      std::count_if(words.begin(), words.end(), [](const auto& word) { return word.rfind("-", 0) != 0; });
  std::vector<std::string> roles;
  for (const plugin::Role role : plugin::kRoles) roles.emplace_back(plugin::name_of(role));
  if (position == 1) return roles;
  return position == 3 ? std::vector<std::string>{kFolders} : std::vector<std::string>{};
}

std::vector<std::string> positional(const Command& command, const Arguments& words) {
  const std::string& word = words.back();
  const auto toml = std::find_if(words.begin(), words.end() - 1, is_toml);
  const std::string file = toml == words.end() - 1 ? "" : *toml;
  switch (command.positionals) {
    case Positional::none: return {};
    case Positional::plugin: return {":files *.so"};
    case Positional::checkpoint: return {kFolders};
    case Positional::role_and_folder: return words_of_new({words.begin(), words.end() - 1});
    case Positional::shell: return {"bash"};
    case Positional::job:
    case Positional::job_and_keys: break;
  }
  std::vector<std::string> result;
  if (file.empty()) result.push_back(kTomlFiles);
  if (file.empty() && word.empty()) return result;
  for (std::string& candidate : overrides(word, file, command.positionals == Positional::job))
    result.push_back(std::move(candidate));
  return result;
}

std::vector<std::string> candidates(std::span<const Command> commands, const Arguments& words) {
  std::vector<std::string> result;
  if (words.size() == 1) {
    for (const Command& command : commands) result.emplace_back(command.name);
    result.insert(result.end(), {"--help", "--version"});
    return result;
  }
  const auto command =
      std::find_if(commands.begin(), commands.end(), [&](const auto& candidate) { return words[0] == candidate.name; });
  if (command == commands.end()) return {};
  if (command->takes_program && std::find(words.begin(), words.end() - 1, "--") != words.end() - 1) return {kAllFiles};
  const auto options = options_of(*command);
  const std::string& word = words.back();
  for (const auto& option : options.options()) {
    const bool has_value = option->semantic()->max_tokens() > 0;
    const std::string& before = words[words.size() - 2];
    if (has_value && (before == "--" + option->long_name() ||
                      before == option->canonical_display_name(po::command_line_style::allow_dash_for_short)))
      return values_of_option(option->long_name());
    if (const std::string prefix = "--" + option->long_name() + "="; has_value && word.starts_with(prefix)) {
      std::vector<std::string> values = values_of_option(option->long_name());
      for (std::string& value : values)
        if (value[0] != ':') value.insert(0, prefix);
      return values;
    }
    result.push_back("--" + option->long_name());
  }
  result.emplace_back("--help");
  return word.starts_with("-") ? result : positional(*command, words);
}

}  // namespace

std::vector<std::string> completions(std::span<const Command> commands, const Arguments& words) {
  if (words.empty()) return {};
  std::set<std::string> matching;
  for (std::string& candidate : candidates(commands, words))
    if (candidate[0] == ':' || candidate.starts_with(words.back())) matching.insert(std::move(candidate));
  return {matching.begin(), matching.end()};
}

}  // namespace zr::host::cli
