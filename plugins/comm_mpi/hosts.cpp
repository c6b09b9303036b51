#include "hosts.hpp"

#include <algorithm>
#include <cstdlib>

#include "../comm_shm/machine.hpp"

namespace mpi {

std::string host_identity() {
  const char* const given = std::getenv("ZR_HOST_ID");
  const std::string network = given && *given ? std::string("id ") + given : shm::network_namespace();
  const std::string kernel = shm::boot_id();
  return kernel + (kernel == "unknown" ? " " + shm::host_name() : "") + " " + shm::pid_namespace() + " " + network;
}

Hosts::Hosts(const std::vector<std::string>& identities) {
  std::vector<std::string> known;
  for (std::size_t rank = 0; rank < identities.size(); ++rank) {
    const std::string& identity = identities[rank];
    if (known.empty() || known.back() != identity) {
      if (std::find(known.begin(), known.end(), identity) != known.end() && gap_.empty()) {
        const auto before = std::find(identities.begin(), identities.end(), identity) - identities.begin();
        gap_ = "ranks " + std::to_string(before) + " and " + std::to_string(rank) + " are on one host, but rank " +
               std::to_string(rank - 1) + " is not";
      }
      known.push_back(identity);
      if (rank > 0) first_.push_back(static_cast<int>(rank));
    }
    host_.push_back(static_cast<int>(known.size()) - 1);
  }
  first_.push_back(static_cast<int>(identities.size()));
}

Hosts::Hosts(const std::vector<int>& sizes) {
  for (const int size : sizes) {
    host_.insert(host_.end(), static_cast<std::size_t>(size), static_cast<int>(first_.size()) - 1);
    first_.push_back(static_cast<int>(host_.size()));
  }
}

}  // namespace mpi
