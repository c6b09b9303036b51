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

/// Loads weights and buffers into `module`, on the CPU or a device, in their types: `from` is what engine.load() takes.
/// A parameter of fp32 gets the fp32 master weight that a 16-bit job saved; other floating-point types are rounded to
/// the module's. Every byte of a checkpoint is verified. strict: throws UserError, before it changes anything, for
/// tensors that are missing, unexpected, or have another shape; otherwise they are left out and reported; `fresh` and
/// `dropped` are empty. Throws UserError for a parameter that an engine trains, and for one without memory
/// (zr::deferred): load these with the engine. If reading fails, some of the tensors may have been loaded. Not
/// collective; any thread, one at a time per module.
LoadReport load_weights(torch::nn::Module& module, const std::string& from, bool strict = true);
/// Loads them into a TorchScript module, in the same way.
LoadReport load_weights(torch::jit::Module& module, const std::string& from, bool strict = true);

}  // namespace zr
