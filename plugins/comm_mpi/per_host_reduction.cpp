#include "per_host_reduction.hpp"

#include <algorithm>

#include "rounding.hpp"

namespace mpi {

int64_t PerHostReduction::sum_bytes(const zr::CollectiveParts& parts, int64_t count) {
  const int bits = bits_of(parts.coll);
  return bits ? encoded_bytes(bits, count) : count * int64_t{sizeof(float)};
}

int64_t PerHostReduction::result_bytes(const zr::CollectiveParts& parts, int64_t count) {
  const int bits = bits_of(parts.coll);
  return bits ? encoded_bytes(bits, count) : count * zr::size_of(parts.coll.dst.dtype);
}

// Where the sum of another host arrives.
char* PerHostReduction::sum_of_host(const Channel& channel, const Work& work, int host) const {
  return slot_of(channel, work, host < channel.hosts.of(parts_.rank) ? host : host - 1);
}

void PerHostReduction::receive(Channel& channel, Work& work) {
  const Piece& piece = piece_of(work);
  const Hosts& hosts = channel.hosts;
  if (piece.owner != parts_.rank) return;
  for (int host = 0; host < hosts.count(); ++host)
    if (host != hosts.of(parts_.rank))
      receive_part(channel, work.arriving, sum_of_host(channel, work, host), sum_bytes(parts_, piece.count),
                   hosts.helper(host, piece.owner), Phase::sums);
}

bool PerHostReduction::begins_here(const Channel& channel, const Piece& piece) const {
  const int home = channel.hosts.of(piece.owner);
  return home != channel.hosts.of(parts_.rank) || (home == 0 && !accumulates());
}

// Adding +0 would only change -0, which passes as 0.
bool PerHostReduction::needs_sum(const Channel& channel, const Piece& piece) const {
  return bits() == 0 || piece.owner == parts_.rank || channel.hosts.size(channel.hosts.of(parts_.rank)) > 1;
}

// The owner's sum begins with dst, if it accumulates, and with the hosts before its own.
void PerHostReduction::prepare(Channel& channel, Work& work) {
  const Piece& piece = piece_of(work);
  if (begins_here(channel, piece)) return;
  float* const sum = sum_of(channel, work);
  if (accumulates())
    upcast(sum, dst_of(piece), parts_.coll.dst.dtype, piece.count);
  else
    std::fill_n(sum, piece.count, 0.0f);
  add_sums(channel, work, 0, channel.hosts.of(parts_.rank));
}

void PerHostReduction::add_sums(const Channel& channel, const Work& work, int first_host, int end_host) {
  float* const sum = sum_of(channel, work);
  const int64_t count = piece_of(work).count;
  for (int host = first_host; host < end_host; ++host) {
    const char* const other = sum_of_host(channel, work, host);
    if (bits()) {
      channel.quantization.add(bits(), other, count, sum);
    } else {
      const void* const source = other;
      void* const out = sum;
      channel.reduce({ZR_SUM, true, ZR_F32, ZR_F32}, &source, 1, &out, 1, 0, count, false);
    }
  }
}

void PerHostReduction::finish(Channel& channel, Work& work) {
  const Piece& piece = piece_of(work);
  const Hosts& hosts = channel.hosts;
  float* const sum = sum_of(channel, work);
  if (piece.owner == parts_.rank) {
    add_sums(channel, work, hosts.of(parts_.rank) + 1, hosts.count());
    work.has_result = true;
    if (is_all_reduce()) return send_result(channel, work);
    return round_to(dst_of(piece), parts_.coll.dst.dtype, sum, piece.count);
  }
  void* const leaves = bits() ? static_cast<void*>(rounded_of(channel, work)) : sum;
  if (bits() && needs_sum(channel, piece))
    channel.quantization.encode(bits(), ZR_F32, sum, piece.count, leaves);
  else if (bits())
    channel.quantization.encode(bits(), parts_.coll.src.dtype, src_of(piece), piece.count, leaves);
  send_part(channel, work.leaving, leaves, sum_bytes(parts_, piece.count), piece.owner, Phase::sums);
  if (!is_all_reduce()) return;
  // dst may be src: no rank of this host reads these elements any more. A quantized result replaces the sum.
  work.keeps_until_result = bits() != 0;
  void* const arrives = bits() ? static_cast<void*>(sum) : dst_of(piece);
  receive_part(channel, work.result, arrives, result_bytes(parts_, piece.count), piece.owner, Phase::results);
}

// To one rank of every other host. The owner uses what they get.
void PerHostReduction::send_result(Channel& channel, Work& work) {
  const Piece& piece = piece_of(work);
  const Hosts& hosts = channel.hosts;
  const zr_dtype dtype = parts_.coll.dst.dtype;
  const float* const sum = sum_of(channel, work);
  const void* leaves = dst_of(piece);
  if (bits()) {
    leaves = rounded_of(channel, work);
    channel.quantization.encode(bits(), ZR_F32, sum, piece.count, rounded_of(channel, work));
    channel.quantization.decode(bits(), leaves, dtype, piece.count, dst_of(piece));
  } else {
    round_to(dst_of(piece), dtype, sum, piece.count);
  }
  Requests& requests = bits() ? work.leaving : whole_;
  for (int host = 0; host < hosts.count(); ++host)
    if (host != hosts.of(parts_.rank))
      send_part(channel, requests, leaves, result_bytes(parts_, piece.count), hosts.helper(host, piece.owner),
                Phase::results);
}

void PerHostReduction::take_result(Channel& channel, Work& work) {
  const Piece& piece = piece_of(work);
  if (bits())
    channel.quantization.decode(bits(), sum_of(channel, work), parts_.coll.dst.dtype, piece.count, dst_of(piece));
}

}  // namespace mpi
