// A value of a JSON file with its path in that file, so that a wrong value is reported by file and key.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace zr::host::checkpoint {

/// Refers to the file name, remedy and value, which must outlive it. Every accessor throws UserError if the value has a
/// wrong type or is out of bounds: "FILE: 'facts.updates' is -1, expected an integer from 0 to 12; ...". Any thread.
class JsonField {
 public:
  /// `remedy` is appended to messages; `key`: the path of the value in the file, empty for the top-level value.
  JsonField(const std::string& file, const std::string& remedy, const nlohmann::json& value, std::string key = "")
      : file_(file), remedy_(remedy), value_(value), key_(std::move(key)) {}

  bool has(const std::string& key) const { return value_.is_object() && value_.contains(key); }
  JsonField at(const std::string& key) const;               // of an object
  JsonField element(std::size_t index) const;               // of an array
  std::size_t size() const;                                 // of an array
  std::vector<std::string> keys() const;                    // of an object
  int64_t integer(int64_t minimum, int64_t maximum) const;  // within these bounds
  double number() const;                                    // a string of digits is rejected
  bool boolean() const;
  const std::string& text() const;
  std::vector<std::string> texts() const;  // an array of strings
  /// Decodes a string with two hexadecimal digits per byte.
  std::string bytes_of_hex() const;
  const nlohmann::json& value() const { return value_; }
  [[noreturn]] void fail(const std::string& expected) const;

 private:
  const std::string& file_;
  const std::string& remedy_;
  const nlohmann::json& value_;
  std::string key_;
};

}  // namespace zr::host::checkpoint
