// TOML text -> JobConfig: typed, complete, every value with its origin. An unknown key is an error with
// file:line:column.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "config/host_config.hpp"
#include "config/key.hpp"
#include "config/setting.hpp"

namespace zr::host::config {

using Value = std::variant<bool, int64_t, double, std::string, std::vector<double>, std::vector<std::string>>;
/// A value as TOML text; doubles in shortest round-trip form.
std::string toml_text(const Value& value);

struct Entry {
  ConfigKey key;
  Value value;          // bytes as int64_t, durations in seconds as double
  std::string written;  // as TOML text with its unit: "\"32MiB\""; a path is as it was given
  Origin origin;
  GivenPath given_path{};
};

/// One [[optimizer.groups]]: parameters whose name matches any pattern get these values. The first matching group wins.
struct GroupConfig {
  std::vector<std::string> match;
  double lr_scale = 1;
  std::string use;                  // id of the optimizer that updates the group; empty: the job's
  std::vector<Entry> values;        // all keys of that optimizer, with the group's values where given
  std::vector<Entry> given_values;  // only the values that the group gives
  Origin origin;
};

/// A line of [checkpoint.rename]: weights named `ours` in the model are named `theirs` in files of other programs. The
/// n-th `*` matches the same characters in both.
struct Rename {
  std::string ours, theirs;
  Origin origin;
};

/// The validated configuration; immutable after check().
class JobConfig {
 public:
  /// The values of the engine's keys, by table.
  const RunConfig& job() const { return host_.job; }
  const TrainConfig& train() const { return host_.train; }
  const GradientsConfig& gradients() const { return host_.gradients; }
  const Precision& precision() const { return host_.precision; }
  const Fp16Config& fp16() const { return host_.fp16; }
  const MemoryConfig& memory() const { return host_.memory; }
  const OptimizerConfig& optimizer() const { return host_.optimizer; }
  const ScheduleConfig& schedule() const { return host_.schedule; }
  const EvalConfig& eval() const { return host_.eval; }
  const CommunicatorConfig& communicator() const { return host_.communicator; }
  const CheckpointConfig& checkpoint() const { return host_.checkpoint; }
  const OffloadConfig& offload() const { return host_.offload; }

  const std::vector<Entry>& entries() const { return entries_; }  // schema order
  const std::vector<GroupConfig>& groups() const { return groups_; }
  const std::vector<Rename>& renames() const { return renames_; }
  /// Warnings about values that have no effect, because their schedule or plug-in is not selected; one per table.
  /// Values in a file that selects another one explicitly give no warning: such a file keeps tables for several.
  const std::vector<std::string>& warnings() const { return warnings_; }
  /// The entries of a plug-in's table ("strategy.<id>"). The pointers are valid while the JobConfig lives.
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
  HostConfig host_;
  std::vector<Entry> entries_;
  std::vector<GroupConfig> groups_;
  std::vector<Rename> renames_;
  std::vector<std::string> warnings_;
};

/// A value for an unknown key, in a check that does not know the keys of the job's program.
struct UncheckedValue {
  std::string path;
  std::string written;  // as TOML text, shortened
  Origin origin;
};

/// The keys of a plug-in that is not selected. Values for them are validated, and have no effect.
struct UnselectedPlugin {
  std::string role, id;
  std::vector<ConfigKey> keys;
  std::string problem{};  // why its keys cannot be read; "": they can. Else values are not validated.
};

/// Ids of plug-ins, by role.
using PluginIds = std::map<std::string, std::vector<std::string>>;

/// A parsed file with the overrides of the command line applied, not yet checked.
class Document {
 public:
  /// Overrides are "path=value"; the value is TOML or a bare word ("job.name=mine", "train.steps=20"). Throws
  /// UserError with file:line:column if the file cannot be read or parsed. Paths in the file are relative to its
  /// folder, those of overrides to the working directory.
  /// `values`: assignments of the program, as parse() has them.
  static Document load(const std::string& file, const std::vector<std::string>& overrides,
                       const std::vector<std::string>& values = {});
  /// Parses TOML text; `file` is its name in messages. `overrides`: as in load(). `values`: overrides that the program
  /// gives, which the command line may override; their origin is "zr::Configuration". `run_name`: job.name if it is not
  /// given, instead of the name of the file. All paths are relative to the working directory.
  static Document parse(const std::string& toml, const std::string& file, const std::vector<std::string>& overrides,
                        const std::vector<std::string>& values = {}, const std::string& run_name = "");

