#include "rendezvous.hpp"

#include <algorithm>
#include <cstring>
#include <sstream>
#include <vector>

#include "../comm_shm/machine.hpp"
#include "signals_blocked.hpp"
#include "zr/base.hpp"

namespace nccl {

namespace {

struct RankAddress {
  std::string boot, host, device;
  int64_t staging_bytes = 0;
};

// The keys and values of one communicator in the job's store.
class Store {
 public:
  Store(const zr::Host& host, const char* prefix)
      : host_(host), store_(host.need<zr_store_service>()), prefix_(std::string(prefix) + "nccl.") {}
  void put(const std::string& key, const std::string& value) const {
    zr_error error = zr::no_error();
    zr::check(store_.put(host_.abi(), (prefix_ + key).c_str(), value.data(), value.size(), &error), error);
  }
  std::string get(const std::string& key) const {
    char value[1024];
    uint64_t bytes = sizeof value;
    zr_error error = zr::no_error();
    zr::check(store_.get(host_.abi(), (prefix_ + key).c_str(), -1, value, &bytes, &error), error);
    return std::string(value, bytes);
  }

 private:
  const zr::Host host_;
  const zr_store_service& store_;
  const std::string prefix_;
};

// Waits until rank `r` has come here too.
std::string announced_by(int r, const Store& store) {
  try {
    return store.get("rank." + std::to_string(r));
  } catch (const zr::PluginError& error) {
    throw zr::PluginError(error.code(),
                          "rank " + std::to_string(r) + " has not opened communicator 'nccl': " + error.what());
  }
}

[[noreturn]] void fail_parse(const std::string& what) {
  throw zr::PluginError(ZR_COMM,
                        what + " that communicator 'nccl' cannot parse; use the same version of Zeroth on all ranks");
}

// NCCL would fail too, but would not name the ranks.
void require_devices_of_their_own(const std::vector<RankAddress>& ranks) {
  const bool one_host =
      std::all_of(ranks.begin(), ranks.end(), [&](const RankAddress& rank) { return rank.boot == ranks.front().boot; });
  for (size_t r = 0; r < ranks.size(); ++r)
    for (size_t p = 0; p < r; ++p)
      if (ranks[p].boot == ranks[r].boot && ranks[p].device == ranks[r].device)
        throw zr::PluginError(ZR_UNSUPPORTED, "communicator 'nccl' needs a GPU of its own for each rank: ranks " +
                                                  std::to_string(p) + " and " + std::to_string(r) + " both use GPU " +
                                                  ranks[r].device + " of host '" + ranks[r].host +
                                                  "'; start one rank per GPU, or set communicator = " +
                                                  (one_host ? "\"shm\"" : "\"mpi\"") + ", whose ranks share GPUs");
}

}  // namespace

Meeting meet(const zr::Host& host, const zr_comm_open& options, const GpuDevice& device, int64_t staging_bytes,
             const Functions& nccl) {
  const Store store(host, options.store_prefix);
  std::ostringstream own;
  own << shm::boot_id() << ' ' << shm::host_name() << ' ' << device.id() << ' ' << staging_bytes;
  store.put("rank." + std::to_string(options.rank), own.str());
  Meeting meeting{{}, staging_bytes};
  std::vector<RankAddress> ranks(static_cast<size_t>(options.world));
  for (int r = 0; r < options.world; ++r) {
    RankAddress& address = ranks[static_cast<size_t>(r)];
    std::istringstream text(announced_by(r, store));
    if (!(text >> address.boot >> address.host >> address.device >> address.staging_bytes))
      fail_parse("rank " + std::to_string(r) + " announced an address");
    meeting.staging_bytes = std::min(meeting.staging_bytes, address.staging_bytes);
  }
  require_devices_of_their_own(ranks);
  if (options.rank == 0) {
    const SignalsBlocked blocked;
    if (const Result result = nccl.get_unique_id(&meeting.id); result != kSuccess)
      throw zr::PluginError(ZR_COMM, std::string("ncclGetUniqueId: NCCL: ") + nccl.get_error_string(result), result);
    store.put("id", std::string(meeting.id.internal, sizeof meeting.id.internal));
    return meeting;
  }
  const std::string id = store.get("id");
  if (id.size() != sizeof meeting.id.internal) fail_parse("rank 0 announced an id");
  std::memcpy(meeting.id.internal, id.data(), id.size());
  return meeting;
}

// A value that exists: get() fails only if the job has failed.
void require_job(const zr::Host& host, const zr_comm_open& options) {
  Store(host, options.store_prefix).get("rank." + std::to_string(options.rank));
}

}  // namespace nccl
