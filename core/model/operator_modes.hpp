// The modes of a thread and of the process that decide what operators compute.
#pragma once

#include <c10/core/AutogradState.h>
#include <c10/core/Device.h>
#include <c10/util/typeid.h>
#include <torch/types.h>

#include <vector>

namespace zr::host::model {

/// Grad and inference mode; autocast with its dtypes, cache and nesting; default dtype, deterministic algorithms,
/// oneDNN. The last three are those of the process: restore() changes them only if they differ.
class OperatorModes {
 public:
  /// The modes of the calling thread, with autocast on the types of these devices.
  static OperatorModes current(const std::vector<at::Device>& devices);
  /// Sets these modes on the calling thread.
  void restore() const;
  /// A copy of these modes in which autocast neither reads nor fills its cache.
  OperatorModes without_cast_cache() const;

 private:
  struct Autocast {
    at::DeviceType type;
    bool enabled;
    at::ScalarType dtype;
  };
  c10::AutogradState autograd_ = c10::AutogradState::get_tls_state();
  std::vector<Autocast> autocast_;
  bool cast_cache_ = true;
  int nesting_ = 0;
  caffe2::TypeMeta default_dtype_;
  bool deterministic_ = false, warn_only_ = false, onednn_ = true;
};

}  // namespace zr::host::model
