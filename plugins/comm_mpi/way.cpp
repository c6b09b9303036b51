#include "way.hpp"

#include "host_gather.hpp"
#include "quantization.hpp"
#include "zr/base.hpp"

namespace mpi {

namespace {
std::string unmet_need(const Hosts& hosts, const MpiOptions& options) {
  if (!options.hierarchy)
    return "quantized collectives (communicator.gradients, communicator.weights) need communicator.mpi.hierarchy = "
           "true";
  return hosts.gap() +
         "; quantized collectives (communicator.gradients, communicator.weights) need ranks that are numbered host by "
         "host (mpirun --map-by slot, srun --distribution=block)";
}
}  // namespace

bool has_local_steps(const Hosts& hosts, const MpiOptions& options) {
  return options.hierarchy && hosts.count() > 1 && hosts.gap().empty();
}

Way way_of(const zr::CollectiveParts& parts, const Hosts& hosts, const MpiOptions& options) {
  const bool is_quantized = bits_of(parts.coll) != 0, has_steps = has_local_steps(hosts, options);
  if (is_quantized && hosts.count() > 1 && !has_steps)
    throw zr::PluginError(ZR_UNSUPPORTED, unmet_need(hosts, options));
  if (parts.coll.flags & ZR_COLL_SHARED) {
    if (has_steps && hosts.has_levels() && parts.coll.op == ZR_ALL_GATHER) return Way::gather;
    throw zr::PluginError(ZR_UNSUPPORTED,
                          "ZR_COLL_SHARED: the ranks of this job do not share the memory of their hosts");
  }
  if (!has_steps || parts.is_message() || parts.coll.op == ZR_BARRIER) return Way::flat;
  if (parts.elements() * parts.width() < options.hierarchy_min_bytes) return Way::flat;
  if (!hosts.has_levels() && !is_quantized) return Way::flat;
  return HostGather::suits(parts) ? Way::gather : sum_way(parts, hosts);
}

}  // namespace mpi
