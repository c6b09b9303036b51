// The key of the communicator "shm", also of its libraries for devices (plugins/comm_cuda_ipc), and the capabilities of
// every communicator that does all operations on host memory itself, in rank order (also plugins/comm_mpi).
#pragma once

#include "zr/communicator.hpp"

namespace shm {

inline constexpr zr_key kStagingKey =
    zr::key_bytes("staging_bytes", "\"4MiB\"", 262144, 1e12, "buffer for data that peers cannot read in place");

inline zr_comm_caps capabilities() {
  zr_comm_caps caps{};
  caps.flags = ZR_COMM_RANK_ORDERED | ZR_COMM_UPCAST | ZR_COMM_ACCUMULATE | ZR_COMM_ASYNC;
  for (uint32_t op = ZR_ALL_REDUCE; op <= ZR_BARRIER; ++op) caps.ops |= uint64_t{1} << op;
  for (int dtype = ZR_F32; dtype <= ZR_I64; ++dtype) caps.dtypes |= uint64_t{1} << dtype;
  caps.reduces = 1u << ZR_SUM | 1u << ZR_MIN | 1u << ZR_MAX;
  caps.device_types = zr::kCpuOnly;
  return caps;
}

}  // namespace shm
