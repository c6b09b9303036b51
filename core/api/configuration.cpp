#include <algorithm>

#include "base/error.hpp"
#include "base/text.hpp"
#include "config/config.hpp"
#include "zr/program.hpp"

namespace zr {

namespace {

// A name that TOML accepts without quotes.
bool is_bare_key(const std::string& name) {
  return !name.empty() && std::all_of(name.begin(), name.end(), [](unsigned char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '-';
  });
}

// "path=value". Throws UserError if `path` is not a key, because other text could set another key.
std::string assignment(const std::string& path, const host::config::Value& value) {
  for (std::size_t at = 0, dot; at <= path.size(); at = dot + 1) {
    dot = std::min(path.find('.', at), path.size());
    if (!is_bare_key(path.substr(at, dot - at)))
      host::fail_user("zr::Configuration::set: '" + host::printable(path) +
                      "' is not a dotted path of bare keys such as train.steps");
  }
  return path + "=" + host::config::toml_text(value);
}

}  // namespace

Configuration Configuration::of_file(const std::string& path) {
  Configuration config;
  config.file_ = path;
  return config;
}

Configuration& Configuration::set_program_name(const std::string& name) {
  program_name_ = name;
  return *this;
}

Configuration& Configuration::set(const std::string& path, bool value) {
  values_.push_back(assignment(path, value));
  return *this;
}
Configuration& Configuration::set(const std::string& path, int64_t value) {
  values_.push_back(assignment(path, value));
  return *this;
}
Configuration& Configuration::set(const std::string& path, double value) {
  values_.push_back(assignment(path, value));
  return *this;
}
Configuration& Configuration::set(const std::string& path, const std::string& value) {
  values_.push_back(assignment(path, value));
  return *this;
}

Configuration& Configuration::add_group(const std::vector<std::string>& match,
                                        const std::map<std::string, double>& values, const std::string& use) {
  for (const auto& [key, value] : values)
    if (!is_bare_key(key))
      host::fail_user("zr::Configuration::add_group: '" + host::printable(key) +
                      "' is not a bare key such as weight_decay");
  toml_ += "\n[[optimizer.groups]]\nmatch = [";
  for (std::size_t i = 0; i < match.size(); ++i) toml_ += (i ? ", " : "") + host::config::toml_text(match[i]);
  toml_ += "]\n";
  if (!use.empty()) toml_ += "use = " + host::config::toml_text(use) + "\n";
  for (const auto& [key, value] : values) toml_ += key + " = " + host::config::toml_text(value) + "\n";
  return *this;
}

}  // namespace zr
