// `zeroth tune`: measures a disk, stores the result for later runs, and estimates the optimizer phase of a model on it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "cli/model_query.hpp"

namespace zr::host::cli {

/// The options of the command line.
struct TuneOptions {
  std::string path;   // a folder on the disk
  std::string tier;   // empty: the last of offload.tiers
  int seconds = 60;   // duration of the measurement
  int64_t bytes = 0;  // size of the test file
  ModelQueryOptions model;
};

/// Prints the stored measurements.
void list_measured_disks();
/// Removes the stored measurements of the file system of `path`, or of the one that was mounted on it. Throws UserError
/// if there are none.
void forget_measured_disk(const std::string& path);

/// Measures the disk, prints and stores the result; returns the exit code. Throws Error.
int tune(TuneOptions options, const std::filesystem::path& bin);

}  // namespace zr::host::cli
