// The random generators that a block draws from, so that it draws the same numbers when it runs again.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>
#include <torch/types.h>

#include <vector>

#include "model/operator_observer.hpp"

namespace zr::host::model {

/// Made before the first run of a block: keeps the states of the default generators of some devices, and of each
/// generator that the block passes to an operator. The default generators are restored only if the block may have drawn
/// from them, so blocks without random operators do not disturb other threads that draw.
class BlockDraws {
 public:
  explicit BlockDraws(const std::vector<at::Device>& devices);

  /// Called before each operator of the first run. Does not throw.
  void begins(const OperatorCall& call);
  /// The first run is over.
  void end();

  /// While it exists, the generators continue from the states at the first run. Afterwards they have the states from
  /// before it.
  class Repeated {
   public:
    explicit Repeated(const BlockDraws& draws);
    ~Repeated();
    Repeated(const Repeated&) = delete;
    /// Restores the generators. Throws UserError if the second run did not leave them as the first run did: then
    /// another thread drew during one of the runs, or the block itself drew other numbers. Not for generators that the
    /// block made.
    void finish();

   private:
    const BlockDraws& draws_;
    struct State {
      at::Generator generator;
      torch::Tensor before;
    };
    std::vector<State> states_;  // empty once restored
  };

 private:
  using WeakGenerator = c10::weak_intrusive_ptr<c10::GeneratorImpl>;
  struct Drawn {
    WeakGenerator generator;      // each run of the block makes its own of those that it makes
    torch::Tensor before, after;  // states at the begin and at the end of the first run
    bool by_operators = false;    // the block's operators drew, so the state after a run is known
  };
  std::vector<Drawn> generators_;  // the default generators first
  std::size_t defaults_ = 0;
};

}  // namespace zr::host::model
