#include "comm/ordered_reduce.hpp"

#include <algorithm>

#include "zr/ordered_reduce.hpp"

namespace zr::host::comm {

void ordered_reduce(ThreadPool& pool, const zr_coll& coll, const zr_view& dst,
                    const std::vector<const void*>& sources) {
  const ReduceKind kind{coll.reduce, (coll.flags & ZR_COLL_ACCUMULATE) != 0, coll.src.dtype, dst.dtype};
  constexpr int64_t kGrain = 256;  // in blocks: the least work for which a thread is woken
  const int64_t blocks = (dst.count + kReduceBlock - 1) / kReduceBlock;
  pool.parallel_for(blocks, kGrain, [&](int64_t begin, int64_t end) {
    const int64_t first = begin * kReduceBlock;
    zr::ordered_reduce(kind, sources.data(), static_cast<int32_t>(sources.size()), &dst.data, 1, first,
                       std::min(dst.count, end * kReduceBlock) - first, false);
  });
}

}  // namespace zr::host::comm
