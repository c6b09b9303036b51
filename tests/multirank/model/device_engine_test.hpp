// For tests of training on the simulated accelerator of tests/support/sim_device.
#pragma once

#include <cstdlib>
#include <string>

#include "support/engine_test.hpp"

namespace engine_tests {

inline const std::string kSimLibrary = ZR_BUILD_DIR "/tests/devices/libzr_sim_device.so";
inline const std::string kDevice = " job.device=sim job.device_library=" + kSimLibrary;

// Jobs find the optimizers for the device, so that one rank keeps its training state there.
class DeviceEngineTest : public EngineTest {
 protected:
  void SetUp() override {
    EngineTest::SetUp();
    ::setenv("ZR_PLUGIN_PATH", ZR_BUILD_DIR "/tests/plugins", 1);
  }
};

}  // namespace engine_tests
