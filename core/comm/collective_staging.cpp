#include "comm/collective_staging.hpp"

#include <atomic>

#include "base/error.hpp"
#include "comm/done.hpp"

namespace zr::host::comm {

// Staging buffers are released in the order of submission, and all ranks submit in the same order, so waiting for the
// oldest collective cannot deadlock.
zr_code StagedCollectives::stage(zr_coll& coll, uint64_t& number, const std::function<zr_code(zr_done* done)>& wait) {
  if (!staging_) return ZR_OK;
  while (!completions_.empty() && completions_.front()->code.load(std::memory_order_acquire) != ZR_AGAIN) {
    done_release(completions_.front());
    completions_.pop_front();
  }
  while ((number = staging_->stage(coll)) == CollectiveStaging::kNoCapacity) {
    if (completions_.empty())
      fail_internal("no staging buffer for a collective that reads from a tier, although no other is in flight");
    zr_done* first = completions_.front();
    completions_.pop_front();
    const zr_code code = wait(first);
    done_release(first);
    if (code != ZR_OK) return code;
  }
  return ZR_OK;
}

void StagedCollectives::add(zr_done* done) {
  done->references.fetch_add(1, std::memory_order_relaxed);
  completions_.push_back(done);
}

void StagedCollectives::unstage(uint64_t number, bool succeeded) noexcept {
  if (number != CollectiveStaging::kNotStaged && staging_) staging_->unstage(number, succeeded);
}

void StagedCollectives::clear() {
  for (; !completions_.empty(); completions_.pop_front()) done_release(completions_.front());
}

}  // namespace zr::host::comm
