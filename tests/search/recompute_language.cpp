#include "search/recompute_language.hpp"

namespace zr::test::recompute {

const std::array<const char*, kKinds> kNames{"tanh",
                                             "sigmoid",
                                             "gelu",
                                             "softmax",
                                             "square",
                                             "add",
                                             "multiply",
                                             "matmul",
                                             "where",
                                             "clone",
                                             "select_largest",
                                             "fill_own",
                                             "from_blob",
                                             "transpose",
                                             "expand",
                                             "slices",
                                             "reshape",
                                             "linear",
                                             "scale",
                                             "matmul_transposed",
                                             "layer_norm",
                                             "batch_norm",
                                             "read_buffer",
                                             "turn_buffer",
                                             "no_grad",
                                             "detach",
                                             "function",
                                             "gradient",
                                             "dropout",
                                             "random",
                                             "own_random",
                                             "own_random_nothing",
                                             "random_of_block",
                                             "multiply_in_place",
                                             "add_in_place",
                                             "tanh_in_place",
                                             "view_in_place",
                                             "update_buffer",
                                             "assign_buffer",
                                             "change_parameter",
                                             "hook",
                                             "parameter_hook",
                                             "clear_casts",
                                             "other_thread_draws",
                                             "then_change_parameter",
                                             "then_change_value",
                                             "then_change_buffer",
                                             "then_draw",
                                             "backward_twice",
                                             "backward_in_autocast",
                                             "block",
                                             "autocast",
                                             "close"};

namespace {
bool is_rare(Kind kind) {
  switch (kind) {
    case Kind::gradient:
    case Kind::assign_buffer:
    case Kind::change_parameter:
    case Kind::other_thread_draws:
    case Kind::then_change_parameter:
    case Kind::then_change_value:
    case Kind::then_change_buffer:
    case Kind::multiply_in_place:
    case Kind::add_in_place:
    case Kind::tanh_in_place:
    case Kind::view_in_place: return true;
    default: return false;
  }
}
}  // namespace

Program generate(SearchRandom& random) {
  Program program;
  const std::size_t length = 5 + random.below(14);
  while (program.size() < length) {
    Kind kind = static_cast<Kind>(random.below(kKinds));
    if (random.chance(25)) kind = random.chance(60) ? Kind::block : Kind::close;
    if (random.chance(6)) kind = Kind::autocast;
    if (is_rare(kind) && random.chance(65)) continue;
    const auto number = [&] { return static_cast<uint32_t>(random.below(60)); };
    program.push_back({kind, number(), number(), number()});
  }
  return program;
}

std::string print(const Statement& statement) {
  std::string text = kNames[static_cast<std::size_t>(statement.kind)];
  for (const uint32_t number : {statement.a, statement.b, statement.c}) text += " " + std::to_string(number);
  return text;
}

}  // namespace zr::test::recompute
