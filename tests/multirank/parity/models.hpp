// The models of the parity tests by name.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "multirank/parity/model.hpp"

namespace parity {

/// Seeds libtorch's generator, then builds a model: "everything", "dropout", "divergent", "tiny", "recurrent", "wide",
/// "millions", "ample", "gpt", "convolutional", or one of kOneFeature.
std::shared_ptr<Model> make(const std::string& name, uint64_t seed);

/// Moves the model's parameters and buffers to the device (device.hpp), as `dtype` if they are floating-point.
void move(Model& model, at::ScalarType dtype);
/// Seeds libtorch's generators of the CPU and of the device.
void seed(uint64_t seed);

}  // namespace parity
