#include "config/key_json.hpp"

#include <fmt/format.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "base/error.hpp"

namespace zr::host::config {

namespace {
constexpr std::string_view kMark = "{\"zeroth_schema\":1,";

// JSON has no infinity; null means no bound.
nlohmann::json bound(double value) { return std::isfinite(value) ? nlohmann::json(value) : nlohmann::json(); }
}  // namespace

std::string to_json(const std::vector<ConfigKey>& keys) {
  nlohmann::json list = nlohmann::json::array();
  for (const ConfigKey& key : keys)
    list.push_back({{"table", key.table},
                    {"name", key.name},
                    {"type", key.type},
                    {"default", key.def},
                    {"meaning", key.meaning},
                    {"min", bound(key.min)},
                    {"max", bound(key.max)},
                    {"choices", key.choices}});
  for (std::size_t i = 0; i < keys.size(); ++i)
    if (keys[i].path_kind == PathKind::path) list[i]["path"] = true;
  return fmt::format("{}\"keys\":{}}}", kMark, list.dump());
}

std::vector<ConfigKey> keys_from_json(const std::string& output, const std::string& program) {
  const auto at = output.rfind(kMark);
  if (at == std::string::npos || (at > 0 && output[at - 1] != '\n'))
    fail_user(
        program +
        " did not print the keys it reads; construct zr::Program (or zr::Engine from a file) first in its main()");
  try {
    const auto line = nlohmann::json::parse(output.substr(at, output.find('\n', at) - at));
    std::vector<ConfigKey> keys;
    for (const auto& entry : line.at("keys")) {
      ConfigKey key{entry.at("table"), entry.at("name"), entry.at("type"), entry.at("default"), entry.at("meaning")};
      if (!entry.at("min").is_null()) key.min = entry.at("min");
      if (!entry.at("max").is_null()) key.max = entry.at("max");
      key.choices = entry.at("choices").get<std::vector<std::string>>();
      if (entry.value("path", false)) key.path_kind = PathKind::path;  // programs of older releases print none
      keys.push_back(std::move(key));
    }
    return keys;
  } catch (const nlohmann::json::exception& error) {
    fail_user(fmt::format(
        "{} printed its keys in a format that this zeroth cannot read ({}); build both from the same release", program,
        error.what()));
  }
}

}  // namespace zr::host::config
