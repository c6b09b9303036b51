#include "traffic.hpp"

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "flat_transfer.hpp"
#include "host_gather.hpp"
#include "per_host_reduction.hpp"

namespace mpi {

namespace {
constexpr int64_t kSumBytes = sizeof(float);  // of an element of a sum that passes between hosts

using ByHost = std::vector<int64_t>;

// A value per host, to which ranges of hosts add.
class Ranges {
 public:
  explicit Ranges(int hosts) : changes_(static_cast<std::size_t>(hosts) + 1) {}
  void add(int first, int end, int64_t value) {
    changes_[static_cast<std::size_t>(first)] += value;
    changes_[static_cast<std::size_t>(end)] -= value;
  }
  ByHost values() const {
    ByHost sums(changes_.size());
    std::partial_sum(changes_.begin(), changes_.end(), sums.begin());
    sums.pop_back();
    return sums;
  }

 private:
  ByHost changes_;
};

class Traffic {
 public:
  Traffic(const zr::CollectiveParts& parts, const Hosts& hosts)
      : parts_(parts),
        hosts_(hosts),
        width_(zr::size_of(parts.coll.src.dtype)),
        dst_width_(zr::size_of(parts.coll.dst.dtype)),
        sent_(static_cast<std::size_t>(hosts.count())),
        received_(sent_) {}
  void add(Way way);
  void add_to(zr_traffic& sum) const;

 private:
  enum class Peers { all_ranks, one_per_host };  // of a rank: all others, or one on each other host

  int64_t elements() const { return parts_.elements(); }
  int64_t& at(ByHost& list, int host) const { return list[static_cast<std::size_t>(host)]; }
  template <class F>
  ByHost by_host(F&& of_rank) const;
  ByHost owned_elements() const;
  template <class F>
  ByHost owned_bytes(F&& bytes_of) const;
  void move(int from, int to, int64_t bytes);
  void exchange(ByHost& own, ByHost& others, const ByHost& bytes, Peers peers);
  void read_on_each_host(int64_t bytes);
  void add_flat();
  void add_rooted(bool root_sends);
  void add_gather();
  void add_ordered();
  void add_ordered_sums(const ByHost& owned);
  void add_per_host();

