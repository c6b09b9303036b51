// zeroth verify, show and export: checkpoints without a model.
#pragma once

#include <cstdint>
#include <string>

namespace zr::host {

/// Checks every byte of a checkpoint, or of all in a folder; says what is wrong with which. Returns the exit code.
int verify_checkpoints(const std::string& folder);
/// Prints step, configuration and tensors.
void show_checkpoint(const std::string& folder);

struct ExportOptions {
  std::string from, to;    // to: NAME.safetensors, or a folder for several
  std::string dtype;       // "fp32", "bf16", "fp16"; empty: as it was trained
  int64_t file_bytes = 0;  // of a file, if `to` is a folder
};
/// Writes weights and buffers as safetensors, a few MiB at a time.
void export_weights(const ExportOptions& options);

}  // namespace zr::host
