// The communicator "mpi": the ranks of several machines, started by mpirun, exchange messages of MPI.
#include "../comm_shm/shm_plugin.hpp"
#include "mpi_communicator.hpp"
#include "traffic.hpp"
#include "zr/communicator.hpp"

namespace {

class Mpi : public zr::Communicator<Mpi, mpi::MpiCommunicator> {
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
    return static_cast<uint64_t>(mpi::MpiCommunicator::most_bytes(world, options_));
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
    caps.flags |= ZR_COMM_QUANTIZED | ZR_COMM_ANY_ORDER;
    return caps;
  }
  std::unique_ptr<mpi::MpiCommunicator> open(const zr_comm_open& options) {
    if (options.device.type != ZR_DEVICE_CPU)
      throw zr::PluginError(ZR_UNSUPPORTED, "comm_mpi moves host memory, not memory of a device of type " +
                                                std::to_string(options.device.type));
    const std::string doubt = options.world > 1 && options.rank == 0 ? mpi::MpiThread::doubt() : "";
    if (!doubt.empty()) host_.log(ZR_LOG_WARN, "communicator \"mpi\": " + doubt);
    mpi::MpiThread* const thread = options.world > 1 ? &mpi::MpiThread::start() : nullptr;
    return std::make_unique<mpi::MpiCommunicator>(host_, options, thread, options_);
  }

 private:
  zr::Host host_;
  const mpi::MpiOptions options_;
};

}  // namespace

ZR_TAG(several_hosts);
ZR_COMMUNICATOR(Mpi, "mpi", "zeroth", "1.0.0");