  const zr::CollectiveParts& parts_;
  const Hosts& hosts_;
  const int64_t width_, dst_width_;
  ByHost sent_, received_;
  int64_t inside_ = 0;
};

void Traffic::add(Way way) {
  switch (way) {
    case Way::flat: return add_flat();
    case Way::gather: return add_gather();
    case Way::ordered: return add_ordered();
    case Way::per_host: return add_per_host();
  }
}

void Traffic::add_to(zr_traffic& sum) const {
  for (std::size_t host = 0; host < sent_.size(); ++host) {
    sum.sent[host] += static_cast<uint64_t>(sent_[host]);
    sum.received[host] += static_cast<uint64_t>(received_[host]);
  }
  sum.inside += static_cast<uint64_t>(inside_);
}

// The sums over the ranks of each host.
template <class F>
ByHost Traffic::by_host(F&& of_rank) const {
  ByHost sums(sent_.size());
  for (int rank = 0; rank < parts_.world; ++rank) at(sums, hosts_.of(rank)) += of_rank(rank);
  return sums;
}

// From a rank of one host to a rank of another one, or of the same.
void Traffic::move(int from, int to, int64_t bytes) {
  if (from == to) {
    inside_ += bytes;
  } else {
    at(sent_, from) += bytes;
    at(received_, to) += bytes;
  }
}

// Each rank sends data of its own to its peers; `bytes` counts it for all ranks of a host, once for each peer. `own` is
// sent_ then, and `others` is received_. With these swapped, each rank receives as much from each of its peers.
void Traffic::exchange(ByHost& own, ByHost& others, const ByHost& bytes, Peers peers) {
  const auto peers_on = [&](int host) { return peers == Peers::all_ranks ? hosts_.size(host) : 1; };
  const int64_t total = std::accumulate(bytes.begin(), bytes.end(), int64_t{0});
  const int all_peers = peers == Peers::all_ranks ? parts_.world : hosts_.count();
  for (int host = 0; host < hosts_.count(); ++host) {
    const int64_t of_host = bytes[static_cast<std::size_t>(host)];
    at(own, host) += of_host * (all_peers - peers_on(host));
    at(others, host) += (total - of_host) * peers_on(host);
    if (peers == Peers::all_ranks) inside_ += of_host * (hosts_.size(host) - 1);
  }
}

// In a step of the ranks of a host, all but one read so many bytes of another one, or one reads them of all others.
void Traffic::read_on_each_host(int64_t bytes) { inside_ += bytes * (parts_.world - hosts_.count()); }

void Traffic::add_flat() {
  switch (parts_.coll.op) {
    case ZR_BARRIER: return;
    case ZR_BROADCAST:
    case ZR_SCATTER: return add_rooted(true);
    case ZR_REDUCE:
    case ZR_GATHER: return add_rooted(false);
    case ZR_ALL_GATHER:
      return exchange(sent_, received_,
                      by_host([&](int rank) { return parts_.extent(rank, rank, nullptr, nullptr).count * width_; }),
                      Peers::all_ranks);
    case ZR_ALL_TO_ALL:
      return exchange(received_, sent_,
                      by_host([&](int rank) { return parts_.counts[static_cast<std::size_t>(rank)] * width_; }),
                      Peers::all_ranks);
    default: break;
  }
  const auto reduced = [&](int rank) { return FlatTransfer::reduced_by(parts_, rank).count; };
  exchange(received_, sent_, by_host([&](int rank) { return reduced(rank) * width_; }), Peers::all_ranks);
  if (FlatTransfer::shares_results(parts_))
    exchange(sent_, received_, by_host([&](int rank) { return reduced(rank) * dst_width_; }), Peers::all_ranks);
}

// All other ranks exchange their part with the root.
void Traffic::add_rooted(bool root_sends) {
  const int root = parts_.coll.root, home = hosts_.of(root);
  const ByHost bytes = by_host([&](int rank) {
    if (rank == root) return int64_t{0};
    return parts_.extent(root_sends ? root : rank, root_sends ? rank : root, nullptr, nullptr).count * parts_.width();
  });
  for (int host = 0; host < hosts_.count(); ++host)
    move(root_sends ? home : host, root_sends ? host : home, bytes[static_cast<std::size_t>(host)]);
}

void Traffic::add_gather() {
  const auto bytes_of = [&](int rank) {
    if (!parts_.sends(rank)) return int64_t{0};
    return HostGather::part_bytes(parts_, parts_.extent(rank, rank, nullptr, nullptr).count);
  };
  exchange(sent_, received_, by_host(bytes_of), Peers::one_per_host);
  if (!(parts_.coll.flags & ZR_COLL_SHARED)) read_on_each_host(elements() * dst_width_);
}

// Elements of the pieces whose owners are on each host, of a sum in rank order.
ByHost Traffic::owned_elements() const {
  if (parts_.coll.op == ZR_REDUCE_SCATTER)
    return by_host([&](int rank) { return parts_.counts[static_cast<std::size_t>(rank)]; });
  ByHost owned(sent_.size());
  at(owned, parts_.coll.op == ZR_REDUCE ? hosts_.of(parts_.coll.root) : owners_host(hosts_)) = elements();
  return owned;
}

void Traffic::add_ordered() {
  const ByHost owned = owned_elements();
  add_ordered_sums(owned);
  if (parts_.coll.op != ZR_ALL_REDUCE) return;
  ByHost results = owned;
  for (int64_t& bytes : results) bytes *= dst_width_;
  exchange(sent_, received_, results, Peers::one_per_host);
  read_on_each_host(elements() * dst_width_);
}

// By the host of the owner: sums along the route, elements of the ranks of other hosts, the content of the owner's dst
// to the first host, the result from the last one.
void Traffic::add_ordered_sums(const ByHost& owned) {
  const int hosts = hosts_.count();
  Ranges hops(hosts), added(hosts), leaving(hosts);
  for (int home = 0; home < hosts; ++home) {
    const int64_t count = owned[static_cast<std::size_t>(home)], bytes = count * width_;
    const SumRoute route = sum_route(parts_, hosts_, home);
    hops.add(route.first, route.last, count * kSumBytes);
    added.add(route.first, route.last + 1, bytes);
    leaving.add(0, route.first, bytes);
    leaving.add(route.last + 1, hosts, bytes);
    const int ranks_of_route = hosts_.first(route.last + 1) - hosts_.first(route.first);
    at(received_, home) += bytes * (parts_.world - ranks_of_route);
    if ((parts_.coll.flags & ZR_COLL_ACCUMULATE) && route.first < home) move(home, route.first, count * dst_width_);
    if (route.last > home) move(route.last, home, count * dst_width_);
  }
  const ByHost hop_bytes = hops.values(), added_bytes = added.values(), leaving_bytes = leaving.values();
  for (int host = 0; host < hosts; ++host) {
    const auto i = static_cast<std::size_t>(host);
    if (hop_bytes[i] > 0) move(host, host + 1, hop_bytes[i]);
    sent_[i] += leaving_bytes[i] * hosts_.size(host);
    inside_ += added_bytes[i] * (hosts_.size(host) - 1);
  }
}

// bytes_of(elements), summed over the pieces of a sum that is not in rank order, by the hosts of their owners.
template <class F>
ByHost Traffic::owned_bytes(F&& bytes_of) const {
  if (parts_.coll.op == ZR_REDUCE_SCATTER)
    return by_host([&](int rank) { return bytes_of(parts_.counts[static_cast<std::size_t>(rank)]); });
  ByHost owned(sent_.size());
  if (parts_.coll.op == ZR_REDUCE) {
    at(owned, hosts_.of(parts_.coll.root)) = bytes_of(elements());
    return owned;
  }
  // The owners of an all_reduce repeat after as many pieces as there are ranks. Only the last piece may be shorter, and
  // full ones are a multiple of the blocks that are quantized.
  constexpr int64_t kFull = HostReduction::kPieceElements;
  const int64_t pieces = (elements() + kFull - 1) / kFull, missing = pieces * kFull - elements();
  for (int64_t number = 0; number < std::min<int64_t>(pieces, parts_.world); ++number) {
    const int64_t repeats = (pieces - number + parts_.world - 1) / parts_.world;
    const bool has_last = number + (repeats - 1) * parts_.world == pieces - 1;
    at(owned, hosts_.of(PerHostReduction::owner_of(parts_, number))) +=
        bytes_of(repeats * kFull - (has_last ? missing : 0));
  }
  return owned;
}

void Traffic::add_per_host() {
  exchange(received_, sent_, owned_bytes([&](int64_t count) { return PerHostReduction::sum_bytes(parts_, count); }),
           Peers::one_per_host);
  read_on_each_host(elements() * width_);
  if (parts_.coll.op != ZR_ALL_REDUCE) return;
  exchange(sent_, received_, owned_bytes([&](int64_t count) { return PerHostReduction::result_bytes(parts_, count); }),
           Peers::one_per_host);
  read_on_each_host(elements() * dst_width_);
}
}  // namespace

void add_traffic(const zr_coll& coll, const MpiOptions& options, zr_traffic& sum) {
  if (sum.n_hosts == 0 || *std::min_element(sum.ranks, sum.ranks + sum.n_hosts) < 1)
    throw zr::PluginError(ZR_INVALID, "traffic(): a host has no ranks");
  const Hosts hosts(std::vector<int>(sum.ranks, sum.ranks + sum.n_hosts));
  zr::CollectiveParts parts;
  parts.assign(coll, 0, hosts.first(hosts.count()));
  if (parts.is_message() || !parts.has_known_counts())
    throw zr::PluginError(ZR_UNSUPPORTED, "communicator \"mpi\" does not know the bytes of " +
                                              std::string(zr::name_of_op(coll.op)) +
                                              ": they depend on the other ranks");
  Traffic traffic(parts, hosts);
  traffic.add(way_of(parts, hosts, options));
  traffic.add_to(sum);
}

}  // namespace mpi
