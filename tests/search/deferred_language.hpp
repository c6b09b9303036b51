// Random constructors, as programs of statements: what zr::deferred must build as libtorch does.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "support/program_search.hpp"

namespace deferred_search {

/// A row of statements() with four numbers, which choose tensors, shapes and values.
struct Statement {
  std::size_t kind;
  uint32_t a, b, c, d;
};

/// A defect that an execution has on purpose, to show that the search finds it.
enum class Planted {
  none,
  late_metadata,     // an in-place operator runs after the change of shape that follows it
  lost_view,         // a view is a copy
  no_set_data,       // set_data() does nothing
  no_set,            // set_() does nothing
  no_reseed,         // manual_seed() does nothing
  shared_clone,      // clone() of a generator returns the generator
  free_hand_draw,    // a draw by hand does not advance the generator
  default_for_own,   // the program's own generator is ignored
  no_restore,        // a saved random state is not restored
  dropped_values,    // torch::tensor() of a vector has zeros
  dropped_pointers,  // a write through a pointer is lost
  kept_nothing,      // fill_() and copy_() of a part clear the rest of the storage
  late_input,        // an ordinary input is read after the change that follows
  no_out_resize,     // out= has the values of the wrong operator
  swapped_results,   // results of an operator are swapped
  lost_alias,        // an operator that returns its argument returns a copy
  fixed_dtype,       // set_default_dtype() does nothing
  lost_list,         // an operator on a list changes only its first tensor
};

/// The variables of one execution of a program.
class Execution {
 public:
  explicit Execution(Planted planted = Planted::none);
  ~Execution();
  Execution(const Execution&) = delete;
  /// Throws what libtorch throws.
  void run(const Statement& statement);
  /// Runs what a planted defect has delayed.
  void flush();

  at::Tensor& tensor(uint32_t n) { return tensors[n % tensors.size()]; }
  void push(const at::Tensor& tensor);
  /// Adds a view.
  void push_view(const at::Tensor& view) { push(planted == Planted::lost_view ? view.clone() : view); }
  /// Runs an operator that writes to `tensor`.
  void write(const std::function<void()>& op);
  at::Generator generator(uint32_t n);

  const Planted planted;
  std::vector<at::Tensor> tensors;
  std::vector<at::Tensor> ordinary;  // made before the constructor
  std::vector<at::Generator> generators;
  std::vector<at::Tensor> states;  // of the default generator
  std::vector<std::pair<std::string, at::Tensor>> parameters, buffers;
  std::vector<uint64_t> drawn;  // what the program has seen

 private:
  std::function<void()> delayed_;
};

/// A kind of statement.
struct Row {
  std::string name;
  uint32_t weight;
  bool is_change;  // of a shape, or of an ordinary tensor: what a delayed operator waits for
  std::function<void(Execution&, const Statement&)> run;
};
using Rows = std::vector<Row>;
const Rows& rows();
void add_factories(Rows& rows);
void add_operators(Rows& rows);
void add_views(Rows& rows);
void add_random(Rows& rows);
void add_registrations(Rows& rows);

/// What the executions of a search had in common.
struct Tally {
  std::size_t programs = 0, accepted = 0;       // accepted: by an engine, after an ordinary construction
  std::map<std::string, std::size_t> rejected;  // of the accepted ones, by zr::deferred: its message
};

/// The language. Each program is built ordinarily and within zr::deferred, which has the planted defect. A rejection by
/// zr::deferred is no difference.
zr::test::ProgramLanguage<Statement> language(Planted planted, Tally& tally);

}  // namespace deferred_search
