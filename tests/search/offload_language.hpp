// Programs of differentiable operators whose saved tensors are offloaded, for search_offload.cpp.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "support/program_search.hpp"

namespace zr::test::offload {

/// The arguments of an operator: two matrices of 4 x 4, and a parameter of the same size.
struct Arguments {
  torch::Tensor a, b, w;
  uint32_t number;
};
/// A differentiable operator, or a few: its result has any shape. One that changes its arguments in place returns them.
struct Operator {
  const char* name;
  std::function<torch::Tensor(const Arguments& arguments)> call;
};
const std::vector<Operator>& operators();

struct Statement {
  uint32_t kind, a, b, c;  // kind: of operators()
};
using Program = std::vector<Statement>;

Program generate(SearchRandom& random);
std::string print(const Statement& statement);

/// What goes wrong where tensors are offloaded.
struct Fault {
  enum class What : uint8_t { nothing, record, strides, dtype, version } what = What::nothing;
  uint32_t kind = 0;  // `record`: those of this operator
};

/// What a program computed until it ended or threw.
struct Outcome {
  std::vector<std::pair<std::string, std::string>> results;  // name, bytes
  std::string error;                                         // empty: none
  std::vector<uint32_t> stored;  // operators whose saved tensors were restored from the store
};
/// Runs forward, drops all values but the loss, and runs backward.
Outcome run(const Program& program, bool offloaded, Fault fault = {});

}  // namespace zr::test::offload
