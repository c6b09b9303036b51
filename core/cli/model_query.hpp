// The job and the model that `zeroth plan`, `explain` and `tune` analyze.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "job/host_traffic.hpp"
#include "plan/parameter_list.hpp"
#include "plugin/plugin_selection.hpp"

namespace zr::host::cli {

/// The options of the command line that name the job and the model.
struct ModelQueryOptions {
  std::string file;                    // a job's TOML file; empty: default values
  std::vector<std::string> overrides;  // table.key=value
  std::vector<std::string> tensors;    // safetensors files that have the model's parameters
  plan::Sizes sizes;                   // the sizes of a GPT, if there are no files
  int ranks = 0;                       // number of ranks; 0: job.ranks
  job::HostSizes hosts{};              // where they are, if that is given
  bool run = true;                     // whether the program that the file names may be started

  bool sized() const { return sizes.parameters || sizes.layers || sizes.width; }
  bool any() const { return !file.empty() || !tensors.empty() || sized(); }  // whether the options name a model
};

class ModelQuery {
 public:
  /// `command` is the prefix of error messages ("zeroth plan").
  ModelQuery(std::string command, ModelQueryOptions options)
      : command_(std::move(command)), options_(std::move(options)) {}
  /// Determines the parameters. Returns 0, or the exit code of the program if it failed. Throws Error.
  int resolve(const std::filesystem::path& bin);

  /// The job's document with more overrides.
  config::Document document(const std::vector<std::string>& extra_overrides) const;
  /// The validated job with more overrides, for `world` ranks (0: job.ranks). Throws Error.
  plugin::ResolvedJob resolved_job(const std::vector<std::string>& extra_overrides, int world) const;
  int ranks() const { return options_.ranks; }  // 0: job.ranks
  /// True if the plan is that of the file's program and ranks, whose paths exist on this machine then.
  bool runs_here() const {
    return options_.run && options_.tensors.empty() && !options_.sized() && options_.ranks == 0;
  }
  /// The hosts of the `ranks` ranks: as given, or one host if the number of ranks is the job's; empty: unknown.
  job::HostSizes hosts(int ranks) const;
  const std::vector<plan::Parameter>& parameters() const { return parameters_; }
  const std::string& model() const { return model_; }  // for a GPT by size: a line that describes it; otherwise ""

 private:
  int query_program(const std::filesystem::path& bin, bool for_parameters);
  std::string command_;
  ModelQueryOptions options_;
  std::vector<config::ConfigKey> program_keys_;  // the program's keys
  plugin::Registry registry_;
  std::vector<plan::Parameter> parameters_;
  std::string model_;
};

}  // namespace zr::host::cli
