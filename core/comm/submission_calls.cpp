// The collectives of plug-ins: strategies and optimizers submit them through the table of zr_comm_ref.
#include <fmt/format.h>

#include "base/error.hpp"
#include "base/unknown_bits.hpp"
#include "comm/coll.hpp"
#include "comm/submission.hpp"

namespace zr::host::comm {

// The collective of a plug-in, which may be built with newer or older headers.
zr_code Submission::submit_of_plugin(const zr_coll& given, zr_stream* stream, zr_done* done, zr_error* error) {
  constexpr std::string_view kBug = "this is a bug in the plug-in";
  if (given.size < ZR_SIZE_0_9(zr_coll))
    return reject(ZR_INVALID, exit_code::internal,
                  fmt::format("a zr_coll has {} bytes, fewer than in ABI 0.9: {}", given.size, kBug), error);
  if (stream && (!device_ || stream != device_->abi()))
    return reject(ZR_UNSUPPORTED, exit_code::internal,
                  fmt::format("a collective was submitted with a stream{}: {}",
                              device_ ? " that the engine does not know" : ", but the engine has none", kBug),
                  error);
  if (stream && done)
    return reject(ZR_UNSUPPORTED, exit_code::internal,
                  fmt::format("a collective was submitted with a stream and a completion, which the engine does not "
                              "offer: {}",
                              kBug),
                  error);
  zr_coll coll;
  ZR_TAKE(&coll, &given);
  if (!stream && device_ && is_on_device(coll, rank_))
    return reject(ZR_INVALID, exit_code::internal,
                  fmt::format("a collective on memory of a device was submitted without the stream of the call: {}; "
                              "compile the plug-in again, with the headers of this version",
                              kBug),
                  error);
  if (const std::string problem = unknown_bits_problem(
          "flags", coll.flags, uint32_t{ZR_COLL_ACCUMULATE} | ZR_COLL_GRADIENTS | ZR_COLL_WEIGHTS | ZR_COLL_SHARED);
      !problem.empty())
    return reject(ZR_INVALID, exit_code::user,
                  fmt::format("{} '{}': {}", name_of_op(coll.op), coll.label ? coll.label : "", problem), error);
  const uint32_t content = coll.flags & (uint32_t{ZR_COLL_GRADIENTS} | ZR_COLL_WEIGHTS);
  if (content == (uint32_t{ZR_COLL_GRADIENTS} | ZR_COLL_WEIGHTS))
    return reject(ZR_INVALID, exit_code::internal,
                  fmt::format("{} '{}': its flags say that it has gradients and that it has weights: {}",
                              name_of_op(coll.op), coll.label ? coll.label : "", kBug),
                  error);
  if ((coll.flags & ZR_COLL_SHARED) && !may_be_shared(coll))
    return reject(ZR_INVALID, exit_code::internal,
                  fmt::format("{} '{}' has ZR_COLL_SHARED, which is for all_gathers in place in a buffer with "
                              "ZR_BUFFER_SHARED of a job with ZR_PLAN_SHARE_ON_HOSTS: {}",
                              name_of_op(coll.op), coll.label ? coll.label : "", kBug),
                  error);
  coll.flags = flags_of_job(coll.flags, gradients_, weights_);
  return submit(coll, done, false, error, stream != nullptr);
}

bool Submission::may_be_shared(const zr_coll& coll) const {
  if (coll.op != ZR_ALL_GATHER || std::ranges::max(control_->hosts()) == 0) return false;
  if (coll.dst.count == 0) return true;
  const char* const dst = bytes_of(coll.dst);
  const int64_t width = size_of(coll.dst.dtype), first = part_of_rank(coll.counts, coll.dst.count, rank_, world_).first;
  if (coll.src.count > 0 && bytes_of(coll.src) != dst + first * width) return false;
  return std::ranges::any_of(
      shared_, [&](const auto& range) { return dst >= range.first && dst + coll.dst.count * width <= range.second; });
}

zr_code Submission::abi_submit(void* self, const zr_coll* coll, zr_stream* stream, zr_done* done,
                               zr_error* error) noexcept {
  auto& submission = *static_cast<Submission*>(self);
  try {
    return submission.submit_of_plugin(*coll, stream, done, error);
  } catch (const std::exception& e) {
    submission.failure_ = std::current_exception();
    return fill_error(error, ZR_INTERNAL, e.what());
  }
}

zr_code Submission::abi_progress(void* self, zr_error* error) noexcept {
  auto& submission = *static_cast<Submission*>(self);
  try {
    const zr_code code = submission.progress(error);
    return code == ZR_AGAIN ? zr_code{ZR_OK} : submission.finish(code, error, "progress");
  } catch (const std::exception& e) {
    submission.failure_ = std::current_exception();
    return fill_error(error, ZR_INTERNAL, e.what());
  }
}

}  // namespace zr::host::comm
