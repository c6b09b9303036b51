#include "config/config.hpp"
#include "zr/program.hpp"

namespace zr {

Configuration& Configuration::set(const std::string& path, bool value) {
  values_.push_back(path + "=" + host::config::toml_text(value));
  return *this;
}
Configuration& Configuration::set(const std::string& path, int64_t value) {
  values_.push_back(path + "=" + host::config::toml_text(value));
  return *this;
}
Configuration& Configuration::set(const std::string& path, double value) {
  values_.push_back(path + "=" + host::config::toml_text(value));
  return *this;
}
Configuration& Configuration::set(const std::string& path, const std::string& value) {
  values_.push_back(path + "=" + host::config::toml_text(value));
  return *this;
}

Configuration& Configuration::add_group(const std::vector<std::string>& match,
                                        const std::map<std::string, double>& values) {
  toml_ += "\n[[optimizer.groups]]\nmatch = [";
  for (std::size_t i = 0; i < match.size(); ++i) toml_ += (i ? ", " : "") + host::config::toml_text(match[i]);
  toml_ += "]\n";
  for (const auto& [key, value] : values) toml_ += key + " = " + host::config::toml_text(value) + "\n";
  return *this;
}

}  // namespace zr
