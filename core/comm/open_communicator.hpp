// One communicator that a plug-in has opened, for host memory or for memory of a device: its functions with checks.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "base/error.hpp"
#include "plugin/plugin_host.hpp"
#include "zr/abi/communicator.h"
#include "zr/abi/communicator_extensions.h"

namespace zr::host::comm {

/// The bit of an operation, data type, reduction or device type in the masks of zr_comm_caps.
constexpr uint64_t bit(uint64_t i) { return uint64_t{1} << i; }

/// What the plug-in supports. Throws EnvironmentError if the engine cannot use it.
zr_comm_caps communicator_caps(const plugin::Instance& communicator);
/// Whether a plug-in with these capabilities performs the operation itself, and with rank-ordered sums unless the
/// operation is inexact; the engine composes all others. The same on every rank.
bool is_native(const zr_comm_caps& caps, const zr_coll& coll);

/// Calls are [use] unless marked otherwise. Functions that return a code fill *error.
class OpenCommunicator {
 public:
  /// Opens it; collective over the job. `plugin` must outlive it.
  OpenCommunicator(const plugin::Instance& plugin, int rank, int world, const zr_device& device);
  ~OpenCommunicator();  // [control]
  OpenCommunicator(const OpenCommunicator&) = delete;

  /// As zr_communicator_api::submit().
  zr_code submit(const zr_coll& coll, zr_stream* stream, zr_done* done, zr_error* error);
  zr_code progress(zr_error* error);  // ZR_OK if the plug-in has no such function
  void abort();                       // [any]

  /// Returns null if the plug-in has no allocator.
  void* mem_alloc(uint64_t bytes, uint64_t align);
  void mem_free(void* memory);  // ignores other memory
  /// Require that the plug-in has the shared-weights extension.
  std::pair<void*, const void*> shared_alloc(uint64_t bytes);  // writable and read-only address; collective
  void shared_free(void* writer);                              // takes the writable address

 private:
  std::string call_text(const char* call) const { return plugin_.call_text(call); }

  const plugin::Instance& plugin_;
  const zr_communicator_api* const api_;
  const zr_device device_;
  void* comm_ = nullptr;
  std::map<void*, zr_view> memory_;  // of mem_alloc(), by address
};

}  // namespace zr::host::comm
