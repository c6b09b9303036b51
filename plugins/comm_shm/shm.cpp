// The communicator "shm": the ranks of one node read each other's memory in place.
#include "shm_communicator.hpp"
#include "shm_plugin.hpp"
#include "traffic.hpp"

namespace {

class Shm : public zr::Communicator<Shm, shm::ShmCommunicator> {
 public:
  static constexpr const char* description = "shared memory between the ranks of one machine";
  static constexpr const char* license = "Apache-2.0";
  static constexpr zr_key keys[] = {shm::kStagingKey};
  Shm(const zr::Config& config, const zr::Host& host) : host_(host), staging_bytes_(config.integer("staging_bytes")) {}

  uint64_t open_bytes(int32_t world) const noexcept { return shm::Layout(world, staging_bytes_).bytes; }
  void traffic(const zr_coll& coll, zr_traffic& sum) const { shm::add_traffic(coll, sum); }
  zr_comm_caps caps() const { return shm::capabilities(); }
  std::unique_ptr<shm::ShmCommunicator> open(const zr_comm_open& options) {
    if (options.device.type != ZR_DEVICE_CPU)
      throw zr::PluginError(ZR_UNSUPPORTED, "comm_shm moves host memory, not memory of a device of type " +
                                                std::to_string(options.device.type));
    return std::make_unique<shm::ShmCommunicator>(host_, options, staging_bytes_);
  }

 private:
  zr::Host host_;
  int64_t staging_bytes_;
};

}  // namespace

ZR_COMMUNICATOR(Shm, "shm", "zeroth", "1.0.0");
