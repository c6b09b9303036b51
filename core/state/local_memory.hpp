// The memory of a rank for steps with local gradients, which it holds from the first such step on.
#pragma once

#include <cstdint>
#include <vector>

#include "job/step_context.hpp"
#include "plan/local_gradients.hpp"

namespace zr::host::state {

/// Training thread only, except view() and gradient(). Until it is allocated, budgets count it as held
/// (Ledger::reserve()), and views have a size but no address.
class LocalMemory {
 public:
  /// Both arguments outlive the object. Allocates nothing.
  LocalMemory(const job::RankContext& context, const plan::LocalPlan& plan);
  ~LocalMemory();
  LocalMemory(const LocalMemory&) = delete;

  /// Allocates zeroed memory for the arrays that ranks do not share, unless it is allocated. If this fails, call
  /// free_own().
  void allocate_own();
  /// Allocates zeroed memory for one array, unless it is allocated. Collective on the ranks of a host if the array is
  /// shared; find out whether all ranks have such an array before the next one, for which the others would wait.
  void allocate(std::size_t array);
  /// Frees what allocate_own() has allocated.
  void free_own();
  /// Frees all arrays; on all ranks of a host, or they no longer agree about what to allocate. The communicator keeps
  /// shared memory until it is closed.
  void free();

  /// Which elements of a parameter an array has: all, or those that this rank serves.
  enum class Elements { all, served };
  /// A parameter's elements in an array of the plan. Those of a shared array cannot be written.
  zr_view view(std::size_t array, Elements elements, uint32_t param) const;
  /// This rank's gradients of a parameter.
  zr_view gradient(uint32_t param) const { return view(0, Elements::all, param); }
  /// The messages of the exchange.
  zr_view scratch() const;
  bool is_shared(std::size_t array) const { return plan_.arrays[array].shared; }
  /// All elements of a parameter in a shared array, to write them.
  zr_view writable(std::size_t array, uint32_t param) const;

 private:
  struct Memory {
    void* address = nullptr;       // to write
    const void* reader = nullptr;  // to read; null: `address`
  };
  void free_all(bool shared);
  zr_view view_at(void* begin, Elements elements, uint32_t param) const;

  const job::RankContext context_;
  const plan::LocalPlan& plan_;
  std::vector<Memory> memory_;  // by array of the plan
};

}  // namespace zr::host::state
