// What a library for a device opens (plugins/comm_cuda_ipc, plugins/comm_mpi): a communicator for host memory or for
// memory of the device.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "zr/abi/communicator.h"
#include "zr/base.hpp"

namespace shm {

/// One open communicator, for host memory or for memory of a device. Threads as in zr_communicator_api.
template <class OnHost, class OnDevice>
class HostOrDevice {
 public:
  static constexpr uint64_t most_open = 2;  // that a job opens: one for each kind of memory

  /// Throws PluginError. `arguments`: of both constructors.
  template <class... Arguments>
  HostOrDevice(const zr::Host& host, const zr_comm_open& open, const Arguments&... arguments) {
    if (open.device.type == ZR_DEVICE_CPU)
      host_ = std::make_unique<OnHost>(host, open, arguments...);
    else
      device_ = std::make_unique<OnDevice>(host, open, arguments...);
  }

  void submit(const zr_coll& coll, zr_stream* stream, zr_done* done) {
    host_ ? host_->submit(coll, stream, done) : device_->submit(coll, stream, done);
  }
  void progress() { host_ ? host_->progress() : device_->progress(); }
  zr_view mem_alloc(uint64_t bytes, uint64_t align, uint32_t flags) {
    return host_ ? host_->mem_alloc(bytes, align, flags) : device_->mem_alloc(bytes, align, flags);
  }
  void mem_free(const zr_view& memory) noexcept { host_ ? host_->mem_free(memory) : device_->mem_free(memory); }
  /// Host memory only.
  void shared_alloc(uint64_t bytes, void** writer, const void** reader) {
    if (!host_)
      throw zr::PluginError(ZR_UNSUPPORTED,
                            std::string("communicator '") + OnHost::id + "' shares weights in host memory only");
    host_->shared_alloc(bytes, writer, reader);
  }
  void shared_free(void* writer) noexcept {
    if (host_) host_->shared_free(writer);
  }
  void abort() noexcept { host_ ? host_->abort() : device_->abort(); }

 private:
  std::unique_ptr<OnHost> host_;
  std::unique_ptr<OnDevice> device_;  // one of the two is null
};

}  // namespace shm
