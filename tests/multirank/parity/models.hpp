// The models of the parity tests by name.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "multirank/parity/model.hpp"

namespace parity {

/// Seeds libtorch's generator, then builds a model: "everything", "dropout", "divergent", "tiny", "recurrent", "wide",
/// "ample", or one of kOneFeature.
std::shared_ptr<Model> make(const std::string& name, uint64_t seed);

/// Makes the device that the environment variable ZR_PARITY_DEVICE names the device of the models ("cuda", "sim"),
/// after loading its backend, the library ZR_PARITY_LIBRARY. Without the variable, the models compute on the CPU. Call
/// it before other uses of libtorch.
void choose_device();
/// Overrides that make an engine use that device; "" for the CPU.
std::string device_overrides();
/// Moves the model's parameters and buffers to the device, as `dtype` if they are floating-point.
void move(Model& model, at::ScalarType dtype);
/// Seeds libtorch's generators of the CPU and of the device.
void seed(uint64_t seed);

}  // namespace parity
