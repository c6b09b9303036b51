#include "engine/norm_blocks.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <memory>

#include "base/dtype.hpp"
#include "base/error.hpp"

namespace zr::host::engine {

namespace {
constexpr const char* kNormTag = "norm blocks";
constexpr const char* kNormWhat = "reduced gradients";

// Device memory for the sums of this rank's norm blocks, and the optimizer that adds them up.
class DeviceSums {
 public:
  explicit DeviceSums(const job::StepContext& context) : context_(context) {}
  ~DeviceSums() { context_.comm.free(memory_); }
  DeviceSums(const DeviceSums&) = delete;

  void add_up(const std::vector<zr_view>& values, double* out) {
    int64_t blocks = 0;
    for (const zr_view& view : values) blocks += plan::norm_blocks_of(view.count);
    if (blocks == 0) return;
    if (!memory_)
      memory_ = context_.comm.allocate_on_device(8 * blocks, MemoryKind::other, "norm blocks",
                                                 comm::CommRuntime::Readers::this_rank);
    const zr_view sums{memory_, blocks, ZR_F64, 0, context_.device->device()};
    const plugin::Instance& optimizer = context_.optimizers.main();
    CallError error;
    zr_code code = ZR_OK;
    context_.device->run([&](zr_stream* stream) {
      code = call_plugin(&error, [&] {
        return context_.optimizers.on_device(0)->norm_blocks(optimizer.self(), values.data(),
                                                             static_cast<uint32_t>(values.size()), plan::kNormBlock,
                                                             &sums, stream, &error);
      });
    });
    check(code, error, optimizer.call_text("norm_blocks"));
    context_.device->download(memory_, out, 8 * blocks);
  }

