#include "nvidia_device.hpp"

#include <glob.h>

#include <string>

namespace cpu {

bool has_nvidia_device(const char* folder) {
  glob_t found{};  // not nvidiactl, nvidia-uvm
  const int result = ::glob((std::string(folder) + "/nvidia[0-9]*").c_str(), GLOB_NOSORT, nullptr, &found);
  ::globfree(&found);
  return result == 0;
}

}  // namespace cpu
