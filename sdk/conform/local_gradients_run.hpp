// A simulated job whose optimizer needs local gradients (zr/abi/draft/local_gradients.h): ranks are threads of this
// process, and make the calls of a step as the engine does.
#pragma once

#include <functional>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "conform/optimizer_run.hpp"
#include "conform/world.hpp"
#define ZR_NO_DRAFT_TAG
#include "zr/abi/draft/local_gradients.h"

namespace zr::conform {

/// The optimizer's functions for local gradients, or null.
const zr_local_gradients_api* local_gradients_of(const Instance& instance);

/// zr_optimizer_desc.needs of all parameters. Skips the rule if none needs local gradients.
uint32_t needs_of_local_optimizer(const OptimizerRun& run);

/// When an optimizer asks for local gradients.
struct FirstLocalStep {
  int64_t step = 1;
  int64_t local = 0;  // updates with local gradients that the states have had before
};

/// The step after the shortest warm-up, or that of a job which is resumed after its warm-up; nothing if the optimizer
/// never asks for local gradients. n_parameters: of the model.
std::optional<FirstLocalStep> first_local_step(const OptimizerRun& run, const zr_local_gradients_api& api,
                                               uint32_t n_parameters);
/// Makes the calls of two steps with local gradients in a job of one rank, if the optimizer needs them.
void use_local_gradients(const OptimizerRun& run, const Mode& mode);

/// A parameter of the model.
struct LocalParameter {
  std::string name;
  ParameterArrays::Layout layout;
  uint32_t index, group;  // index: in the model's order, with a frozen parameter
  Description description;
  std::vector<zr_served_range> ranges{};  // of all elements
  /// Whether a state has this flag: ZR_SLOT_RANK_PRIVATE, ZR_SLOT_UNSHARDED.
  bool is_private(std::size_t state) const;
  bool is_unsharded(std::size_t state) const;
};

struct LocalOptions {
  int world = 1;
  uint64_t ranges = 0;         // seed of the ranges that ranks serve; 0: the last rank serves all
  bool exact_scratch = false;  // of the planned size; else with space at its end
  bool longer_structs = false;
  std::optional<uint64_t> fail_at{};  // the collective from which on all fail
  zr_code code = ZR_COMM;
};

/// What the job starts with: parameters and states after some updates with reduced gradients.
struct LocalStart {
  /// Skips the rule if the optimizer needs no local gradients, or never asks for them.
  LocalStart(Case& test, int world, uint64_t ranges);
  FirstLocalStep first;
  KeyValues values, of_group_1;
  std::vector<LocalParameter> parameters;
  std::vector<ParameterArrays> arrays;  // by parameter
};

/// One rank. All functions are for the thread of the rank.
class LocalRank {
 public:
  struct Arrays {
    ParameterArrays own;  // grad: the local gradient
    std::vector<Array> private_states;
  };
  /// Creates an instance, and calls bind() and plan(). All arguments but the options live longer.
  LocalRank(Case& test, const LocalStart& start, const LocalOptions& options, World& world, int rank);
  LocalRank(const LocalRank&) = delete;
  int rank() const { return rank_; }
  const LocalStart& start() const { return start_; }
  const std::vector<Arrays>& arrays() const { return arrays_; }
  /// A new step with random gradients: gradients() and exchange() for these parameters. Fails if gradients() does.
  Answer exchange(const std::vector<std::size_t>& parameters);
  /// A new step with random gradients of all parameters; fails if a call fails.
  void exchange();
  /// Replaces all gradients by random ones, the same on all ranks, as exchange() should.
  void set_equal_gradients();
  /// step() for all elements of all parameters: those that this rank serves are its own, the others belong to others.
  void update();
  /// Fails if the unsharded states of elements that others serve differ from `before`, own.contents() of a parameter.
  void check_states_of_others(std::size_t parameter, const std::vector<std::string>& before) const;
  /// The bits of all gradients; of all private states.
  std::string gradients() const;
  std::string private_states() const;
  /// What exchange() may use, and what it has received so far, without reductions.
  const zr_exchange_plan& plan() const { return plan_; }
  uint64_t received() const { return port_.received; }
  /// A collective has failed on this rank.
  bool had_failure() const { return port_.failed; }
  const Array& scratch() const { return *scratch_; }
  void destroy();
  void check_host() const { run_->instance().check_host(); }

 private:
  struct Port {  // between the optimizer and its communicator
    zr_comm_ref inner;
    uint64_t received;
    bool failed;
  };
  static zr_code submit(void* port, const zr_coll* coll, zr_stream* stream, zr_done* done, zr_error* error);
  static zr_code progress(void* port, zr_error* error);
  void make_plan(bool exact_scratch);
  void ask_for_gradients();

  const LocalStart& start_;
  Mode mode_;
  int rank_, world_;
  TestHost host_;
  std::optional<OptimizerRun> run_;
  const zr_local_gradients_api* api_ = nullptr;
  Port port_;
  zr_collectives_api table_;
  std::vector<Arrays> arrays_;
  zr_exchange_plan plan_{};
  std::optional<Array> scratch_;
  int64_t step_;                           // the next one
  std::vector<int64_t> updates_, locals_;  // by parameter of the model
  std::vector<bool> begun_;                // by parameter
  std::mt19937_64 random_;                 // the same on all ranks
};

/// Runs `body` on all ranks at once. Throws the first Failure or Skipped of a rank.
void on_local_ranks(Case& test, const LocalStart& start, const LocalOptions& options,
                    const std::function<void(LocalRank&)>& body);

}  // namespace zr::conform
