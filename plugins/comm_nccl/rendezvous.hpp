// How the ranks find each other, through the job's store.
#pragma once

#include <cstdint>

#include "gpu_device.hpp"
#include "nccl_abi.hpp"
#include "zr/abi/communicator.h"

namespace nccl {

/// What all ranks have in common.
struct Meeting {
  UniqueId id;
  int64_t staging_bytes;  // the least of all ranks
};

/// Waits for all ranks; collective. Throws ZR_UNSUPPORTED on all of them if two use one device.
Meeting meet(const zr::Host& host, const zr_comm_open& options, const GpuDevice& device, int64_t staging_bytes,
             const Functions& nccl);

/// After meet(): throws ZR_COMM with the reason if the job has failed.
void require_job(const zr::Host& host, const zr_comm_open& options);

}  // namespace nccl
