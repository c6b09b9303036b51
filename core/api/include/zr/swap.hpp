// zr::Swap: other values in the place of all weights for a while, such as averages of earlier weights.
#pragma once

#include <torch/types.h>

#include <functional>
#include <map>
#include <memory>
#include <string>

#include "zr/engine.hpp"

namespace zr {

/// A scope in which the model has other weights, under every strategy:
///
///   {
///     const zr::Swap swap(engine, averages);
///     const zr::Engine::Evaluation evaluation(engine);
///     ...  // forward passes use `averages`
///   }      // weights, fp32 masters and optimizer states are as before, bit for bit
///
/// In contrast, values that a program writes in place or in a zr::gather scope become the weights of training: with
/// 16-bit weights they replace the fp32 masters, which then lose the bits that 16 bits do not have.
///
/// Inside the scope the program can run forward passes, zr::Engine::Evaluation, zr::gather and the collectives of the
/// engine; what it writes to weights is lost at the end. Methods that use the state of training (backward, step, save,
/// load, get, set, refresh, release, weights_hash, finish) and another Swap throw UserError. Each rank keeps a copy of
/// the weights that it owns in host memory, which the ledger counts (kind snapshot).
///
/// If an exception ends the scope in a job of several ranks, the weights keep the values of the scope, because their
/// restoration is collective: then only engine.load() is accepted, which restores a checkpoint. Catch exceptions inside
/// the scope instead. If the engine is destroyed first, the end has no effect.
///
/// Use it on the thread that created the engine, between steps, outside Evaluation and zr::gather.
class Swap {
 public:
  /// The values of a parameter, by name: a dense, real tensor on the CPU or on engine.device(), in the parameter's full
  /// shape, with the same values on all ranks (they are compared); it is rounded to train.dtype. An undefined tensor
  /// keeps the parameter's values. Called once per parameter, trained and frozen, in the order of engine.parameters().
  using Values = std::function<torch::Tensor(const std::string& parameter)>;
  /// Begins the scope. If `values` throws, so does this constructor on all ranks, and the weights are unchanged.
  /// Throws zr::Error. Collective.
  Swap(Engine& engine, const Values& values);
  /// Begins the scope with tensors by name; parameters that are not in the map keep their values. Throws UserError for
  /// a name that the model does not have, and what the other constructor throws. Collective.
  Swap(Engine& engine, const std::map<std::string, torch::Tensor>& values);
  /// Ends the scope. Collective, unless an exception unwinds the stack. May throw zr::Error.
  ~Swap() noexcept(false);
  Swap(const Swap&) = delete;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace zr
