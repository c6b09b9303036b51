#include "comm/fold.hpp"

#include <algorithm>

#include "zr/fold.hpp"

namespace zr::host {

void fold(Pool& pool, const zr_coll& coll, const zr_view& dst, const std::vector<const void*>& sources) {
  const FoldKind kind{coll.reduce, (coll.flags & ZR_COLL_ACCUMULATE) != 0, coll.src.dtype, dst.dtype};
  constexpr int64_t kGrain = 256;  // blocks: what a thread is woken for
  const int64_t blocks = (dst.count + kFoldBlock - 1) / kFoldBlock;
  pool.parallel_for(blocks, kGrain, [&](int64_t begin, int64_t end) {
    const int64_t first = begin * kFoldBlock;
    zr::fold(kind, sources.data(), static_cast<int32_t>(sources.size()), &dst.data, 1, first,
             std::min(dst.count, end * kFoldBlock) - first, false);
  });
}

}  // namespace zr::host
