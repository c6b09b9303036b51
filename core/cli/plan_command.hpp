// `zeroth plan`: who would own which bytes, for any world, before anything is trained.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "plan/parameter_list.hpp"

namespace zr::host {

/// What the command line says.
struct PlanOptions {
  std::string file;                    // a job's TOML file; empty: a job of defaults
  std::vector<std::string> overrides;  // table.key=value
  std::vector<std::string> tensors;    // safetensors files, whose parameters are planned
  Sizes sizes;                         // or a model of these
  int ranks = 0;                       // 0: job.ranks
  bool compare = false;                // all strategies there are
};

/// Prints the plan; returns the exit code. Throws Failure, also where the plan is over memory.device_budget.
int print_plan(const PlanOptions& options, const std::filesystem::path& bin);

}  // namespace zr::host
