// The communicator "shm" with memory of a device, and with host memory. ZR_COMM_DEVICE: the type of the device.
#include "../comm_shm/host_or_device.hpp"
#include "../comm_shm/shm_plugin.hpp"
#include "../comm_shm/traffic.hpp"
#include "device_communicator.hpp"

namespace {

using Opened = shm::HostOrDevice<shm::ShmCommunicator, peer::DeviceCommunicator>;

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
