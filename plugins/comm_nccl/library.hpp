// NCCL's library, which is loaded when the first communicator is opened.
#pragma once

#include <string>

#include "nccl_abi.hpp"

namespace nccl {

/// Loads the library, which stays loaded, and checks its version. `name`: a file name that the dynamic linker finds, or
/// an absolute path. If libtorch has loaded the library already, the process uses that copy. Throws ZR_UNSUPPORTED.
Functions load_library(const std::string& name);

}  // namespace nccl
