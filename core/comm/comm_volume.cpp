#include "comm/comm_volume.hpp"

#include <algorithm>
#include <numeric>

#include "base/dtype.hpp"
#include "comm/coll.hpp"

namespace zr::host::comm {

CommVolume& CommVolume::operator+=(const CommVolume& other) {
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] += other.bytes[i];
    calls[i] += other.calls[i];
  }
  control_bytes += other.control_bytes;
  return *this;
}

int64_t CommVolume::total() const { return std::accumulate(bytes.begin(), bytes.end(), int64_t{0}); }

void CommVolumeCounter::set_planned_buffer(NonPaddingRanges planned) {
  remove_buffer(planned.base);
  Buffer buffer{std::move(planned), {}};
  int64_t sum = 0;
  for (const auto& [first, end] : buffer.non_padding.ranges) {
    buffer.preceding.push_back(sum);
    sum += end - first;
  }
  buffers_.push_back(std::move(buffer));
}

void CommVolumeCounter::remove_buffer(const void* base) {
  std::erase_if(buffers_, [&](const Buffer& b) { return b.non_padding.base == base; });
}

int64_t CommVolumeCounter::Buffer::non_padding_before(int64_t element) const {
  const auto& ranges = non_padding.ranges;
  const auto after =
      std::partition_point(ranges.begin(), ranges.end(), [&](const auto& r) { return r.first < element; });
  if (after == ranges.begin()) return 0;
  const auto range = after - 1;
  return preceding[static_cast<std::size_t>(range - ranges.begin())] + std::min(range->second, element) - range->first;
}

const CommVolumeCounter::Buffer* CommVolumeCounter::find(const zr_view& view) const {
  const auto* at = static_cast<const char*>(view.data);
  for (const Buffer& buffer : buffers_) {
    const NonPaddingRanges& planned = buffer.non_padding;
    if (planned.dtype == view.dtype && at >= planned.base &&
        at < planned.base + planned.elements * size_of(planned.dtype))
      return &buffer;
  }
  return nullptr;
}

int64_t CommVolumeCounter::non_padding_elements(const zr_view& dst, int64_t dst_first, const zr_view& src,
                                                int64_t src_first, int64_t count) const {
  for (const auto& [view, first] : {std::pair(&dst, dst_first), std::pair(&src, src_first)}) {
    const Buffer* buffer = find(*view);
    if (!buffer) continue;
    const int64_t begin = (bytes_of(*view) - buffer->non_padding.base) / size_of(view->dtype) + first;
    return buffer->non_padding_before(begin + count) - buffer->non_padding_before(begin);
  }
  return count;
}

int64_t CommVolumeCounter::received_bytes(const zr_coll& coll) const {
  const int64_t others = world_ - 1, src_bytes = size_of(coll.src.dtype), dst_bytes = size_of(coll.dst.dtype),
                n = total_of(coll, world_);
  const auto non_padding_of_both = [&](int64_t dst_first, int64_t src_first, int64_t count) {
    return non_padding_elements(coll.dst, dst_first, coll.src, src_first, count);
  };
  switch (coll.op) {
    case ZR_ALL_REDUCE: {
      const int64_t first = n * rank_ / world_,
                    share = non_padding_of_both(first, first, n * (rank_ + 1) / world_ - first);
      return others * share * src_bytes + (non_padding_of_both(0, 0, n) - share) * dst_bytes;
    }
    case ZR_REDUCE_SCATTER: {
      const ElementRange part = part_of_rank(coll.counts, n, rank_, world_);
      return others * non_padding_of_both(0, part.first, part.count) * src_bytes;
    }
    case ZR_REDUCE: return rank_ == coll.root ? others * non_padding_of_both(0, 0, n) * src_bytes : 0;
    case ZR_ALL_GATHER:
    case ZR_GATHER: {
      if (!writes_dst(coll, rank_)) return 0;
      const ElementRange part = part_of_rank(coll.counts, n, rank_, world_);
      if (coll.flags & ZR_COLL_SHARED)  // the ranks of each other host receive it together
        return (hosts_ - 1) * non_padding_elements(coll.dst, part.first, {}, 0, part.count) * dst_bytes;
      return (non_padding_elements(coll.dst, 0, {}, 0, n) -
              non_padding_elements(coll.dst, part.first, {}, 0, part.count)) *
             dst_bytes;
    }
    case ZR_BROADCAST:
    case ZR_SCATTER:
      return rank_ == coll.root ? 0 : non_padding_elements(coll.dst, 0, {}, 0, coll.dst.count) * dst_bytes;
    case ZR_ALL_TO_ALL:
      return (coll.dst.count -
              part_of_rank(coll.recv_counts ? coll.recv_counts : coll.counts, coll.dst.count, rank_, world_).count) *
             dst_bytes;
    case ZR_RECV: return coll.dst.count * dst_bytes;
    default: return 0;
  }
}

void CommVolumeCounter::add(uint32_t op, int64_t bytes, bool control) {
  if (control) {
    count_.control_bytes += bytes;
  } else {
    count_.bytes[op] += bytes;
    ++count_.calls[op];
  }
}

}  // namespace zr::host::comm
