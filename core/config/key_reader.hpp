// Reads any key by its path. Only for core/config, and for zr::Program, whose keys have no struct; other code reads the
// engine's keys from the structs of host_config.hpp (tests/arch checks it).
#pragma once

#include <string_view>
#include <vector>

#include "config/config.hpp"

namespace zr::host::config {

/// Refers to the configuration, which must outlive it. Reading an undeclared path, or with the method of another type,
/// is a bug: InternalError.
class KeyReader {
 public:
  explicit KeyReader(const JobConfig& config) : config_(config) {}

  /// The value of a key. integer() also reads sizes in bytes; number() also reads durations in seconds, and integers.
  bool boolean(std::string_view path) const;
  int64_t integer(std::string_view path) const;
  double number(std::string_view path) const;
  const std::string& text(std::string_view path) const;
  /// An array of numbers.
  const std::vector<double>& numbers(std::string_view path) const;
  bool has(std::string_view path) const;    // true if the key is declared
  bool given(std::string_view path) const;  // set in the file or on the command line
  /// The origin of a value; its complete entry.
  const Origin& origin(std::string_view path) const;
  const Entry& entry(std::string_view path) const;

 private:
  const JobConfig& config_;
};

/// The structs of a configuration with all keys of the engine. InternalError if a key is missing.
HostConfig read_host_config(const JobConfig& config);

}  // namespace zr::host::config
