#include "checkpoint/json_field.hpp"

#include <fmt/format.h>

#include "base/error.hpp"
#include "base/hex.hpp"
#include "base/text.hpp"
#include "checkpoint/json.hpp"

namespace zr::host::checkpoint {

void JsonField::fail(const std::string& expected) const {
  constexpr std::size_t kLongest = 60;
  std::string value;
  if (value_.is_structured()) {
    value = value_.is_array() ? "an array" : "an object";
  } else {
    value = value_.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
    if (value.size() > kLongest) value = value.substr(0, kLongest) + "...";
  }
  const std::string what = key_.empty() ? "the top-level value" : fmt::format("'{}'", key_);
  fail_user(printable(fmt::format("{}: {} is {}, expected {}", file_, what, value, expected)) + remedy_);
}

JsonField JsonField::at(const std::string& key) const {
  if (!value_.is_object()) fail("an object");
  const auto found = value_.find(key);
  const std::string path = key_.empty() ? key : fmt::format("{}.{}", key_, key);
  if (found == value_.end()) fail_user(printable(fmt::format("{}: has no '{}'", file_, path)) + remedy_);
  return {file_, remedy_, *found, path};
}

JsonField JsonField::element(std::size_t index) const {
  if (!value_.is_array() || index >= value_.size()) fail(fmt::format("an array of at least {} values", index + 1));
  return {file_, remedy_, value_[index], fmt::format("{}[{}]", key_, index)};
}

std::size_t JsonField::size() const {
  if (!value_.is_array()) fail("an array");
  return value_.size();
}

std::vector<std::string> JsonField::keys() const {
  if (!value_.is_object()) fail("an object");
  std::vector<std::string> names;
  for (const auto& item : value_.items()) names.push_back(item.key());
  return names;
}

int64_t JsonField::integer(int64_t minimum, int64_t maximum) const {
  const auto n = json_integer(value_, minimum);
  if (!n || *n > maximum) fail(fmt::format("an integer from {} to {}", minimum, maximum));
  return *n;
}

double JsonField::number() const {
  if (!value_.is_number()) fail("a number");
  return value_.get<double>();
}

bool JsonField::boolean() const {
  if (!value_.is_boolean()) fail("true or false");
  return value_.get<bool>();
}

const std::string& JsonField::text() const {
  if (!value_.is_string()) fail("a string");
  return value_.get_ref<const std::string&>();
}

std::vector<std::string> JsonField::texts() const {
  std::vector<std::string> values;
  for (std::size_t i = 0, n = size(); i < n; ++i) values.push_back(element(i).text());
  return values;
}

std::string JsonField::bytes_of_hex() const {
  const auto bytes = bytes_from_hex(text());
  if (!bytes) fail("an even number of hexadecimal digits");
  return *bytes;
}

}  // namespace zr::host::checkpoint
