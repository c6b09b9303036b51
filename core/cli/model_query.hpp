// A job and the parameters it would train, as `zeroth plan` and `zeroth tune` are asked about them.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "plan/parameter_list.hpp"
#include "plugin/plugin_selection.hpp"

namespace zr::host {

/// What the command line says of them.
struct ModelQueryOptions {
  std::string file;                    // a job's TOML file; empty: a job of defaults
  std::vector<std::string> overrides;  // table.key=value
  std::vector<std::string> tensors;    // safetensors files, whose parameters are planned
  Sizes sizes;                         // or a model of these
  int ranks = 0;                       // 0: job.ranks
  bool run = true;                     // the file's program may be started

  bool sized() const { return sizes.parameters || sizes.layers || sizes.width; }
  bool any() const { return !file.empty() || !tensors.empty() || sized(); }  // a model is named
};

class ModelQuery {
 public:
  /// `command`: "zeroth plan", for messages.
  ModelQuery(std::string command, ModelQueryOptions options)
      : command_(std::move(command)), options_(std::move(options)) {}
  /// Finds out the parameters; returns an exit code, 0 if there they are. Throws Failure.
  int resolve(const std::filesystem::path& bin);

  /// The job with more overrides laid over it.
  Document document(const std::vector<std::string>& more) const;
  /// The same judged, for `world` ranks; 0: job.ranks.
  ResolvedJob resolved_job(const std::vector<std::string>& more, int world) const;
  int ranks() const { return options_.ranks; }
  const std::vector<Parameter>& parameters() const { return parameters_; }
  const std::string& model() const { return model_; }  // what they are, a line, if it must be told

 private:
  int ask_program(const std::filesystem::path& bin, bool for_parameters);
  std::string command_;
  ModelQueryOptions options_;
  std::vector<ConfigKey> own_;  // the program's keys
  Registry registry_;
  std::vector<Parameter> parameters_;
  std::string model_;
};

}  // namespace zr::host
