// One case: a rule checked on one component (or on the library), in a process of its own.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>

#include "conform/text.hpp"

namespace zr::conform {

class Library;

/// Thrown by a check: the plug-in breaks the rule.
struct Failure {
  std::string reason;
};
/// Thrown by a check: the rule does not apply to this component, or cannot be checked on this machine.
struct Skipped {
  std::string reason;
};
/// Throws a Failure with the parts as its reason.
template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  throw Failure{concat(parts...)};
}
/// Throws a Skipped with the parts as its reason.
template <class... Parts>
[[noreturn]] void skip(const Parts&... parts) {
  throw Skipped{concat(parts...)};
}
/// Fails with the parts as the reason unless `holds`.
template <class... Parts>
void require(bool holds, const Parts&... parts) {
  if (!holds) fail(parts...);
}

/// How strictly a run of a plug-in treats the memory that it passes.
struct Mode {
  bool longer_structs = false;      // sized structs have 64 unknown bytes at the end
  bool withdraw_arguments = false;  // arguments cannot be read after the call has returned
};

/// Values for keys, as TOML text, by name: from the command line.
using KeyTexts = std::map<std::string, std::string>;

class Case {
 public:
  /// `values`: texts of keys that replace defaults.
  Case(std::filesystem::path file, std::string role, std::string id, uint64_t seed, KeyTexts values)
      : file_(std::move(file)), role_(std::move(role)), id_(std::move(id)), seed_(seed), values_(std::move(values)) {}
  const std::filesystem::path& file() const { return file_; }
  /// The component: "optimizer" and its id; both are "" for a rule about the library.
  const std::string& role() const { return role_; }
  const std::string& id() const { return id_; }
  const KeyTexts& values() const { return values_; }
  /// A generator that depends on the seed, on the rule and on `stream` only.
  std::mt19937_64 random(uint64_t stream = 0) const { return std::mt19937_64(seed_ + stream * 0x9e3779b97f4a7c15u); }
  uint64_t seed() const { return seed_; }
  /// The library, loaded at the first call.
  Library& library();
  /// What the check does now: part of the reason if the process crashes or exceeds its time limit. Any process of the
  /// case may call it.
  template <class... Parts>
  void note(const Parts&... parts) const {
    if (on_note) on_note(concat(parts...));
  }
  /// What a check that passes did not check: part of the result.
  void remark(const std::string& text) { remark_ = text; }
  const std::string& remark() const { return remark_; }
  std::function<void(const std::string&)> on_note;

 private:
  std::filesystem::path file_;
  std::string role_, id_;
  uint64_t seed_;
  KeyTexts values_;
  std::shared_ptr<Library> library_;
  std::string remark_;
};

}  // namespace zr::conform
