#include "offload/device_updates.hpp"

#include <algorithm>
#include <chrono>

#include "base/dtype.hpp"
#include "base/error.hpp"

namespace zr::host::offload {

namespace {
constexpr const char* kInTransit = "gradients and new weights";
constexpr int64_t kGradientSize = 4;  // reduced gradients on a device are fp32
// Weights have as much space as gradients, so that both are aligned alike.
constexpr int64_t kWeightStride = 4;

// Adds [begin, end) to ascending ranges that do not touch each other. Returns how many elements are new.
int64_t add_range(std::vector<std::pair<int64_t, int64_t>>& ranges, int64_t begin, int64_t end) {
  const auto first = std::ranges::find_if(ranges, [&](const auto& range) { return range.second >= begin; });
  int64_t added = end - begin;
  std::pair<int64_t, int64_t> joined{begin, end};
  auto last = first;
  for (; last != ranges.end() && last->first <= end; ++last) {
    added -= std::min(end, last->second) - std::max(begin, last->first);
    joined = {std::min(joined.first, last->first), std::max(joined.second, last->second)};
  }
  ranges.insert(ranges.erase(first, last), joined);
  return added;
}

bool contains(const std::vector<std::pair<int64_t, int64_t>>& ranges, int64_t begin, int64_t end) {
  return std::ranges::any_of(ranges, [&](const auto& range) { return range.first <= begin && end <= range.second; });
}
}  // namespace

DeviceUpdates::DeviceUpdates(const plan::MemoryPlan& plan, const std::vector<zr_view>& buffers, DeviceMemory& device,
                             Ledger& ledger)
    : plan_(plan), device_(device) {
  const plan::DeviceStaging& staging = plan.device_staging;
  for (const int64_t bytes : staging.allocations) gradients_.emplace_back(device, ledger, bytes);
  for (const plan::DeviceStaging::Block& block : staging.blocks)
    blocks_.push_back({bytes_of(part_of(buffers[block.buffer], block.first, block.count)),
                       block.count,
                       staging.copies_early ? &*gradients_[block.allocation] : nullptr,
                       block.offset,
                       {}});
  std::ranges::sort(blocks_, {}, &Block::begin);
  slots_.resize(static_cast<std::size_t>(staging.slots()));
  for (Slot& slot : slots_) slot.memory = Memory(device, ledger, staging.slot_bytes());
  downloads_ = device.new_copy_stream();
  uploads_ = device.new_copy_stream();
}

DeviceUpdates::Memory::Memory(DeviceMemory& device, Ledger& ledger, int64_t bytes) : ledger_(&ledger) {
  bytes_ = bytes;
  try {
    ledger.add(Tier::host, MemoryKind::staging, kInTransit, bytes);  // counts, also if it throws
    memory_ = device.allocate_pinned(bytes);
  } catch (...) {
    ledger.add(Tier::host, MemoryKind::staging, kInTransit, -bytes);
    throw;
  }
}

DeviceUpdates::Memory::~Memory() {
  if (bytes_ > 0) ledger_->add(Tier::host, MemoryKind::staging, kInTransit, -bytes_);
}

DeviceUpdates::Memory& DeviceUpdates::Memory::operator=(Memory&& other) noexcept {
  memory_.swap(other.memory_);
  std::swap(ledger_, other.ledger_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

void DeviceUpdates::wait(CopyStream::Mark& mark, const char* what) const {
  const auto begin = std::chrono::steady_clock::now();
  device_.wait([&] { mark.wait(); });
  if (on_wait_) on_wait_(what, begin);
}

void DeviceUpdates::begin_micro_step(bool is_last) {
  copies_ = is_last && plan_.device_staging.copies_early;
  copied_early_ = 0;
  for (Block& block : blocks_) block.copied.clear();
}

// The index of the last block that does not begin behind the address; 0 if all do.
std::size_t DeviceUpdates::block_at(const void* gradient) const {
  const auto after = std::ranges::upper_bound(blocks_, static_cast<const char*>(gradient), {}, &Block::begin);
  return after == blocks_.begin() ? 0 : static_cast<std::size_t>(after - blocks_.begin() - 1);
}

void DeviceUpdates::gradients_final(const zr_view& gradients, const zr_view& unchanged) {
  if (!copies_ || gradients.dtype != ZR_F32 || gradients.count == 0) return;
  const char *begin = bytes_of(gradients), *end = begin + gradients.count * kGradientSize;
  bool follows = false;
  if (unchanged.count > 0 && was_copied(unchanged)) {
    copy(begin, bytes_of(unchanged), follows);
    begin = bytes_of(unchanged) + unchanged.count * kGradientSize;
  }
  copy(begin, end, follows);
}

bool DeviceUpdates::was_copied(const zr_view& gradients) const {
  const char* const begin = bytes_of(gradients);
  const Block& block = blocks_[block_at(begin)];
  const int64_t first = (begin - block.begin) / kGradientSize;
  return first >= 0 && contains(block.copied, first, first + gradients.count);
}

// Enqueues copies of the gradients in this memory. follows: whether they follow the computation already.
void DeviceUpdates::copy(const char* begin, const char* end, bool& follows) {
  for (std::size_t i = block_at(begin); i < blocks_.size() && blocks_[i].begin < end; ++i) {
    Block& block = blocks_[i];
    const int64_t from = std::max<int64_t>(begin - block.begin, 0),
                  to = std::min<int64_t>(end - block.begin, block.count * kGradientSize);
    if (from >= to) continue;
    if (!std::exchange(follows, true)) downloads_->follow_computation();
    downloads_->to_host(block.begin + from, *block.gradients, block.offset * kGradientSize + from, to - from);
    copied_early_ += add_range(block.copied, from / kGradientSize, to / kGradientSize);
  }
}

std::vector<DeviceUpdates::Batch> DeviceUpdates::batches_of(const std::vector<update::UpdateSlice>& slices,
                                                            const std::vector<char>& touched) const {
  std::vector<std::vector<SliceRange>> parts(blocks_.size());
  for (const update::UpdateSlice& slice : slices) {
    if (!touched[slice.param]) continue;
    for (int64_t skip = 0; skip < slice.count;) {
      const char* const begin = bytes_of(slice.grad) + skip * kGradientSize;
      const std::size_t index = block_at(begin);
      const int64_t at = (begin - blocks_[index].begin) / kGradientSize,
                    count = std::min(slice.count - skip, blocks_[index].count - at);
      if (at < 0 || count <= 0) fail_internal("an update slice is not in a block of its plan");
      parts[index].push_back({&slice, skip, count, at});
      skip += count;
    }
  }
  std::vector<Batch> batches;
  for (std::size_t i = 0; i < parts.size(); ++i)
    if (!parts[i].empty()) batches.push_back({i, std::move(parts[i])});
  return batches;
}

// Copies what the update reads and what is not in host memory yet.
void DeviceUpdates::start(Batch& batch) {
  batch.slot = next_slot_;
  next_slot_ = (next_slot_ + 1) % slots_.size();
  Slot& slot = slots_[batch.slot];
  if (slot.uploaded) wait(*slot.uploaded, "wait: weights to the device");
  const Block& block = blocks_[batch.block];
  const PinnedMemory& gradients = block.gradients ? *block.gradients : *slot.memory;
  const int64_t offset = block.gradients ? block.offset * kGradientSize : plan_.device_staging.largest * kWeightStride;
  for (const SliceRange& part : batch.parts) {
    const update::UpdateSlice& slice = *part.slice;
    if (!contains(block.copied, part.at, part.at + part.count))
      downloads_->to_host(bytes_of(slice.grad) + part.skip * kGradientSize, gradients, offset + part.at * kGradientSize,
                          part.count * kGradientSize);
    const int64_t size = size_of(slice.weight.dtype);
    if (!plan_.has_master_of(slice.param))  // the weights are the masters
      downloads_->to_host(bytes_of(slice.weight) + part.skip * size, *slot.memory, part.at * kWeightStride,
                          part.count * size);
  }
  batch.downloaded = downloads_->mark();
}

std::vector<update::UpdateSlice> DeviceUpdates::on_host(const Batch& batch) const {
  const Block& block = blocks_[batch.block];
  char* const slot = slots_[batch.slot].memory->data();
  char* const gradients = block.gradients ? block.gradients->data() + block.offset * kGradientSize
                                          : slot + plan_.device_staging.largest * kWeightStride;
  std::vector<update::UpdateSlice> slices;
  for (const SliceRange& part : batch.parts) {
    update::UpdateSlice slice = update::slice_part(plan_, *part.slice, part.skip, part.count);
    slice.grad = {gradients + part.at * kGradientSize, part.count, ZR_F32, 0, kHostMemory};
    slice.weight = {slot + part.at * kWeightStride, part.count, slice.weight.dtype, 0, kHostMemory};
    slices.push_back(std::move(slice));
  }
  return slices;
}

void DeviceUpdates::upload(const Batch& batch) {
  Slot& slot = slots_[batch.slot];
  for (const SliceRange& part : batch.parts) {
    const zr_view& weight = part.slice->weight;
    const int64_t size = size_of(weight.dtype);
    uploads_->to_device(*slot.memory, part.at * kWeightStride, bytes_of(weight) + part.skip * size, part.count * size);
  }
  slot.uploaded = uploads_->mark();
}

void DeviceUpdates::for_each_slice_in_memory(const std::vector<update::UpdateSlice>& slices,
                                             const std::vector<char>& touched,
                                             const std::function<void(const std::vector<update::UpdateSlice>&)>& work) {
  std::vector<Batch> batches = batches_of(slices, touched);
  if (batches.empty()) return;
  downloads_->follow_computation();
  uploads_->follow_computation();
  try {
    start(batches.front());
    for (std::size_t i = 0; i < batches.size(); ++i) {
      if (i + 1 < batches.size()) start(batches[i + 1]);
      wait(*batches[i].downloaded, "wait: gradients from the device");
      work(on_host(batches[i]));
      upload(batches[i]);
    }
  } catch (...) {
    uploads_->lead_computation();
    throw;
  }
  uploads_->lead_computation();
}

}  // namespace zr::host::offload
