// The device of the parity tests. Separate from models.hpp, so that files without models do not include libtorch.
#pragma once

#include <string>

namespace parity {

/// Makes the device that the environment variable ZR_PARITY_DEVICE names the device of the models ("cuda", "sim"),
/// after loading its backend, the library ZR_PARITY_LIBRARY. Without the variable, the models compute on the CPU. Call
/// it before other uses of libtorch.
void choose_device();
/// Overrides that make an engine use that device; "" for the CPU.
std::string device_overrides();

}  // namespace parity
