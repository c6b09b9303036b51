// The communicator "shm" with memory of a device, and with host memory. ZR_COMM_DEVICE: the type of the device.
#include "../comm_shm/shm_plugin.hpp"
#include "../comm_shm/traffic.hpp"
#include "device_communicator.hpp"

namespace {

// One open communicator, for host memory or for memory of the device.
class Opened {
 public:
  Opened(const zr::Host& host, const zr_comm_open& options, int64_t staging_bytes) {
    if (options.device.type == ZR_DEVICE_CPU)
      host_ = std::make_unique<shm::ShmCommunicator>(host, options, staging_bytes);
    else
      device_ = std::make_unique<peer::DeviceCommunicator>(host, options, staging_bytes);
  }

  void submit(const zr_coll& coll, zr_stream* stream, zr_done* done) {
    host_ ? host_->submit(coll, stream, done) : device_->submit(coll, stream, done);
  }
  void progress() {
    if (host_) host_->progress();
  }
  zr_view mem_alloc(uint64_t bytes, uint64_t align, uint32_t flags) {
    return host_ ? host_->mem_alloc(bytes, align, flags) : device_->mem_alloc(bytes, align, flags);
  }
  void mem_free(const zr_view& memory) noexcept { host_ ? host_->mem_free(memory) : device_->mem_free(memory); }
  void shared_alloc(uint64_t bytes, void** writer, const void** reader) {
    if (!host_) throw zr::PluginError(ZR_UNSUPPORTED, "communicator 'shm' shares weights in host memory only");
    host_->shared_alloc(bytes, writer, reader);
  }
  void shared_free(void* writer) noexcept {
    if (host_) host_->shared_free(writer);
  }
  void abort() noexcept { host_ ? host_->abort() : device_->abort(); }

 private:
  std::unique_ptr<shm::ShmCommunicator> host_;
  std::unique_ptr<peer::DeviceCommunicator> device_;
};

class DeviceShm : public zr::Communicator<DeviceShm, Opened> {
 public:
  static constexpr const char* description = "shared memory between the ranks of one machine, also of their devices";
  static constexpr const char* license = "Apache-2.0";
  static constexpr zr_key keys[] = {shm::kStagingKey};
  DeviceShm(const zr::Config& config, const zr::Host& host)
      : host_(host), staging_bytes_(config.integer("staging_bytes")) {}

  uint64_t open_bytes(int32_t world) const noexcept { return 2 * shm::Layout(world, staging_bytes_).bytes; }
  void traffic(const zr_coll& coll, zr_traffic& sum) const { shm::add_traffic(coll, sum); }
  zr_comm_caps caps() const {
    zr_comm_caps caps = shm::capabilities();
    if (!peer::can_share_memory()) return caps;
    caps.flags |= ZR_COMM_STREAMS;
    caps.device_types |= uint64_t{1} << ZR_COMM_DEVICE;
    return caps;
  }
  std::unique_ptr<Opened> open(const zr_comm_open& options) {
    if (options.device.type != ZR_DEVICE_CPU && options.device.type != ZR_COMM_DEVICE)
      throw zr::PluginError(ZR_UNSUPPORTED, "this library of communicator 'shm' has no memory on devices of type " +
                                                std::to_string(options.device.type));
    return std::make_unique<Opened>(host_, options, staging_bytes_);
  }

 private:
  zr::Host host_;
  int64_t staging_bytes_;
};

}  // namespace

ZR_COMMUNICATOR(DeviceShm, "shm", "zeroth", "1.0.0");
