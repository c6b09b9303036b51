// Programs of forward code with blocks of zr::checkpoint, for search_recompute.cpp.
#pragma once

#include <torch/torch.h>

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "support/program_search.hpp"

namespace zr::test::recompute {

/// What a statement does. The values of a program are matrices of 4 x 4.
enum class Kind : uint8_t {
  // make a value from values
  tanh,
  sigmoid,
  gelu,
  softmax,
  square,
  add,
  multiply,
  matmul,
  where,
  clone,
  select_largest,
  fill_own,  // tensors of torch::zeros and torch::empty
  from_blob,
  // views
  transpose,
  expand,
  slices,
  reshape,
  // parameters and buffers
  linear,
  scale,
  matmul_transposed,
  layer_norm,
  batch_norm,
  read_buffer,
  turn_buffer,
  // without gradients; a Function of the program; gradients of gradients
  no_grad,
  detach,
  function,
  gradient,
  // random
  dropout,
  random,
  own_random,
  own_random_nothing,
  random_of_block,
  // change tensors in place
  multiply_in_place,
  add_in_place,
  tanh_in_place,
  view_in_place,
  update_buffer,
  assign_buffer,
  change_parameter,
  // other effects
  hook,
  parameter_hook,
  clear_casts,
  other_thread_draws,
  // between forward and backward
  then_change_parameter,
  then_change_value,
  then_change_buffer,
  then_draw,
  backward_twice,
  backward_in_autocast,
  // structure: end with `close`
  block,
  autocast,
  close,
};
constexpr int kKinds = static_cast<int>(Kind::close) + 1;
extern const std::array<const char*, kKinds> kNames;

struct Statement {
  Kind kind;
  uint32_t a, b, c;
};
using Program = std::vector<Statement>;

Program generate(SearchRandom& random);
std::string print(const Statement& statement);

/// A fault in the execution with blocks: in a block's second run or elsewhere, statements of this kind behave wrongly.
using Fault = std::optional<Kind>;

/// What a program computed until it ended or threw.
struct Outcome {
  std::vector<std::pair<std::string, std::string>> results;  // name, bytes
  std::string error;                                         // empty: none
};
/// Runs three training steps, with blocks in zr::checkpoint or as they are.
Outcome run(const Program& program, bool checkpoint, Fault fault);

}  // namespace zr::test::recompute
