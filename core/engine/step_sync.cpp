#include "engine/step_sync.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "base/dtype.hpp"
#include "comm/coll.hpp"

namespace zr::host::engine {

namespace {
// This rank's part of an all-gather in place, which the all-gather does not change; else no elements.
zr_view part_in_place(const zr_coll& coll) {
  const char *first = bytes_of(coll.dst), *part = bytes_of(coll.src);
  const bool is_part =
      coll.op == ZR_ALL_GATHER && part >= first &&
      part + coll.src.count * size_of(coll.src.dtype) <= first + coll.dst.count * size_of(coll.dst.dtype);
  return is_part ? coll.src : zr_view{};
}
}  // namespace

StepSync::StepSync(const job::StepContext& context, const std::vector<update::UpdateSlice>& slices,
                   offload::DiskBackedBuffers* disk_buffers, offload::DeviceUpdates* device_updates)
    : comm_(context.comm),
      use_(context.use),
      by_ranks_(context.config().gradients().divisor == config::GradientDivisor::ranks),
      norm_(context, slices, disk_buffers),
      device_updates_(device_updates) {
  const RecursiveMutexLock lock(use_);
  comm_.on_completed([this](const zr_coll& coll, const void* dst, int64_t number) {
    if (number <= issued_before_) return;  // of an earlier micro-step, but ended late
    if (on_collective_ && comm::reads_src(coll, comm_.rank())) on_collective_(coll.src);
    norm_.gradients_final(coll.dst, dst);
    if (device_updates_) device_updates_->gradients_final(coll.dst, part_in_place(coll));
  });
}

void StepSync::begin_micro_step(bool is_last) {
  issued_before_ = comm_.issued();
  norm_.begin_micro_step(is_last);
  if (device_updates_) device_updates_->begin_micro_step(is_last);
}

StepSync::~StepSync() {
  const RecursiveMutexLock lock(use_);
  comm_.on_completed({});
}

namespace {
// The fixed part of a rank's statistics, which encode() writes as bytes of the same length on all ranks.
struct Header {
  int64_t non_finite, tokens, first_non_finite;
  int32_t stop, save_failed, update_failed, masters_changed;
  WeightDigest::Digest digest;
};

std::string encode(const StepSync::LocalStats& local, int64_t non_finite) {
  const Header header{non_finite,        local.tokens,        local.first_non_finite, local.stop,
                      local.save_failed, local.update_failed, local.masters_changed,  local.digest};
  std::string bytes(reinterpret_cast<const char*>(&header), sizeof header);
  std::vector<double> losses;
  for (const Loss& loss : local.losses) losses.push_back(loss.value());
  for (const auto* list : {&std::as_const(losses), &local.weights})
    bytes.append(reinterpret_cast<const char*>(list->data()), list->size() * sizeof(double));
  bytes.append(local.touched->data(), local.touched->size());
  return bytes;
}

// Sets the weight, the sum of the losses and the first rank whose loss is not finite. `encoded`: by rank, `micros`
// losses each.
void add_losses(const std::vector<std::string>& encoded, std::size_t micros, GlobalStats& global) {
  for (std::size_t a = 0; a < micros; ++a)
    for (std::size_t r = 0; r < encoded.size(); ++r) {  // m = a N + r, ascending
      const std::string& bytes = encoded[r];
      double value, weight;
      std::memcpy(&value, bytes.data() + sizeof(Header) + a * 8, 8);
      std::memcpy(&weight, bytes.data() + sizeof(Header) + (micros + a) * 8, 8);
      if (weight == 0) continue;  // not included, even if its loss is not finite
      if (!std::isfinite(value) && global.loss_rank < 0) global.loss_rank = static_cast<int>(r);
      global.loss += weight == 1 ? value : value * weight;
      global.weight += weight;
    }
}
}  // namespace

StepSync::Totals StepSync::totals(const std::vector<double>& weights, const std::vector<char>& touched) const {
  std::string bytes(reinterpret_cast<const char*>(weights.data()), weights.size() * sizeof(double));
  bytes.append(touched.data(), touched.size());
  const std::vector<std::string> encoded = comm_.all_gather_bytes(bytes, "weights of micro-batches");
  Totals totals{0, 0, std::vector<char>(touched.size(), 0)};
  for (std::size_t a = 0; a < weights.size(); ++a)
    for (const std::string& rank_bytes : encoded) {  // m = a N + r, ascending
      double weight;
      std::memcpy(&weight, rank_bytes.data() + a * sizeof weight, sizeof weight);
      totals.weight += weight;
    }
  totals.divisor = divisor_of(totals.weight);
  for (const std::string& rank_bytes : encoded)
    for (std::size_t i = 0; i < touched.size(); ++i)
      totals.touched[i] |= rank_bytes[weights.size() * sizeof(double) + i];
  return totals;
}

GlobalStats StepSync::exchange(const LocalStats& local) {
  const bool replicated = norm_.replicated() && !local.local_non_finite;
  const int64_t non_finite = local.local_non_finite ? *local.local_non_finite : norm_.sum();
  const auto encoded = comm_.all_gather_bytes(encode(local, non_finite), "step statistics");
  GlobalStats global;
  global.touched.assign(local.touched->size(), 0);
  const std::size_t micros = local.losses.size();
  add_losses(encoded, micros, global);
  global.divisor = divisor_of(global.weight);
  global.loss /= global.divisor;
  for (std::size_t r = 0; r < encoded.size(); ++r) {
    const std::string& bytes = encoded[r];
    Header header;
    std::memcpy(&header, bytes.data(), sizeof header);
    // If all ranks have the same reduced gradients, they count the same elements.
    global.non_finite =
        replicated ? std::max(global.non_finite, header.non_finite) : global.non_finite + header.non_finite;
    global.tokens += header.tokens;
    global.stop = std::max(global.stop, header.stop);
    global.save_failed |= header.save_failed != 0;
    global.masters_changed |= header.masters_changed != 0;
    if (header.update_failed && global.failed_rank < 0) global.failed_rank = static_cast<int>(r);
    global.digests.push_back(header.digest);
    if (header.first_non_finite >= 0 &&
        (global.non_finite_rank < 0 || header.first_non_finite < global.first_local_param)) {
      global.non_finite_rank = static_cast<int>(r);
      global.first_local_param = header.first_non_finite;
    }
    const char* touched = bytes.data() + sizeof(Header) + 2 * micros * 8;
    for (std::size_t i = 0; i < global.touched.size(); ++i) global.touched[i] |= touched[i];
  }
  if (local.local_non_finite) {
    global.first_param = global.first_local_param;
    global.sum_of_squares = std::numeric_limits<double>::quiet_NaN();
    return global;
  }
  const NormBlocks::Norm norm = norm_.ordered_sum();
  global.first_param = norm.first_non_finite;
  global.sum_of_squares = norm.sum_of_squares;
  return global;
}

}  // namespace zr::host::engine