 private:
  const job::StepContext& context_;
  void* memory_ = nullptr;
};
}  // namespace

NormBlocks::NormBlocks(const job::RankContext& context, const std::vector<update::UpdateSlice>& slices,
                       offload::DiskBackedBuffers* disk_buffers, int64_t window)
    : comm_(context.comm),
      pool_(context.pool),
      plan_(context.plan),
      ledger_(context.ledger),
      disk_buffers_(disk_buffers),
      blocks_(context.plan.norm_blocks),
      window_(window) {
  ranges_by_rank_.resize(blocks_.blocks_per_rank.size());
  int64_t first = 0;
  std::size_t slice = 0;
  for (uint32_t i = 0; i < plan_.input.parameters.size(); ++i) {
    first_block_.push_back(first);
    const plan::Parameter& parameter = plan_.input.parameters[i];
    if (parameter.frozen) continue;
    for (const plan::Segment& segment : plan_.segments[i]) {
      const int contributor = blocks_.replicated ? plan_.rank : segment.owners.front();
      ranges_by_rank_[static_cast<std::size_t>(contributor)].push_back(
          {first + segment.first / plan::kNormBlock, plan::norm_blocks_of(segment.count)});
      if (contributor == plan_.rank) add_contribution(i, segment, slices, slice);
    }
    first += plan::norm_blocks_of(parameter.count);
  }
  int64_t own_count = 0;
  for (const update::NormBlockRange& range : own_ranges_) own_count += plan::norm_blocks_of(range.values.count);
  own_sums_ = static_cast<double*>(
      comm_.allocate(std::max<int64_t>(own_count, 1) * 8, 64, Tier::device, MemoryKind::other, kNormTag));
  double* out = own_sums_;
  for (update::NormBlockRange& range : own_ranges_) {
    range.out = out;
    out += plan::norm_blocks_of(range.values.count);
  }
  for (std::size_t i = 0; i < own_ranges_.size(); ++i)
    ranges_by_address_.emplace_back(bytes_of(own_ranges_[i].values), i);
  std::sort(ranges_by_address_.begin(), ranges_by_address_.end());
  ready_.assign(static_cast<std::size_t>(own_count), 0);
  if (blocks_.replicated) return;
  const int64_t held = std::min(window_, blocks_.total);
  received_ = static_cast<double*>(
      comm_.allocate(std::max<int64_t>(held, 1) * 8, 64, Tier::device, MemoryKind::other, kNormTag));
  ordered_.resize(static_cast<std::size_t>(held));
  ledger_.add(Tier::device, MemoryKind::other, kNormTag, held * 8);
}

NormBlocks::~NormBlocks() {
  comm_.free(own_sums_);
  comm_.free(received_);
  ledger_.add(Tier::device, MemoryKind::other, kNormTag, -static_cast<int64_t>(ordered_.size()) * 8);
}

// Slices of the owner cover the segment. Slices and segments are in ascending order, and are cut only between norm
// blocks.
void NormBlocks::add_contribution(uint32_t param, const plan::Segment& segment,
                                  const std::vector<update::UpdateSlice>& slices, std::size_t& slice) {
  const auto holds = [&](int64_t element) {
    const update::UpdateSlice& found = slices[slice];
    return found.param == param && found.first <= element && element < found.first + found.count;
  };
  for (int64_t at = segment.first, end = at + segment.count; at < end;) {
    while (slice < slices.size() && !holds(at)) ++slice;
    if (slice == slices.size())
      fail_internal(fmt::format(
          "rank {} has no reduced gradient for element {} of '{}', although its plan assigns that element to it",
          plan_.rank, at, plan_.input.parameters[param].name));
    const update::UpdateSlice& found = slices[slice];
    const int64_t count = std::min(end, found.first + found.count) - at;
    own_ranges_.push_back({part_of(found.grad, at - found.first, count), nullptr});
    own_elements_.push_back({param, at, count});
    at += count;
  }
}

void NormBlocks::begin_micro_step(bool is_last) {
  gradients_are_final_ = is_last;
  std::fill(ready_.begin(), ready_.end(), 0);
}

void NormBlocks::gradients_final(const zr_view& gradients, const void* values) {
  if (!gradients_are_final_ || device_.sums || gradients.count == 0 || ranges_by_address_.empty() ||
      gradients.dtype != own_ranges_.front().values.dtype)
    return;
  const int64_t size = size_of(gradients.dtype);
  const char *begin = bytes_of(gradients), *end = begin + gradients.count * size;
  auto at = std::upper_bound(ranges_by_address_.begin(), ranges_by_address_.end(), begin,
                             [](const char* address, const auto& entry) { return address < entry.first; });
  if (at != ranges_by_address_.begin()) --at;
  for (; at != ranges_by_address_.end() && at->first < end; ++at) {
    const update::NormBlockRange& range = own_ranges_[at->second];
    const char* from = at->first;
    // Only blocks whose elements are all final.
    const int64_t first = begin <= from ? 0 : ((begin - from) / size + plan::kNormBlock - 1) / plan::kNormBlock;
    const int64_t reach = std::min<int64_t>((end - from) / size, range.values.count);
    const int64_t last = reach == range.values.count ? plan::norm_blocks_of(reach) : reach / plan::kNormBlock;
    if (first >= last) continue;
    zr_view blocks = part_of(range.values, first * plan::kNormBlock,
                             std::min(last * plan::kNormBlock, range.values.count) - first * plan::kNormBlock);
    blocks.data = static_cast<char*>(const_cast<void*>(values)) + (bytes_of(blocks) - begin);
    if (uses_pool_)
      update::norm_block_sums(pool_, {{blocks, range.out + first}});
    else
      update::norm_block_sums(blocks, range.out + first);
    const auto ready = ready_.begin() + (range.out - own_sums_);
    std::fill(ready + first, ready + last, 1);
    if (!on_final_) continue;
    const bool finite =
        std::all_of(range.out + first, range.out + last, [](double block) { return std::isfinite(block); });
    on_final_(bytes_of(range.values) + first * plan::kNormBlock * size, blocks.count, finite);
  }
}

void NormBlocks::sum_missing() {
  if (device_.sums) {
    std::vector<zr_view> values;
    for (const update::NormBlockRange& range : own_ranges_) values.push_back(range.values);
    return device_.sums(values, own_sums_);
  }
  std::vector<update::NormBlockRange> missing;
  for (const update::NormBlockRange& range : own_ranges_) {
    const char* ready = ready_.data() + (range.out - own_sums_);
    for (int64_t block = 0, count = plan::norm_blocks_of(range.values.count); block < count;) {
      int64_t next = block;
      while (next < count && !ready[next]) ++next;
      if (next > block)
        missing.push_back({part_of(range.values, block * plan::kNormBlock,
                                   std::min(next * plan::kNormBlock, range.values.count) - block * plan::kNormBlock),
                           range.out + block});
      block = next + 1;
    }
  }
  std::erase_if(missing, [&](const update::NormBlockRange& range) {
    if (!disk_buffers_ || !disk_buffers_->holds(range.values.data)) return false;
    disk_buffers_->visit(range.values, offload::OptimizerStates::Access::read, kNormWhat,
                         [&](void* memory, int64_t first, int64_t count) {
                           update::norm_block_sums(pool_, {{{memory, count, range.values.dtype, 0, {1, 0}},
                                                            range.out + first / plan::kNormBlock}});
                         });
    return true;
  });
  norm_block_sums(pool_, missing);
}

int64_t NormBlocks::sum() {
  blocks_summed_early_ = std::count(ready_.begin(), ready_.end(), 1);
  sum_missing();
  gradients_are_final_ = false;
  std::fill(ready_.begin(), ready_.end(), 0);
  int64_t non_finite = 0;
  for (const update::NormBlockRange& range : own_ranges_) {
    const int64_t blocks = plan::norm_blocks_of(range.values.count);
    const auto is_finite = [&](int64_t block) { return std::isfinite(range.out[block]); };
    const auto elements = [&](int64_t begin, int64_t end) {  // of blocks
      return part_of(range.values, begin * plan::kNormBlock,
                     std::min(end * plan::kNormBlock, range.values.count) - begin * plan::kNormBlock);
    };
    int64_t begin = 0, end = blocks;
    while (begin < end && is_finite(begin)) ++begin;
    while (begin < end && is_finite(end - 1)) --end;
    if (begin < end && device_.sums) {  // one call per range, because each waits for the device
      non_finite += device_.count_non_finite(elements(begin, end));
      continue;
    }
    for (int64_t block = begin; block < end; ++block)
      if (!is_finite(block)) non_finite += non_finite_of(elements(block, block + 1));
  }
  return non_finite;
}

int64_t NormBlocks::non_finite_of(const zr_view& block) const {
  if (!disk_buffers_ || !disk_buffers_->holds(block.data)) return update::count_non_finite(block);
  int64_t n = 0;
  disk_buffers_->visit(block, offload::OptimizerStates::Access::read, kNormWhat,
                       [&](void* memory, int64_t, int64_t count) {
                         n += update::count_non_finite({memory, count, block.dtype, 0, {1, 0}});
                       });
  return n;
}

void NormBlocks::accumulate(const double* blocks, int64_t first, int64_t count, Norm& norm) const {
  for (int64_t i = 0; i < count; ++i) {
    norm.sum_of_squares += blocks[i];
    if (std::isfinite(blocks[i]) || norm.first_non_finite >= 0) continue;
    const auto after = std::upper_bound(first_block_.begin(), first_block_.end(), first + i) - first_block_.begin();
    norm.first_non_finite = after - 1;  // empty and frozen parameters have no blocks and precede the owner
  }
}

// Gathers blocks [begin, end) of all ranks into ordered_.
void NormBlocks::gather(int64_t begin, int64_t end) {
  const auto overlap = [&](const BlockRange& range) {
    return std::max<int64_t>(0, std::min(end, range.block + range.count) - std::max(begin, range.block));
  };
  std::vector<int64_t> counts(ranges_by_rank_.size(), 0);
  for (std::size_t r = 0; r < ranges_by_rank_.size(); ++r)
    for (std::size_t i = next_range_[r]; i < ranges_by_rank_[r].size() && ranges_by_rank_[r][i].block < end; ++i)
      counts[r] += overlap(ranges_by_rank_[r][i]);
  const int64_t own_count = counts[static_cast<std::size_t>(plan_.rank)];
  zr_coll gather{};
  gather.op = ZR_ALL_GATHER;
  gather.src = {own_sums_ + sent_, own_count, ZR_F64, 0, {1, 0}};
  gather.dst = {received_, end - begin, ZR_F64, 0, {1, 0}};
  gather.counts = counts.data();
  gather.label = kNormTag;
  comm_.run_control(gather);
  sent_ += own_count;
  const double* from = received_;
  for (std::size_t r = 0; r < ranges_by_rank_.size(); ++r)
    for (std::size_t& i = next_range_[r]; i < ranges_by_rank_[r].size() && ranges_by_rank_[r][i].block < end; ++i) {
      const BlockRange& range = ranges_by_rank_[r][i];
      const int64_t count = overlap(range);
      std::copy_n(from, count, ordered_.data() + std::max(begin, range.block) - begin);
      from += count;
      if (range.block + range.count > end) break;  // the rest of the range is in the next window
    }
}

double NormBlocks::ordered_sum_of(const std::function<zr_view(uint32_t param, int64_t first, int64_t count)>& values) {
  std::vector<update::NormBlockRange> ranges;
  for (std::size_t i = 0; i < own_ranges_.size(); ++i) {
    const Elements& elements = own_elements_[i];
    ranges.push_back({values(elements.param, elements.first, elements.count), own_ranges_[i].out});
  }
  update::block_sums(pool_, ranges);
  return ordered_sum().sum_of_squares;
}

NormBlocks::Norm NormBlocks::ordered_sum() {
  Norm norm;
  if (blocks_.replicated) {
    accumulate(own_sums_, 0, blocks_.total, norm);
    return norm;
  }
  next_range_.assign(ranges_by_rank_.size(), 0);
  sent_ = 0;
  for (int64_t begin = 0; begin < blocks_.total; begin += window_) {
    const int64_t end = std::min(begin + window_, blocks_.total);
    gather(begin, end);
    accumulate(ordered_.data(), begin, end - begin, norm);
  }
  return norm;
}

NormBlocks::OnDevice norm_on_device(const job::StepContext& context) {
  const auto sums = std::make_shared<DeviceSums>(context);
  return {[sums](const std::vector<zr_view>& values, double* out) { sums->add_up(values, out); },
          [device = context.device](const zr_view& values) { return device->count_non_finite(values); }};
}

}  // namespace zr::host::engine
