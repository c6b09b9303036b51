// Runs the recorded operators of a constructor, with one parameter in memory at a time.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "model/model.hpp"
#include "model/recorded_operator.hpp"

namespace zr::host::model {

/// Gives placeholders memory while operators use them. A parameter that fills a storage in row-major fp32 uses the
/// staging memory while consecutive operators use it; if an operator uses several, the others get separate memory. The
/// storage of other parameters has memory from its first operator to its last one. All other storages get memory for
/// good. All ranks call the same functions in the same order.
class Replay {
 public:
  using Tensors = std::vector<std::pair<std::string, at::Tensor>>;
  /// The tensors of the model, with their names.
  struct Registered {
    const Tensors& parameters;
    const Tensors& buffers;
  };
  /// `registered` and `memory` must outlive the object. If not `runs_operators`, store() gets the values elsewhere.
  Replay(const Registered& registered, const Model::ConstructMemory& memory, bool runs_operators);
  /// Notes which operator uses a storage last, before the first run().
  void prepare(const std::vector<RecordedOperator>& operators);
  /// Runs one operator, in the order of prepare().
  void run(RecordedOperator& recorded, std::size_t index);
  /// Stores the parameters that still have memory, and zeros for those that no operator used.
  void finish();
  /// Gives a storage that no operator used memory for good.
  static void complete(c10::StorageImpl& storage);
  /// True if store() gets the values of a parameter on the storage, which has no memory afterwards.
  bool stores(const c10::StorageImpl* storage) const { return staged_.count(storage) || parts_.count(storage); }

 private:
  // Parameters that do not fill their storage in row-major fp32.
  struct Parts {
    std::vector<uint32_t> params;
    at::DataPtr memory;
    bool stored = false;
  };
  void provide(const RecordedOperator& recorded);
  void provide_staged(Placeholder& placeholder, uint32_t param, std::vector<Placeholder*>& in_use);
  void provide_parts(Placeholder& placeholder, Parts& parts);
  void execute(const RecordedOperator& recorded);
  void take_result(const at::Tensor& result, const at::Tensor& computed);
  void store_and_detach(Placeholder* placeholder);
  void detach_all();
  void store_parts(Parts& parts);
  [[noreturn]] void fail(const RecordedOperator& recorded, const std::string& reason) const;

  const Registered registered_;
  const Model::ConstructMemory& memory_;
  const bool runs_operators_;
  std::unordered_map<const c10::StorageImpl*, uint32_t> staged_;
  std::unordered_map<const c10::StorageImpl*, Parts> parts_;
  std::unordered_map<std::size_t, std::vector<Parts*>> last_uses_;  // by operator; in the order of the parameters
  RandomReplay random_;
  const Placeholder* overwritten_ = nullptr;  // by the current operator, completely
  std::vector<Placeholder*> attached_;        // staged parameters with memory
  std::vector<at::DataPtr> extra_memory_;     // separate memory of the others
  int64_t extra_bytes_ = 0;
  std::unordered_set<uint32_t> stored_;
};

}  // namespace zr::host::model
