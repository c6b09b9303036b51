// A job and the parameters it would train, as `zeroth plan` and `zeroth tune` are asked about them.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "plan/parameter_list.hpp"
#include "plugin/choice.hpp"

namespace zr::host {

/// What the command line says of them.
struct AskedOptions {
  std::string file;                    // a job's TOML file; empty: a job of defaults
  std::vector<std::string> overrides;  // table.key=value
  std::vector<std::string> tensors;    // safetensors files, whose parameters are planned
  Sizes sizes;                         // or a model of these
  int ranks = 0;                       // 0: job.ranks
  bool run = true;                     // the file's program may be started

  bool sized() const { return sizes.parameters || sizes.layers || sizes.width; }
  bool any() const { return !file.empty() || !tensors.empty() || sized(); }  // a model is named
};

class Asked {
 public:
  /// `command`: "zeroth plan", for messages.
  Asked(std::string command, AskedOptions options) : command_(std::move(command)), options_(std::move(options)) {}
  /// Finds out the parameters; returns an exit code, 0 if there they are. Throws Failure.
  int gather(const std::filesystem::path& bin);

  /// The job with more overrides laid over it.
  Document document(const std::vector<std::string>& more) const;
  /// The same judged, for `world` ranks; 0: job.ranks.
  JudgedJob judged(const std::vector<std::string>& more, int world) const;
  int ranks() const { return options_.ranks; }
  const std::vector<Parameter>& parameters() const { return parameters_; }
  const std::string& model() const { return model_; }  // what they are, a line, if it must be told

 private:
  int ask_program(const std::filesystem::path& bin, bool for_parameters);
  std::string command_;
  AskedOptions options_;
  std::vector<Key> own_;  // the program's keys
  Registry registry_;
  std::vector<Parameter> parameters_;
  std::string model_;
};

}  // namespace zr::host
