#include "config/key_reader.hpp"

#include <fmt/format.h>

#include "base/error.hpp"

namespace zr::host::config {

namespace {

template <class T>
const T& as(const Entry& entry, const char* type) {
  if (const T* value = std::get_if<T>(&entry.value)) return *value;
  fail_internal(
      fmt::format("key '{}' was read as {}, but its type is {}", entry.key.path(), type, type_text(entry.key.type)));
}

// Finds an entry by path; the plug-in of a role is both "strategy" and "strategy.use".
const Entry* find(const std::vector<Entry>& entries, std::string_view path) {
  if (constexpr std::string_view use = ".use"; path.ends_with(use)) {
    const std::string_view role = path.substr(0, path.size() - use.size());
    for (const Entry& entry : entries)
      if (entry.key.table.empty() && entry.key.name == role) return &entry;
  }
  for (const Entry& entry : entries)
    if (entry.key.path() == path) return &entry;
  return nullptr;
}

}  // namespace

const Entry& KeyReader::entry(std::string_view path) const {
  if (const Entry* entry = find(config_.entries(), path)) return *entry;
  fail_internal(fmt::format("the key '{}' was not declared", path));
}

bool KeyReader::has(std::string_view path) const { return find(config_.entries(), path) != nullptr; }
bool KeyReader::boolean(std::string_view path) const { return as<bool>(entry(path), "boolean"); }
int64_t KeyReader::integer(std::string_view path) const { return as<int64_t>(entry(path), "integer"); }
double KeyReader::number(std::string_view path) const {
  const Entry& number_entry = entry(path);
  if (const auto* as_int = std::get_if<int64_t>(&number_entry.value)) return static_cast<double>(*as_int);
  return as<double>(number_entry, "number");
}
const std::string& KeyReader::text(std::string_view path) const { return as<std::string>(entry(path), "string"); }
const std::vector<double>& KeyReader::numbers(std::string_view path) const {
  return as<std::vector<double>>(entry(path), "numbers");
}
const Origin& KeyReader::origin(std::string_view path) const { return entry(path).origin; }
bool KeyReader::given(std::string_view path) const { return origin(path).given(); }

}  // namespace zr::host::config
