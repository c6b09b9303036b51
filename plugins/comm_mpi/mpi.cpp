// The communicator "mpi": the ranks of several machines, started by mpirun, exchange messages of MPI. ZR_COMM_DEVICE:
// the type of the device whose memory this library also moves, if there is one.
#include "../comm_shm/host_or_device.hpp"  // NOLINT(misc-include-cleaner): an alias uses its template
#include "../comm_shm/shm_plugin.hpp"
#include "mpi_communicator.hpp"
#ifdef ZR_COMM_DEVICE
#include "device_communicator.hpp"
#endif
#include "traffic.hpp"
#include "zr/communicator.hpp"

namespace {

#ifdef ZR_COMM_DEVICE
using Opened = shm::HostOrDevice<mpi::MpiCommunicator, mpi::DeviceCommunicator>;
#else
using Opened = mpi::MpiCommunicator;
#endif

class Mpi : public zr::Communicator<Mpi, Opened> {
 public:
  static constexpr const char* description = "messages of MPI between the ranks of one or several machines";
  static constexpr const char* license = "Apache-2.0";
  static constexpr zr_key keys[] = {
      zr::key_bool("hierarchy", "true", "collectives pass to each host once, and there through shared memory"),
      zr::key_bytes("hierarchy_min_bytes", "\"64KiB\"", 0, 1e12, "collectives of fewer bytes go from rank to rank"),
      shm::kStagingKey};
  Mpi(const zr::Config& config, const zr::Host& host)
      : host_(host),
        options_{config.boolean("hierarchy"), config.integer("hierarchy_min_bytes"), config.integer("staging_bytes")} {}
  static void shutdown() noexcept { mpi::MpiThread::stop(); }

  uint64_t open_bytes(int32_t world) const noexcept {
    return Opened::most_open * static_cast<uint64_t>(mpi::MpiCommunicator::most_bytes(world, options_));
  }
  void traffic(const zr_coll& coll, zr_traffic& sum) const { mpi::add_traffic(coll, options_, sum); }
  void can_share(const std::vector<int>& hosts) const {
    const mpi::Hosts ranks(hosts);
    if (!options_.hierarchy) throw zr::PluginError(ZR_UNSUPPORTED, "communicator.mpi.hierarchy is false");
    if (ranks.count() == 1)
      throw zr::PluginError(ZR_UNSUPPORTED, "communicator 'mpi' shares memory on several hosts only");
    if (!mpi::has_local_steps(ranks, options_)) throw zr::PluginError(ZR_UNSUPPORTED, ranks.gap());
    if (!ranks.has_levels()) throw zr::PluginError(ZR_UNSUPPORTED, "every host has one rank");
  }
  zr_comm_caps caps() const {
    zr_comm_caps caps = shm::capabilities();
    if (options_.hierarchy) caps.flags |= ZR_COMM_ANY_ORDER | ZR_COMM_QUANTIZED;
#ifdef ZR_COMM_DEVICE
    if (!nccl::has_device()) return caps;
    caps.flags |= ZR_COMM_STREAMS;
    caps.device_types |= uint64_t{1} << ZR_COMM_DEVICE;
#endif
    return caps;
  }
  std::unique_ptr<Opened> open(const zr_comm_open& options) {
    if (!(caps().device_types >> options.device.type & 1))
      throw zr::PluginError(ZR_UNSUPPORTED, "this library of communicator 'mpi' has no memory on devices of type " +
                                                std::to_string(options.device.type));
    const std::string doubt = options.world > 1 && options.rank == 0 ? mpi::MpiThread::doubt() : "";
    if (!doubt.empty()) host_.log(ZR_LOG_WARN, "communicator \"mpi\": " + doubt);
    mpi::MpiThread* const thread = options.world > 1 ? &mpi::MpiThread::start() : nullptr;
    return std::make_unique<Opened>(host_, options, thread, options_);
  }

 private:
  zr::Host host_;
  const mpi::MpiOptions options_;
};

}  // namespace

#ifndef ZR_COMM_DEVICE  // for memory of a device, "auto" prefers libraries that do not copy it through host memory
ZR_TAG(several_hosts);
#endif
ZR_COMMUNICATOR(Mpi, "mpi", "zeroth", "1.0.0");
