// Weights for a module that no engine trains: to evaluate or use what a job has saved, in a program without a job.
#pragma once

#include <string>

#include "zr/engine.hpp"

namespace torch {
namespace nn {
class Module;
}
namespace jit {
struct Module;
}
}  // namespace torch

namespace zr {

/// Loads weights and buffers into `module`, on the CPU or a device, in their types. `from` is what engine.load() takes,
/// with the names of the module: keys of a TOML file, such as [checkpoint.rename], do not apply. Values of fp32,
/// bf16, fp16 and integers become the module's floating-point type, from the fp32 master weights if the file has them;
/// other types, such as fp64, must be the module's. Weights that were tied in the job load under each of their names.
/// Every byte that is read of a checkpoint is verified; files of other programs have no checksums, except those of
/// torch.save(), which are converted in TMPDIR first. If a job saves to the folder meanwhile and removes the checkpoint
/// that is read, the newest one is read. strict: throws UserError, before it changes anything, for tensors that are
/// missing, unexpected, or have another shape; otherwise they are left out and reported; `fresh` and `dropped` are
/// empty. Throws UserError, before it changes anything, for a tensor of another type that cannot be converted, for
/// tensors that share a part of their memory, for a tensor of another c10::InferenceMode, for a parameter that an
/// engine trains, and for one without memory (zr::deferred): load these with the engine. Throws EnvironmentError if the
/// file cannot be read. If reading fails, some of the tensors may have been loaded. Not collective; any thread, one at
/// a time per module.
LoadReport load_weights(torch::nn::Module& module, const std::string& from, bool strict = true);
/// Loads them into a TorchScript module, in the same way.
LoadReport load_weights(torch::jit::Module& module, const std::string& from, bool strict = true);

}  // namespace zr
