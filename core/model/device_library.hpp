// Loads the library with libtorch's backend for a device. This header needs no libtorch.
#pragma once

#include <string>

namespace zr::host::model {

/// Loads `library` (job.device_library), or, if it is empty, the part of libtorch for the type of `device`
/// (job.device, "cuda" or "cuda:1"), unless `device` is the CPU. Call it before other uses of libtorch, which decides
/// at its first use of a device type that there is no backend. Throws UserError or EnvironmentError with the remedy.
void load_device_library(const std::string& device, const std::string& library);

}  // namespace zr::host::model
