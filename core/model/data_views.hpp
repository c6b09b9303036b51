// Detects writes through tensors that `data()` made from a parameter; the parameter's own version does not count them.
#pragma once

#include <torch/types.h>

#include <memory>

namespace zr::host::model {

/// Watches the tensors that tensor.data() and tensor.variable_data() make on one storage, from now until it is
/// destroyed. Such a tensor has its own version counter, shared with its views; this class keeps references to the
/// counters, not to the tensors. data() may be called on any thread, methods of this class on one thread at a time. The
/// first object in a process installs the hooks (ProcessSetup::watch_tensor_data()).
class DataViews {
 public:
  explicit DataViews(const c10::Storage& storage);
  ~DataViews();
  DataViews(const DataViews&) = delete;
  /// True if such a tensor or a view of it was written to in place since the last call.
  bool written();

 private:
  struct Counters;
  const c10::StorageImpl* const storage_;  // only used as a key
  std::shared_ptr<Counters> counters_;
};

}  // namespace zr::host::model
