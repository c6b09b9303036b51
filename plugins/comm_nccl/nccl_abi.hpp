// The part of NCCL's C interface that this plug-in calls, of NCCL 2.14 and 2.19; later versions only add to it. It is
// declared here so that neither the build nor the tests need NCCL; cuda_device.cu compares it with nccl.h where that is
// found.
#pragma once

#include <cstddef>

namespace nccl {

/// ncclResult_t.
enum Result : int { kSuccess = 0, kInvalidArgument = 4, kInvalidUsage = 5, kRemoteError = 6, kInProgress = 7 };

/// ncclUniqueId: rank 0 makes it, all ranks connect with it.
struct UniqueId {
  char internal[128];
};

/// ncclConfig_t of 2.14.
struct Config {
  size_t size = sizeof(Config);
  unsigned magic = 0xcafebeef;
  unsigned version = 21400;
  int blocking = 0;  // calls return kInProgress in place of waiting
};

using Comm = struct OpaqueComm*;       // ncclComm_t
inline constexpr int kUint8 = 1;       // ncclUint8: all data is communicated as bytes
inline constexpr int kOldest = 21400;  // the oldest version with calls that do not wait

/// The functions of NCCL's library; streams are cudaStream_t.
struct Functions {
  Result (*get_version)(int* version);
  Result (*get_unique_id)(UniqueId* id);
  Result (*comm_init_rank_config)(Comm* comm, int world, UniqueId id, int rank, Config* config);
  Result (*comm_finalize)(Comm comm);
  Result (*comm_destroy)(Comm comm);
  Result (*comm_abort)(Comm comm);
  Result (*comm_get_async_error)(Comm comm, Result* state);
  const char* (*get_error_string)(Result result);
  const char* (*get_last_error)(Comm comm);
  Result (*group_start)();
  Result (*group_end)();
  Result (*send)(const void* data, size_t count, int type, int peer, Comm comm, void* stream);
  Result (*recv)(void* data, size_t count, int type, int peer, Comm comm, void* stream);
  Result (*all_gather)(const void* part, void* all, size_t count, int type, Comm comm, void* stream);
  Result (*broadcast)(const void* from, void* to, size_t count, int type, int root, Comm comm, void* stream);
  // Of 2.19; null in older ones.
  Result (*comm_register)(Comm comm, void* memory, size_t bytes, void** handle);
  Result (*comm_deregister)(Comm comm, void* handle);
};

}  // namespace nccl
