// The communicator "shm": the ranks of one node read each other's memory in place.
#include "shm_communicator.hpp"

namespace {

class Shm : public zr::Communicator<Shm, shm::ShmCommunicator> {
 public:
  static constexpr const char* description = "shared memory between the ranks of one machine";
  static constexpr const char* license = "Apache-2.0";
  static constexpr zr_key keys[] = {
      zr::key_bytes("staging_bytes", "\"4MiB\"", 262144, 1e12, "buffer for data that peers cannot read in place")};
  Shm(const zr::Config& config, const zr::Host& host) : host_(host), staging_bytes_(config.integer("staging_bytes")) {}

  uint64_t open_bytes(int32_t world) const noexcept { return shm::Layout(world, staging_bytes_).bytes; }
  zr_comm_caps caps() const {
    zr_comm_caps caps{};
    caps.flags = ZR_COMM_RANK_ORDERED | ZR_COMM_UPCAST | ZR_COMM_ACCUMULATE | ZR_COMM_ASYNC;
    for (uint32_t op = ZR_ALL_REDUCE; op <= ZR_BARRIER; ++op) caps.ops |= uint64_t{1} << op;
    for (int dtype = ZR_F32; dtype <= ZR_I64; ++dtype) caps.dtypes |= uint64_t{1} << dtype;
    caps.reduces = 1u << ZR_SUM | 1u << ZR_MIN | 1u << ZR_MAX;
    caps.device_types = zr::kCpuOnly;
    return caps;
  }
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
