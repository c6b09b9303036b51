#include "state/state_buffers.hpp"

#include <algorithm>

#include "base/dtype.hpp"
#include "plan/disk_staging.hpp"

namespace zr::host::state {

namespace {
MemoryKind kind_of(uint32_t role) {
  return role == ZR_ROLE_WEIGHT || role == ZR_ROLE_WEIGHT_SHARD ? MemoryKind::weights
         : role == ZR_ROLE_BUCKET                               ? MemoryKind::buckets
         : role == ZR_ROLE_ALL_GATHER                           ? MemoryKind::all_gather
                                                                : MemoryKind::gradients;
}

bool holds_weights(uint32_t role) {
  return role == ZR_ROLE_WEIGHT || role == ZR_ROLE_WEIGHT_SHARD || role == ZR_ROLE_ALL_GATHER;
}

std::vector<comm::NonPaddingRanges> non_padding_ranges(const plan::MemoryPlan& plan,
                                                       const std::vector<void*>& buffers) {
  std::vector<comm::NonPaddingRanges> result;
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    const plan::Buffer& buffer = plan.rank_plan.buffers[i];
    comm::NonPaddingRanges non_padding{static_cast<const char*>(buffers[i]), buffer.dtype, buffer.elements, {}};
    for (const auto* pieces : {&plan.rank_plan.weights, &plan.rank_plan.reduced_gradients})
      for (const plan::Piece& piece : *pieces)
        if (piece.buffer == i) non_padding.ranges.emplace_back(piece.offset, piece.offset + piece.count);
    std::sort(non_padding.ranges.begin(), non_padding.ranges.end());
    if (!non_padding.ranges.empty()) result.push_back(std::move(non_padding));
  }
  return result;
}
}  // namespace

StateBuffers::StateBuffers(const job::RankContext& context, offload::Tiers& tiers)
    : context_(context), disk_buffers_(nullptr, DiskBuffersDeleter{&context.comm}) {
  const plan::MemoryPlan& plan = context.plan;
  if (plan_disk_staging(plan).any) {
    disk_buffers_.reset(new offload::DiskBackedBuffers(plan, tiers, context.comm, context.ledger));
    context.comm.set_collective_staging(disk_buffers_.get());
  }
  for (const plan::Buffer& buffer : plan.rank_plan.buffers) {
    allocate(buffer, plan.input.tiers[static_cast<std::size_t>(plan.tier_of(buffer))].tier);
    views_.push_back({memory_.back(), buffer.elements, buffer.dtype, 0, context.memory_device()});
  }
  for (comm::NonPaddingRanges& non_padding : non_padding_ranges(plan, memory_))
    context.comm.set_planned_buffer(std::move(non_padding));
}

void StateBuffers::allocate(const plan::Buffer& b, Tier tier) {
  comm::CommRuntime& comm = context_.comm;
  const int64_t bytes = b.elements * size_of(b.dtype);
  if (void* on_disk = disk_buffers_ ? disk_buffers_->base(memory_.size()) : nullptr) {
    owned_.emplace_back(nullptr, Free{&comm});
    memory_.push_back(on_disk);
    readers_.push_back(nullptr);
    return;
  }
  const void* reader = nullptr;
  void* writer = nullptr;
  if (b.shared)
    std::tie(writer, reader) = comm.allocate_shared(bytes, b.bytes(context_.plan.input.location_of(comm.rank())),
                                                    Tier::device, kind_of(b.role), b.tag);
  else if (context_.device)
    writer = comm.allocate_on_device(bytes, kind_of(b.role), b.tag);
  else
    writer = comm.allocate(bytes, 64, tier, kind_of(b.role), b.tag);
  owned_.emplace_back(writer, Free{&comm});
  memory_.push_back(writer);
  readers_.push_back(reader);
}

void StateBuffers::free_all_but_weights() {
  disk_buffers_.reset();
  for (std::size_t i = 0; i < owned_.size(); ++i)
    if (!holds_weights(context_.plan.rank_plan.buffers[i].role)) owned_[i].reset();
}

}  // namespace zr::host::state
