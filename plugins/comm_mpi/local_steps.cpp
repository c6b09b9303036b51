#include "local_steps.hpp"

#include <cstring>

#include "zr/names.hpp"

namespace mpi {

zr::Done LocalSteps::submit(const zr_coll& coll) {
  if (!communicator_) {
    run_alone(coll);
    return {};
  }
  zr::Done done(host_);
  const std::lock_guard lock(mutex_);
  communicator_->submit(coll, nullptr, done.abi());
  return done;
}

// A step of one rank adds its elements, or copies them.
void LocalSteps::run_alone(const zr_coll& coll) const {
  if (coll.op == ZR_REDUCE) {
    const void* const from = coll.src.data;
    void* const to = coll.dst.data;
    reduce_({coll.reduce, (coll.flags & ZR_COLL_ACCUMULATE) != 0, coll.src.dtype, coll.dst.dtype}, &from, 1, &to, 1, 0,
            coll.src.count, false);
  } else if (coll.src.count > 0 && coll.src.data != coll.dst.data) {
    std::memmove(coll.dst.data, coll.src.data, static_cast<std::size_t>(coll.src.count * zr::size_of(coll.src.dtype)));
  }
}

void LocalSteps::progress() {
  if (!communicator_) return;
  const std::lock_guard lock(mutex_);
  communicator_->progress();
}

}  // namespace mpi
