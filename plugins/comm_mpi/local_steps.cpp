#include "local_steps.hpp"

namespace mpi {

zr::Done LocalSteps::submit(const zr_coll& coll) {
  zr::Done done(host_);
  const std::lock_guard lock(mutex_);
  communicator_.submit(coll, nullptr, done.abi());
  return done;
}

void LocalSteps::progress() {
  const std::lock_guard lock(mutex_);
  communicator_.progress();
}

}  // namespace mpi
