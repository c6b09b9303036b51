#include "config/setting_of.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <sstream>

#include "base/dtype.hpp"
#include "base/error.hpp"

namespace zr::host::config {

namespace {
template <class T>
const T& as(const Entry& entry) {
  if (const T* value = std::get_if<T>(&entry.value)) return *value;
  fail_internal(fmt::format("the key '{}' of type {} does not fit the type of its field", entry.key.path(),
                            type_text(entry.key.type)));
}
}  // namespace

void convert(const Entry& entry, bool& to) { to = as<bool>(entry); }
void convert(const Entry& entry, int64_t& to) { to = as<int64_t>(entry); }
void convert(const Entry& entry, int& to) {
  to = static_cast<int>(as<int64_t>(entry));
  if (to != as<int64_t>(entry))
    fail_internal(fmt::format("the key '{}' does not fit an int: {}", entry.key.path(), entry.written));
}
void convert(const Entry& entry, double& to) { to = as<double>(entry); }
void convert(const Entry& entry, std::string& to) { to = as<std::string>(entry); }
void convert(const Entry& entry, std::vector<std::string>& to) {
  if (entry.key.type == kPatterns) return void(to = as<std::vector<std::string>>(entry));
  std::istringstream words(as<std::string>(entry));
  for (std::string word; words >> word;) to.push_back(word);
}
void convert(const Entry& entry, std::chrono::milliseconds& to) {
  to = std::chrono::milliseconds(static_cast<int64_t>(as<double>(entry) * 1e3));
}
void convert(const Entry& entry, TierChoice& to) { to.text = as<std::string>(entry); }

zr_dtype dtype_in(const Entry& entry) {
  const zr_dtype dtype = float_dtype_named(as<std::string>(entry));
  if (dtype == ZR_NONE && as<std::string>(entry) != "auto")
    fail_internal(fmt::format("the key '{}' has no value {}", entry.key.path(), entry.written));
  return dtype;
}

std::size_t choice_in(const Entry& entry, const std::string_view* choices, std::size_t count) {
  const auto* found = std::find(choices, choices + count, as<std::string>(entry));
  if (found == choices + count)
    fail_internal(fmt::format("the key '{}' has no value {}", entry.key.path(), entry.written));
  return static_cast<std::size_t>(found - choices);
}

}  // namespace zr::host::config
