// The tensors of this process that engines train.
#pragma once

#include <c10/core/TensorImpl.h>

#include <cstdint>
#include <map>
#include <optional>

#include "zr/mutex.hpp"

namespace zr::host::model {

class TorchModel;

/// One registry per process. [any]
class ParameterRegistry {
 public:
  struct ParamRef {
    TorchModel* model;
    uint32_t param;
  };
  /// Returns false if an engine trains the tensor already.
  static bool add(const c10::TensorImpl* parameter, ParamRef ref);
  static void remove(const c10::TensorImpl* parameter);
  /// The model and index of a parameter; nullopt for another tensor.
  static std::optional<ParamRef> find(const c10::TensorImpl* parameter);

 private:
  Mutex mutex_;
  std::map<const c10::TensorImpl*, ParamRef> params_ ZR_GUARDED_BY(mutex_);
  static ParameterRegistry& instance();
};

}  // namespace zr::host::model
