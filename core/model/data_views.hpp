// Writes through tensors that `data()` made of a parameter, which the parameter's own version does not count.
#pragma once

#include <torch/types.h>

#include <memory>

namespace zr::host {

/// Watches the tensors that tensor.data() and tensor.variable_data() make on one storage, from now until it is
/// destroyed. They have a version counter of their own, shared with their views; copies of the counters are kept, not
/// of the tensors. Calls of data() may come on any thread, those of methods on one at a time. The first object in a
/// process puts hooks around libtorch's own (at::impl::SetVariableHooks).
class DataViews {
 public:
  explicit DataViews(const c10::Storage& storage);
  ~DataViews();
  DataViews(const DataViews&) = delete;
  /// One of them, or a view of one, was written to in place since the last call.
  bool written();

 private:
  struct Counters;
  const c10::StorageImpl* const storage_;  // as a key
  std::shared_ptr<Counters> counters_;
};

}  // namespace zr::host
