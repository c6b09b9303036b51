#include "operation.hpp"

#include <algorithm>

#include "zr/round_up.hpp"

namespace shm {

void Operation::assign(const zr_coll& given, int own_rank, int ranks) {
  done = zr::Done();
  state = State::waiting;
  message = nullptr;
  finish = Finish::no_rank;
  staged = round_filled = false;
  round = rounds = 0;
  CollectiveParts::assign(given, own_rank, ranks);
}

Extent share(int64_t n, int r, int world) {
  const auto cut = [&](int64_t i) { return std::min(n, zr::round_up<int64_t>(n * i / world, 64)); };
  return {cut(r), cut(r + 1) - cut(r), cut(r)};
}

Route route_of(const zr::CollectiveParts& parts, const MemoryTraits& memory) {
  if (parts.coll.op == ZR_BARRIER) return Route::nothing;
  const bool all_reduce = parts.coll.op == ZR_ALL_REDUCE, reduce = parts.coll.op == ZR_REDUCE;
  // With ACCUMULATE the results of an all_reduce may differ between ranks, so each rank computes its own.
  const bool one_result = (all_reduce && !(parts.coll.flags & ZR_COLL_ACCUMULATE)) || reduce;
  if (memory.src_shared && memory.dst_shared && one_result) return Route::push;
  // Peers would read memory while this rank writes it.
  const bool conflict = memory.in_place && (all_reduce || parts.coll.op == ZR_ALL_TO_ALL);
  return memory.src_shared && !conflict ? Route::pull : Route::stage;
}

}  // namespace shm
