// `zeroth tune`: what a disk does, kept for later runs, and what a step of a model would take there.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "cli/model_query.hpp"

namespace zr::host {

/// What the command line says.
struct TuneOptions {
  std::string path;   // a folder on the disk
  std::string tier;   // empty: the last of offload.tiers
  int seconds = 60;   // in all
  int64_t bytes = 0;  // of the file
  ModelQueryOptions model;
};

/// Measures, prints, stores; returns the exit code. Throws Failure.
int tune(TuneOptions options, const std::filesystem::path& bin);

}  // namespace zr::host
