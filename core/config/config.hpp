// TOML text -> JobConfig: typed, complete, every value with its origin. An unknown key is an error with
// file:line:column.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "config/key.hpp"

namespace zr::host {

struct Origin {
  /// derived: computed from other keys; launcher: set by the launcher of the ranks.
  enum class From { key_default, file, command_line, derived, launcher } from = From::key_default;
  std::string file;  // as the user wrote the path
  int line = 0, column = 0;
  /// "default", "gpt.toml:12:8", "command line", "derived", "launcher".
  std::string text() const;
};

using Value = std::variant<bool, int64_t, double, std::string, std::vector<double>>;
/// A value as TOML text; doubles in shortest round-trip form.
std::string toml_text(const Value& value);

struct Entry {
  ConfigKey key;
  Value value;          // bytes as int64_t, durations in seconds as double
  std::string written;  // as TOML text with its unit: "\"32MiB\""
  Origin origin;
};

/// One [[optimizer.groups]]: parameters whose name matches any pattern get these values. The first matching group wins.
struct GroupConfig {
  std::vector<std::string> match;
  double lr_scale = 1;
  std::vector<Entry> values;  // all keys of the chosen optimizer, with the group's values where given
  std::vector<Entry> own;     // only the values that the group gives
  Origin origin;
};

/// A line of [checkpoint.rename]: weights named `ours` in the model are named `theirs` in files of other programs. The
/// n-th `*` matches the same characters in both.
struct Rename {
  std::string ours, theirs;
  Origin origin;
};

/// The validated configuration; immutable after check(). Reading an undeclared path is a bug: Failure(bug).
class JobConfig {
 public:
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

  const std::vector<Entry>& entries() const { return entries_; }  // schema order
  const std::vector<GroupConfig>& groups() const { return groups_; }
  const std::vector<Rename>& renames() const { return renames_; }
  /// The entries of one table ("strategy.<id>"). The pointers are valid while the JobConfig lives.
  std::vector<const Entry*> table(std::string_view name) const;
  /// All entries in the order of a file: sub-tables after their table, the plug-in of a role as [role] use.
  struct Row {
    std::string name;  // "use"
    const Entry* entry;
  };
  std::vector<std::pair<std::string, std::vector<Row>>> tables() const;
  /// The effective configuration as a TOML file that gives the same JobConfig again, with meanings as comments.
  std::string to_toml() const;

 private:
  friend class Check;
  std::vector<Entry> entries_;
  std::vector<GroupConfig> groups_;
  std::vector<Rename> renames_;
};

/// A value for an unknown key, in a check that does not know the keys of the job's program.
struct UncheckedValue {
  std::string path;
  std::string written;  // as TOML text, shortened
  Origin origin;
};

/// Ids of plug-ins, by role.
using PluginIds = std::map<std::string, std::vector<std::string>>;

/// A parsed file with the overrides of the command line applied, not yet checked.
class Document {
 public:
  /// Overrides are "path=value"; the value is TOML or a bare word ("job.name=mine", "train.steps=20"). Throws
  /// Failure(Exit::user) with file:line:column if the file cannot be read or parsed.
  static Document load(const std::string& file, const std::vector<std::string>& overrides);
  /// The same from text; `file` is the name used in messages.
  static Document parse(const std::string& toml, const std::string& file, const std::vector<std::string>& overrides);

  const std::string& file() const;
  /// The id of the plug-in for a role ("strategy", "optimizer", "communicator"): `role = "id"`, `[role] use = "id"`, or
  /// the role's default (from host_keys). `origin` receives the origin of the id.
  std::string chosen(const std::string& role, Origin* origin = nullptr) const;
  /// True if the file or the command line has a value or a table at `path`.
  bool holds(const std::string& path) const;
  /// The message "gpt.toml:1:1: unknown key ...; did you mean ...?" for a misspelt name of this role, or of its `use`;
  /// "" if no name is misspelt.
  std::string misspelt(const std::string& role) const;
  /// Validates one of the host's keys before check(). job.program and job.ranks, for example, are needed to find all
  /// other keys.
  Entry early(const std::string& path) const;
  /// Validates the file against host_keys() and `more` (the keys of the loaded plug-ins and of the program). Skips the
  /// tables [role.<id>] of `unread` plug-ins, which exist but were not loaded; rejects other unknown tables. Derives
  /// the third of global_batch, micro_batch and gradient_accumulation for `world` ranks; world 0 means job.ranks.
  /// Throws one Failure with all problems of the file, one per line. With `unchecked`, values of unknown keys are
  /// appended to it instead of being rejected.
  JobConfig check(const std::vector<ConfigKey>& more, int world, const PluginIds& unread = {},
                  std::vector<UncheckedValue>* unchecked = nullptr) const;

  struct Tree;  // toml::table, kept out of this header

 private:
  std::shared_ptr<const Tree> tree_;
};

}  // namespace zr::host
