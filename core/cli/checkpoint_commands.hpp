// zeroth verify, show and export: checkpoints without a model.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "checkpoint/load.hpp"

namespace zr::host {

/// Checks every byte of a checkpoint, or of all in a folder; says what is wrong with which. Returns the exit code. A
/// checkpoint of a folder that another process removes or replaces meanwhile is not reported as damaged. `begins`, if
/// any, is called before each is opened.
int verify_checkpoints(const std::string& folder, const std::function<void(const std::string&)>& begins = nullptr);
/// The checkpoint that `path` is, or the newest in it, opened; also while a job that saves there removes others.
Checkpoint open_newest(const std::string& path);
/// Prints step, configuration and tensors.
void show_checkpoint(const std::string& folder);

struct ExportOptions {
  std::string from, to;    // to: NAME.safetensors, or a folder for several
  std::string dtype;       // "fp32", "bf16", "fp16"; empty: as it was trained
  int64_t file_bytes = 0;  // of a file, if `to` is a folder
  bool force = false;      // replaces files that exist; a checkpoint's own never
};
/// Writes weights and buffers as safetensors, a few MiB at a time. A failure leaves nothing.
void export_weights(const ExportOptions& options);

}  // namespace zr::host
