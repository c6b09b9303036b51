// A value of the configuration with the key that it was read from.
#pragma once

#include <string>

namespace zr::host::config {

struct Origin {
  /// program: zr::Configuration::set(); derived: computed from other keys; launcher: set by the launcher of the ranks.
  enum class From { key_default, file, command_line, program, derived, launcher } from = From::key_default;
  std::string file;  // as the user wrote the path
  int line = 0, column = 0;
  /// "default", "gpt.toml:12:8", "command line", "zr::Configuration", "derived", "launcher".
  std::string text() const;
  /// True if the file, the command line or the program has the value.
  bool given() const { return from == From::file || from == From::command_line || from == From::program; }
};

/// A path as it was given, before it became absolute.
struct GivenPath {
  std::string text;  // "": the value is not a path, or is empty
  std::string base;  // the folder that relative paths are relative to
};

/// The value of one key of the engine, and what a message needs to name it. Converts to its value.
template <class T>
struct Setting {
  T value{};
  std::string key;      // "train.steps"
  std::string written;  // as TOML text with its unit: "\"32MiB\""; a path is as it was given
  Origin origin;
  GivenPath given_path{};

  operator const T&() const { return value; }
  const T* operator->() const { return &value; }
  /// True if the file, the command line or the program has the key.
  bool given() const { return origin.given(); }
};

/// Values of the keys that place a part of the training state: on the device, on the tiers of offload.tiers as far as
/// the budgets require it, or on one tier.
inline constexpr const char *kOnDevice = "device", *kAutomatic = "auto";

/// The value of such a key.
struct TierChoice {
  std::string text = kOnDevice;  // kOnDevice, kAutomatic, the id of a tier, or the file of its library
  bool on_device() const { return text == kOnDevice; }
  bool automatic() const { return text == kAutomatic; }
  /// True if the key names a tier.
  bool names_tier() const { return !on_device() && !automatic(); }
  bool operator==(const TierChoice&) const = default;
};

}  // namespace zr::host::config
