// `zeroth verify`, `show` and `export`, which read checkpoints without a model.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "checkpoint/load.hpp"

namespace zr::host::cli {

/// Verifies every byte of a checkpoint, or of all checkpoints in a folder, and prints the result for each. Returns the
/// exit code. A checkpoint that another process removes or replaces meanwhile is not reported as damaged. `begins`, if
/// set, is called before each checkpoint is opened.
int verify_checkpoints(const std::string& folder, const std::function<void(const std::string&)>& begins = nullptr);
/// Opens the checkpoint `path`, or the newest checkpoint in the folder `path`. A job may save there at the same time.
checkpoint::Checkpoint open_newest(const std::string& path);
/// Prints the step, the configuration and the tensors of a checkpoint.
void show_checkpoint(const std::string& folder);

struct ExportOptions {
  std::string from, to;    // to: NAME.safetensors, or a folder for several files
  std::string dtype;       // "fp32", "bf16" or "fp16"; empty: as trained
  int64_t file_bytes = 0;  // if `to` is a folder: a new file begins when the current one has this size
  bool force = false;      // replace files that exist, but never files of a checkpoint
};
/// Writes weights and buffers as safetensors, a few MiB at a time. A failure leaves no new files.
void export_weights(const ExportOptions& options);

}  // namespace zr::host::cli
