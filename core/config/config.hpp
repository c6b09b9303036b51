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
  /// derived: follows from other keys; launcher: who started the ranks decided.
  enum class From { key_default, file, command_line, derived, launcher } from = From::key_default;
  std::string file;  // as the user wrote it
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

/// One [[optimizer.groups]]: parameters whose name matches any pattern (first group wins) get these values instead.
struct GroupConfig {
  std::vector<std::string> match;
  double lr_scale = 1;
  std::vector<Entry> values;  // every key of the chosen optimizer, the group's own value where it gives one
  std::vector<Entry> own;     // those it gives
  Origin origin;
};

/// A line of [checkpoint.rename]: weights named `ours` stand under `theirs` in files of other programs. A `*` of the
/// one is what the same `*` of the other stands for.
struct Rename {
  std::string ours, theirs;
  Origin origin;
};

/// Immutable after check(). Reading a path that is no key is a bug.
class JobConfig {
 public:
  /// The value of a key, by its type.
  bool boolean(std::string_view path) const;
  int64_t integer(std::string_view path) const;
  double number(std::string_view path) const;
  const std::string& text(std::string_view path) const;
  /// An array of numbers. Above: integer is also for bytes, number for durations, in seconds, and for integers.
  const std::vector<double>& numbers(std::string_view path) const;
  bool has(std::string_view path) const;    // it is a key
  bool given(std::string_view path) const;  // in the file or on the command line
  /// Where the value comes from; the whole entry.
  const Origin& origin(std::string_view path) const;
  const Entry& entry(std::string_view path) const;

  const std::vector<Entry>& entries() const { return entries_; }  // schema order
  const std::vector<GroupConfig>& groups() const { return groups_; }
  const std::vector<Rename>& renames() const { return renames_; }
  /// The entries of one table ("strategy.<id>"). The pointers live as the JobConfig.
  std::vector<const Entry*> table(std::string_view name) const;
  /// All entries as they stand in a file: sub-tables behind their table, a role's own name written as [role] use.
  struct Row {
    std::string name;  // "use"
    const Entry* entry;
  };
  std::vector<std::pair<std::string, std::vector<Row>>> tables() const;
  /// The effective configuration as a TOML file that gives the same JobConfig again, meanings as comments.
  std::string to_toml() const;

 private:
  friend class Check;
  std::vector<Entry> entries_;
  std::vector<GroupConfig> groups_;
  std::vector<Rename> renames_;
};

/// A value that no known key has, where the keys of the job's program are not known.
struct UncheckedValue {
  std::string path;
  std::string written;  // as TOML text, shortened
  Origin origin;
};

/// Ids of plug-ins, by role.
using PluginIds = std::map<std::string, std::vector<std::string>>;

/// A parsed file with the command line's overrides laid over it, not yet checked.
class Document {
 public:
  /// Overrides are "path=value", value in TOML or a bare word ("job.name=mine", "train.steps=20"). Throws
  /// Failure(Exit::user) for a file that cannot be read or parsed, with file:line:column.
  static Document load(const std::string& file, const std::vector<std::string>& overrides);
  /// The same from text; `file` is the name used in messages.
  static Document parse(const std::string& toml, const std::string& file, const std::vector<std::string>& overrides);

  const std::string& file() const;
  /// The plug-in named for a role ("strategy", "optimizer", "communicator"): `role = "id"`, `[role] use = "id"`, or the
  /// role's default (from host_keys). Also says where it was named.
  std::string chosen(const std::string& role, Origin* origin = nullptr) const;
  /// The file or the command line has something there, a value or a table.
  bool holds(const std::string& path) const;
  /// A name in the file that is nearly this role's, or its `use`, as "gpt.toml:1:1: unknown key ...; did you mean
  /// ...?"; "" if there is none.
  std::string misspelt(const std::string& role) const;
  /// One of the host's keys before everything is checked, judged alone: job.program and job.ranks are needed to find
  /// out which other keys there are.
  Entry early(const std::string& path) const;
  /// Checks everything against host_keys() + `more` (the loaded plug-ins' and the program's). Tables [role.<id>] of
  /// `unread` plug-ins, those that exist but were not loaded, are skipped; other tables are refused. Derives the third
  /// of global_batch, micro_batch, accumulation for `world` ranks; world 0: job.ranks. All problems of the file stand
  /// in one Failure, a line each.
  /// With `unchecked`, values that no key has are added to it instead of being rejected.
  JobConfig check(const std::vector<ConfigKey>& more, int world, const PluginIds& unread = {},
                  std::vector<UncheckedValue>* unchecked = nullptr) const;

  struct Tree;  // toml::table, kept out of this header

 private:
  std::shared_ptr<const Tree> tree_;
};

}  // namespace zr::host
