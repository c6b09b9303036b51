// The buffers of a model, such as the running statistics of BatchNorm.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "zr/abi/base.h"

namespace zr::host::model {

/// A named buffer: raw bytes, valid as long as the model.
struct ModelBuffer {
  std::string name;
  void* data;
  int64_t bytes;
  std::string dtype;  // as safetensors names it: "F32"
  std::vector<int64_t> shape;
};

/// Training thread only.
class BufferSource {
 public:
  virtual ~BufferSource() = default;
  /// In the model's order, without empty ones. If the model is on a device, `data` is host memory with a copy of the
  /// buffer's current value: after changes to it, call write_buffers().
  virtual std::vector<ModelBuffer> buffers() = 0;
  /// Writes the memory that the last buffers() returned back to the buffers. Without effect for a model on the CPU.
  virtual void write_buffers() = 0;
  /// The buffers without elements: they have no values, but weights of other programs may list them. `data` is null.
  virtual std::vector<ModelBuffer> empty_buffers() const = 0;
  /// Converts the floating-point buffers of train.cast_buffers to that type.
  virtual void convert_buffers(zr_dtype dtype) = 0;
};

}  // namespace zr::host::model
