// The communicator "shm": the ranks of one node read each other's memory in place.
#include "shm_communicator.hpp"

namespace {

class Shm : public zr::Communicator<Shm, shm::ShmCommunicator> {
 public:
  static constexpr zr_key keys[] = {
      zr::key_bytes("staging_bytes", "\"4MiB\"", 262144, 1e12, "buffer for data that peers cannot read in place")};
  Shm(const zr::Config& config, const zr::Host& host) : host_(host), staging_bytes_(config.integer("staging_bytes")) {}

  uint64_t open_bytes(int32_t world) const { return shm::Layout(world, staging_bytes_).bytes; }
  std::unique_ptr<shm::ShmCommunicator> open(const zr_comm_open& options) {
    static uint64_t opened = 0;  // [control]: one call at a time in the process
    return std::make_unique<shm::ShmCommunicator>(host_, options, staging_bytes_, ++opened);
  }

 private:
  zr::Host host_;
  int64_t staging_bytes_;
};

}  // namespace

ZR_COMMUNICATOR(Shm, "shm", "zeroth", "1.0.0");
