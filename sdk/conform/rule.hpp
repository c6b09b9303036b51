// The rules that a plug-in must follow: numbered, one sentence and one check each.
#pragma once

#include <span>
#include <string_view>
#include <vector>

namespace zr::conform {

class Case;

/// What a rule needs before it can be checked. A rule of one level is skipped if a gate of an earlier level failed.
enum class Level {
  file,      // reads the file without running it
  load,      // loads the library
  module,    // reads its tables
  create,    // creates an instance
  component  // uses the instances of a component
};

struct Rule {
  std::string_view id;        // "ZR-O04": stable, never reused
  std::string_view role;      // the rule applies to components of this role; "": to every role or to the library
  std::string_view sentence;  // what conforming plug-ins do
  void (*check)(Case&);       // returns if the rule holds; throws Failure or Skipped (case.hpp)
  Level level = Level::component;
  bool gate = false;          // the rules of later levels need it
  bool per_component = true;  // one case for each component of the library; else one for the library
};

/// All rules, in the order in which they are checked and listed.
const std::vector<Rule>& rules();
/// ZR-L01 to L10: the file, its symbols and tables.
std::span<const Rule> load_rules();
/// ZR-L11 and up: the life of instances; ZR-H: structs of other versions, services.
std::span<const Rule> module_rules();
/// ZR-P: what a plug-in leaves alone in its process.
std::span<const Rule> process_rules();
/// ZR-O01 to O07: descriptions, memory, cuts.
std::span<const Rule> optimizer_rules();
/// ZR-O08 to O17: values, completions, errors.
std::span<const Rule> optimizer_value_rules();
/// ZR-O18 to O23: calls with several parameters, sums over parameters, globals.
std::span<const Rule> optimizer_slice_rules();
/// ZR-O24: streams.
std::span<const Rule> optimizer_device_rules();
/// ZR-O25 to O31: local gradients.
std::span<const Rule> local_gradients_rules();
/// ZR-S01 to S06: plans.
std::span<const Rule> strategy_plan_rules();
/// ZR-S10 to S21: a simulated job.
std::span<const Rule> strategy_step_rules();
/// ZR-S22: streams.
std::span<const Rule> strategy_device_rules();
/// ZR-C01 to C10: results of collectives.
std::span<const Rule> communicator_rules();
/// ZR-C11 to C23: completions, abort, close, optional functions.
std::span<const Rule> collective_rules();
/// ZR-C24: the bytes that a communicator plans.
std::span<const Rule> communicator_plan_rules();
/// ZR-C25 to C31: inexact collectives.
std::span<const Rule> communicator_inexact_rules();
/// ZR-T01 to T05: capabilities, bytes.
std::span<const Rule> offload_rules();
/// ZR-T06 and up: completions, errors, space, optional functions.
std::span<const Rule> offload_completion_rules();

/// The rule with this id, or null.
const Rule* find_rule(std::string_view id);

}  // namespace zr::conform