  const std::string& file() const;
  /// The ranks of the job are on several hosts, which decides what communicator = "auto" means. Without this call they
  /// are on one.
  void set_several_hosts() { several_hosts_ = true; }
  bool several_hosts() const { return several_hosts_; }
  /// True if communicator = "auto", which is the default.
  bool chooses_communicator() const;
  /// Replaces what communicator = "auto" means.
  void set_automatic_communicator(const std::string& id) { automatic_communicator_ = id; }
  /// The id of the plug-in for a role ("strategy", "optimizer", "communicator"): `role = "id"`, `[role] use = "id"`, or
  /// the role's default (from host_keys). `origin` receives the origin of the id. For communicator = "auto", the one
  /// for the job's hosts.
  std::string chosen(const std::string& role, Origin* origin = nullptr) const;
  /// True if the file or the command line has the table [role.<id>], or a value of that name.
  bool has_table(const std::string& role, const std::string& id) const;
  /// The message "gpt.toml:1:1: unknown key ...; did you mean ...?" for a misspelt name of this role, or of its `use`;
  /// "" if no name is misspelt.
  std::string misspelt(const std::string& role) const;
  /// The ids of the optimizers that groups name with `use`, each once. Values that are not strings are left to check().
  std::vector<Setting<std::string>> group_optimizers() const;
  /// Keys of the engine that are needed to find all other keys; each is validated alone, before check().
  Setting<std::string> program() const;
  /// job.device.
  Setting<std::string> device() const;
  /// job.ranks.
  Setting<int> ranks() const;
  /// communicator.timeout.
  Setting<std::chrono::milliseconds> timeout() const;
  /// The keys of [communicator] that permit inexact collectives between hosts, as TOML: "communicator.exact = false".
  std::vector<std::string> inexact_collectives() const;
  /// The keys of [offload] that place a part of the training state.
  std::vector<Setting<TierChoice>> tier_choices() const;
  /// offload.tiers.
  Setting<std::vector<std::string>> tiers() const;
  /// Validates the file against host_keys() and `extra_keys` (the keys of the loaded plug-ins and of the program).
  /// Skips the tables [role.<id>] of the plug-ins `not_loaded`; rejects other unknown tables. Validates the values for
  /// keys of `unselected` plug-ins, and leaves them out of the JobConfig. Derives the third of
  /// global_batch, micro_batch and gradient_accumulation for `world` ranks; world 0 means job.ranks. Throws one Error
  /// with all problems of the file, one per line. With `unchecked`, values of unknown keys are appended to it instead
  /// of being rejected.
  JobConfig check(const std::vector<ConfigKey>& extra_keys, int world, const PluginIds& not_loaded = {},
                  std::vector<UncheckedValue>* unchecked = nullptr,
                  const std::vector<UnselectedPlugin>& unselected = {}) const;

  struct Tree;  // toml::table, kept out of this header

 private:
  struct Source {
    std::string file;
    std::string folder;    // that relative paths in the file are relative to
    std::string run_name;  // job.name if it is not given; "": the name of the file
  };
  static Document parsed(const std::string& toml, const Source& source, const std::vector<std::string>& values,
                         const std::vector<std::string>& overrides);
  Entry host_entry(const std::string& path) const;
  std::shared_ptr<const Tree> tree_;
  bool several_hosts_ = false;
  std::string automatic_communicator_;  // "": the default for the job's hosts
};

}  // namespace zr::host::config
