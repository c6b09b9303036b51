#include "sum_route.hpp"

#include <algorithm>

#include "quantization.hpp"

namespace mpi {

// For each side of the owner's host, the way with fewer bytes per element: the sum of the hosts, or the elements of
// each rank. A sum that has passed the owner's host returns in the type of dst; one that begins with dst begins on the
// first host. Of a reduce, only the root knows that type, so the sum does not pass it. The sum of an all_reduce passes
// all.
SumRoute sum_route(const zr::CollectiveParts& parts, const Hosts& hosts, int home) {
  const zr_coll& coll = parts.coll;
  const int64_t width = zr::size_of(coll.src.dtype), sum = sizeof(float), last = hosts.count() - 1;
  const int64_t returned = zr::size_of(coll.dst.dtype);
  const int64_t begins = coll.flags & ZR_COLL_ACCUMULATE ? returned : 0;
  const int64_t ranks_before = hosts.first(home), ranks_after = hosts.first(hosts.count()) - hosts.first(home + 1);
  if (coll.op == ZR_ALL_REDUCE) return {0, static_cast<int>(last)};
  SumRoute route{home, home};
  if (home > 0 && sum * home + begins < width * ranks_before) route.first = 0;
  if (coll.op != ZR_REDUCE && sum * (last - home) + returned < width * ranks_after) route.last = static_cast<int>(last);
  return route;
}

namespace {
bool is_summed_in_fp32(const zr_coll& coll) {
  return coll.reduce == ZR_SUM && (coll.src.dtype == ZR_F32 || coll.src.dtype == ZR_BF16 || coll.src.dtype == ZR_F16);
}

// Per element that a rank on host `home` needs.
int64_t bytes_between_hosts(const zr::CollectiveParts& parts, const Hosts& hosts, int home) {
  const zr_coll& coll = parts.coll;
  const SumRoute way = sum_route(parts, hosts, home);
  const int64_t width = zr::size_of(coll.src.dtype), returned = zr::size_of(coll.dst.dtype);
  const int64_t others = way.first == 0 ? 0 : hosts.first(home);
  const int64_t later = way.last == home ? hosts.first(hosts.count()) - hosts.first(home + 1) : 0;
  int64_t bytes = width * (others + later) + int64_t{sizeof(float)} * (way.last - way.first);
  if (way.last > home) bytes += returned;
  if (way.first < home && (coll.flags & ZR_COLL_ACCUMULATE)) bytes += returned;
  if (coll.op == ZR_ALL_REDUCE) bytes += returned * (hosts.count() - 1);
  return bytes;
}
}  // namespace

Way sum_way(const zr::CollectiveParts& parts, const Hosts& hosts) {
  const zr_coll& coll = parts.coll;
  const bool accumulates = (coll.flags & ZR_COLL_ACCUMULATE) != 0;
  if (!parts.is_reduction() || !is_summed_in_fp32(coll)) return Way::flat;
  if (accumulates && coll.op != ZR_REDUCE_SCATTER) return Way::flat;
  if (bits_of(coll) != 0) return Way::per_host;
  const int64_t width = zr::size_of(coll.src.dtype);
  int64_t flat = 0, ordered = 0, per_host = 0;  // over all elements; of an all_reduce, over as many as there are ranks
  for (int host = 0; host < hosts.count(); ++host) {
    int64_t elements = hosts.size(host);
    if (coll.op == ZR_REDUCE_SCATTER) {
      const auto* const starts = parts.starts.data();
      elements = starts[hosts.first(host + 1)] - starts[hosts.first(host)];
    } else if (coll.op == ZR_REDUCE) {
      elements = hosts.of(coll.root) == host ? 1 : 0;
    }
    const int64_t others = hosts.first(hosts.count()) - hosts.size(host);
    const int64_t shares = coll.op == ZR_ALL_REDUCE ? zr::size_of(coll.dst.dtype) : 0;
    flat += elements * others * (width + shares);
    ordered += elements * bytes_between_hosts(parts, hosts, coll.op == ZR_ALL_REDUCE ? owners_host(hosts) : host);
    per_host += elements * (hosts.count() - 1) * (int64_t{sizeof(float)} + shares);
  }
  if ((coll.flags & ZR_COLL_ANY_ORDER) && per_host < std::min(flat, ordered)) return Way::per_host;
  return ordered < flat ? Way::ordered : Way::flat;
}

}  // namespace mpi
