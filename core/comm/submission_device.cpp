// Collectives of Submission in memory of a device.
#include <fmt/format.h>

#include "base/error.hpp"
#include "comm/coll.hpp"
#include "comm/submission.hpp"

namespace zr::host::comm {

// In a world of one. The only source is that of this rank.
void Submission::run_on_device(const zr_coll& coll) {
  if (coll.src.count == 0) return;
  const bool accumulates = coll.flags & ZR_COLL_ACCUMULATE;
  if (is_reduction(coll) && (coll.reduce == ZR_SUM || accumulates)) {
    if (coll.reduce != ZR_SUM)
      fail_internal(fmt::format("{} '{}' accumulates a minimum or maximum, which the engine does not offer on a device",
                                name_of_op(coll.op), coll.label ? coll.label : ""));
    return device_->add(coll.src, coll.dst, !accumulates);
  }
  if (coll.src.data != coll.dst.data) device_->copy(coll.src, coll.dst);
}

// With several ranks: the peers' calls are waited for, but not the device.
zr_code Submission::enqueue(const zr_coll& coll, zr_error* error) {
  if (!is_native(caps_, coll))
    return fill_error(error, ZR_UNSUPPORTED,
                      fmt::format("it does not offer this {} in memory of a device; choose another strategy, or set "
                                  "offload.gradients = \"cpu\"",
                                  name_of_op(coll.op)));
  zr_code code = ZR_OK;
  device_->run([&](zr_stream* stream) { code = on_device_->submit(coll, stream, nullptr, error); });
  if (code == ZR_OK) enqueued_.add(*device_);
  return code;
}

}  // namespace zr::host::comm
