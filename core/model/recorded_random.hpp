// Random numbers of recorded operators: generators advance when an operator is recorded, and when it runs later, it
// draws the same numbers. Skipping numbers by a formula would depend on libtorch's internals, and advancing a generator
// only when it is read is impossible, because random() is not virtual.
#pragma once

#include <ATen/core/Generator.h>

#include <cstdint>
#include <optional>
#include <unordered_map>

#include "model/stack_tensors.hpp"

namespace zr::host::model {

/// The random numbers of one recorded operator.
struct RandomUse {
  at::Generator generator;          // that the operator drew from
  std::optional<at::Tensor> state;  // before the operator; absent if the previous operator on the generator left it so
  uint64_t state_after = 0;         // hash of the state
};

/// True if the operator draws random numbers.
bool draws(const c10::OperatorHandle& op);
/// True if the number of its draws may depend on the values of tensors, not on their shapes alone.
bool draws_by_values(const c10::OperatorHandle& op);
/// The state of the generator, and its hash.
at::Tensor random_state(const at::Generator& generator);
uint64_t hash_of(const at::Tensor& state);

/// Restores the generator that an operator with these arguments draws from.
class KeptRandomState {
 public:
  explicit KeptRandomState(const Stack& arguments);
  ~KeptRandomState();
  KeptRandomState(const KeptRandomState&) = delete;

 private:
  const at::Generator generator_;
  const at::Tensor state_;
};

/// Advances generators as the recorded operators would. Used on the thread that records.
class RandomRecorder {
 public:
  /// Runs the operator on temporary memory in place of placeholders, so that its generator is in the state that an
  /// ordinary call leaves. `arguments`: all arguments. Throws what the operator throws.
  RandomUse draw(const c10::OperatorHandle& op, const Stack& arguments);

 private:
  struct Known {
    at::Generator generator;  // keeps the address in use
    at::Tensor after;
  };
  std::unordered_map<const c10::GeneratorImpl*, Known> known_;
};

/// Repeats the draws of recorded operators, in their order, and leaves all generators as they were. One object at a
/// time.
class RandomReplay {
 public:
  RandomReplay();
  ~RandomReplay();
  RandomReplay(const RandomReplay&) = delete;
  /// Puts the generator into the state of the recording. If it is not the default generator, `arguments` gets another
  /// one in place of it.
  void begin(const RandomUse& use, Stack& arguments);
  /// Whether the operator that ran drew as many numbers as in the recording. `use`: null if it drew none.
  bool end(const RandomUse* use);

 private:
  at::Generator default_;
  at::Tensor before_, last_;
  std::unordered_map<const c10::GeneratorImpl*, at::Generator> copies_;
};

}  // namespace zr::host::model
