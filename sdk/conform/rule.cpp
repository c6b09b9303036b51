#include "conform/rule.hpp"

namespace zr::conform {

const std::vector<Rule>& rules() {
  static const auto* all = [] {  // never destroyed
    auto* const collected = new std::vector<Rule>;
    for (const auto part :
         {load_rules(), module_rules(), process_rules(), optimizer_rules(), optimizer_value_rules(),
          optimizer_slice_rules(), optimizer_device_rules(), local_gradients_rules(), strategy_plan_rules(),
          strategy_step_rules(), strategy_device_rules(), communicator_rules(), collective_rules(),
          communicator_plan_rules(), communicator_inexact_rules(), offload_rules(), offload_completion_rules()})
      collected->insert(collected->end(), part.begin(), part.end());
    return collected;
  }();
  return *all;
}

const Rule* find_rule(std::string_view id) {
  for (const Rule& rule : rules())
    if (rule.id == id) return &rule;
  return nullptr;
}

}  // namespace zr::conform
