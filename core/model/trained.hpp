// Which of this process's tensors some engine trains.
#pragma once

#include <c10/core/TensorImpl.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>

namespace zr::host {

class TorchModel;

/// One list per process. [any]
class Trained {
 public:
  struct Place {
    TorchModel* model;
    uint32_t param;
  };
  /// False if an engine trains the tensor already.
  static bool add(const c10::TensorImpl* parameter, Place place);
  static void remove(const c10::TensorImpl* parameter);
  /// The model and number of a parameter; nothing for another tensor.
  static std::optional<Place> find(const c10::TensorImpl* parameter);

 private:
  std::mutex mutex_;
  std::map<const c10::TensorImpl*, Place> places_;
  static Trained& all();
};

}  // namespace zr::host
