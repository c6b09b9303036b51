// For tests of training on the simulated accelerator of tests/simulators/sim_device.
#pragma once

#include <cstdlib>
#include <iostream>
#include <string>

#include "support/engine_test.hpp"

namespace engine_tests {

inline const std::string kSimLibrary = ZR_BUILD_DIR "/tests/devices/libzr_sim_device.so";
inline const std::string kDevice = " job.device=sim job.device_library=" + kSimLibrary;
// The simulated NCCL.
inline const std::string kNccl = kDevice +
                                 " communicator=nccl communicator.nccl.staging_bytes=64KiB"
                                 " communicator.nccl.library=" ZR_BUILD_DIR "/tests/devices/nccl/libnccl.so.2";

// Jobs find the optimizers for the device, so that one rank keeps its training state there.
class DeviceEngineTest : public EngineTest {
 protected:
  void SetUp() override {
    EngineTest::SetUp();
    ::setenv("ZR_PLUGIN_PATH", ZR_BUILD_DIR "/tests/plugins", 1);
  }
};

/// Prints the line "result LOSS HASH" on rank 0: the loss of the last step, and the hash of the weights. Collective.
inline void print_result(Run& run) {
  const std::string hash = run.engine->weights_hash();
  std::cout.precision(17);
  if (run.engine->rank() == 0) std::cout << "result " << run.engine->last_loss() << " " << hash << std::endl;
}

}  // namespace engine_tests
