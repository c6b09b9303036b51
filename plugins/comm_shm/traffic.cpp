#include "traffic.hpp"

#include <string>

#include "operation.hpp"

namespace shm {

namespace {
// Each rank reduces its share of the sources. The results of an all_reduce go to all ranks. Those of a reduce, which go
// to the root, are not counted: only the root knows their type.
int64_t pushed_bytes(const zr::CollectiveParts& parts) {
  const zr_coll& coll = parts.coll;
  const int64_t results = coll.op == ZR_ALL_REDUCE ? zr::size_of(coll.dst.dtype) : 0;
  return coll.src.count * (zr::size_of(coll.src.dtype) + results) * (parts.world - 1);
}

// Of a gather, each rank's part is read by the receivers; otherwise each receiver reads its part of all sources. All
// ranks have the counts of an all_to_all.
int64_t pulled_bytes(const zr::CollectiveParts& parts) {
  const bool by_source = parts.coll.op == ZR_ALL_GATHER || parts.coll.op == ZR_GATHER;
  int64_t sources = 0, receivers = 0, elements = 0;
  for (int rank = 0; rank < parts.world; ++rank) {
    sources += parts.sends(rank);
    receivers += parts.receives(rank);
  }
  for (int rank = 0; rank < parts.world; ++rank) {
    const int64_t* const counts = parts.counts.data();
    const int64_t count = parts.extent(rank, rank, counts, counts).count;
    if (by_source)
      elements += count * (receivers - parts.receives(rank));
    else if (parts.receives(rank))
      elements += count * (sources - parts.sends(rank));
  }
  return elements * parts.width();
}
}  // namespace

void add_traffic(const zr_coll& coll, zr_traffic& sum) {
  if (sum.n_hosts != 1)
    throw zr::PluginError(ZR_UNSUPPORTED, "communicator \"shm\" works on one host, but the job has " +
                                              std::to_string(sum.n_hosts) + "; choose communicator = \"auto\"");
  if (sum.ranks[0] < 1) throw zr::PluginError(ZR_INVALID, "traffic(): the host has no ranks");
  zr::CollectiveParts parts;
  parts.assign(coll, 0, sum.ranks[0]);
  if (parts.is_message() || !parts.has_known_counts())
    throw zr::PluginError(ZR_UNSUPPORTED, "communicator \"shm\" does not know the bytes of " +
                                              std::string(name_of_op(coll.op)) + ": they depend on the other ranks");
  switch (route_of(parts, {true, true, parts.in_place})) {
    case Route::nothing: return;
    case Route::push: sum.inside += static_cast<uint64_t>(pushed_bytes(parts)); return;
    case Route::pull:
    case Route::stage: sum.inside += static_cast<uint64_t>(pulled_bytes(parts)); return;
  }
}

}  // namespace shm
