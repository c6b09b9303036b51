#include "host_or_device.hpp"

namespace mpi {

HostOrDevice::HostOrDevice(const zr::Host& host, const zr_comm_open& open, MpiThread* thread,
                           const MpiOptions& options) {
  if (open.device.type == ZR_DEVICE_CPU)
    host_ = std::make_unique<MpiCommunicator>(host, open, thread, options);
  else
    device_ = std::make_unique<DeviceCommunicator>(host, open, thread, options);
}

void HostOrDevice::submit(const zr_coll& coll, zr_stream* stream, zr_done* done) {
  host_ ? host_->submit(coll, stream, done) : device_->submit(coll, stream, done);
}

void HostOrDevice::progress() { host_ ? host_->progress() : device_->progress(); }

zr_view HostOrDevice::mem_alloc(uint64_t bytes, uint64_t align, uint32_t flags) {
  return host_ ? host_->mem_alloc(bytes, align, flags) : device_->mem_alloc(bytes, align, flags);
}

void HostOrDevice::mem_free(const zr_view& memory) noexcept {
  host_ ? host_->mem_free(memory) : device_->mem_free(memory);
}

void HostOrDevice::shared_alloc(uint64_t bytes, void** writer, const void** reader) {
  if (!host_) throw zr::PluginError(ZR_UNSUPPORTED, "communicator 'mpi' shares weights in host memory only");
  host_->shared_alloc(bytes, writer, reader);
}

void HostOrDevice::shared_free(void* writer) noexcept {
  if (host_) host_->shared_free(writer);
}

void HostOrDevice::abort() noexcept { host_ ? host_->abort() : device_->abort(); }

}  // namespace mpi
