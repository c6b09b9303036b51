#include "ordered_reduction.hpp"

#include <algorithm>

#include "rounding.hpp"
#include "sum_route.hpp"

namespace mpi {

int OrderedReduction::owner_of(const Channel& channel, int64_t number) const {
  const int host = owners_host(channel.hosts);
  return channel.hosts.first(host) + static_cast<int>(number % channel.hosts.size(host));
}

bool OrderedReduction::passes_here(const Channel& channel, const Piece& piece) const {
  const Hosts& hosts = channel.hosts;
  return sum_route(parts_, hosts, hosts.of(piece.owner)).contains(hosts.of(parts_.rank));
}

bool OrderedReduction::begins_here(const Channel& channel, const Piece& piece) const {
  const Hosts& hosts = channel.hosts;
  const int host = hosts.of(parts_.rank), home = hosts.of(piece.owner);
  const bool has_elements = host == home && hosts.first(home) > 0;
  return host == sum_route(parts_, hosts, home).first && !accumulates() && !has_elements;
}

bool OrderedReduction::needs_slot(const Channel& channel, int home) const {
  const SumRoute way = sum_route(parts_, channel.hosts, home);
  return way.first > 0 || way.last < channel.hosts.count() - 1;
}

// Where the elements of a rank of another host arrive.
char* OrderedReduction::elements_of(const Channel& channel, const Work& work, int rank) const {
  return slot_of(channel, work, rank < parts_.rank ? rank : rank - 1);
}

void OrderedReduction::receive(Channel& channel, Work& work) {
  const Piece& piece = piece_of(work);
  const Hosts& hosts = channel.hosts;
  const int host = hosts.of(parts_.rank), home = hosts.of(piece.owner);
  const SumRoute way = sum_route(parts_, hosts, home);
  const int64_t sum_bytes = piece.count * int64_t{sizeof(float)}, dst_width = zr::size_of(parts_.coll.dst.dtype);
  if (host > way.first)
    receive_part(channel, work.arriving, sum_of(channel, work), sum_bytes, hosts.helper(host - 1, piece.owner),
                 Phase::sums);
  const bool has_seed = accumulates() && way.first < home;
  if (has_seed && host == way.first) {
    const bool is_rounded = parts_.coll.dst.dtype != ZR_F32;
    void* const to = is_rounded ? static_cast<void*>(rounded_of(channel, work)) : sum_of(channel, work);
    receive_part(channel, work.arriving, to, piece.count * dst_width, piece.owner, Phase::seeds);
  }
  if (has_seed && host == home)
    send_part(channel, work.arriving, dst_of(piece), piece.count * dst_width, hosts.helper(way.first, piece.owner),
              Phase::seeds);
  if (work.slot >= 0)
    for (int rank = 0; rank < parts_.world; ++rank)
      if (!way.contains(hosts.of(rank)))
        receive_part(channel, work.arriving, elements_of(channel, work, rank),
                     piece.count * zr::size_of(parts_.coll.src.dtype), rank, Phase::parts);
}

// The sum before the ranks of this host add their elements.
void OrderedReduction::prepare(Channel& channel, Work& work) {
  const Piece& piece = piece_of(work);
  const Hosts& hosts = channel.hosts;
  const int host = hosts.of(parts_.rank), home = hosts.of(piece.owner);
  const SumRoute way = sum_route(parts_, hosts, home);
  if (host > way.first || begins_here(channel, piece)) return;
  float* const sum = sum_of(channel, work);
  if (!accumulates())
    std::fill_n(sum, piece.count, 0.0f);
  else if (host == home)
    upcast(sum, dst_of(piece), parts_.coll.dst.dtype, piece.count);
  else if (parts_.coll.dst.dtype != ZR_F32)
    upcast(sum, rounded_of(channel, work), parts_.coll.dst.dtype, piece.count);
  if (host == home) add_elements(channel, work, 0, hosts.first(home));
}

void OrderedReduction::add_elements(Channel& channel, const Work& work, int first_rank, int end_rank) {
  if (first_rank == end_rank) return;
  std::vector<const void*> sources;
  for (int rank = first_rank; rank < end_rank; ++rank) sources.push_back(elements_of(channel, work, rank));
  void* const sum = sum_of(channel, work);
  channel.reduce({ZR_SUM, true, parts_.coll.src.dtype, ZR_F32}, sources.data(), static_cast<int32_t>(sources.size()),
                 &sum, 1, 0, piece_of(work).count, false);
}

void OrderedReduction::finish(Channel& channel, Work& work) {
  const Piece& piece = piece_of(work);
  const Hosts& hosts = channel.hosts;
  const int host = hosts.of(parts_.rank), home = hosts.of(piece.owner);
  const SumRoute way = sum_route(parts_, hosts, home);
  const zr_dtype dtype = parts_.coll.dst.dtype;
  const int64_t bytes = piece.count * zr::size_of(dtype);
  float* const sum = sum_of(channel, work);
  if (host == home && way.last == home) {
    add_elements(channel, work, hosts.first(home + 1), parts_.world);
    round_to(dst_of(piece), dtype, sum, piece.count);
    work.has_result = true;
    for (int other = 0; is_all_reduce() && other < home; ++other)
      send_part(channel, whole_, dst_of(piece), bytes, hosts.helper(other, piece.owner), Phase::results);
  } else if (host < way.last) {
    send_part(channel, work.leaving, sum, piece.count * int64_t{sizeof(float)}, hosts.helper(host + 1, piece.owner),
              Phase::sums);
  } else {
    void* const rounded = dtype == ZR_F32 ? static_cast<void*>(sum) : rounded_of(channel, work);
    if (rounded != sum) round_to(rounded, dtype, sum, piece.count);
    send_part(channel, work.leaving, rounded, bytes, piece.owner, Phase::results);
  }
  // dst may be src: no rank of this host reads these elements any more.
  Requests& result = is_all_reduce() ? work.result : whole_;
  if (is_all_reduce() ? !work.has_result : host == home && way.last > home)
    receive_part(channel, result, dst_of(piece), bytes,
                 is_all_reduce() ? piece.owner : hosts.helper(way.last, piece.owner), Phase::results);
}

}  // namespace mpi
