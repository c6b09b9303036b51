#include "comm/coll.hpp"

#include <fmt/format.h>
#include <xxhash.h>

#include <charconv>
#include <cstring>

#include "base/dtype.hpp"
#include "base/host_view.hpp"
#include "base/unknown_bits.hpp"
#include "control/call_mismatch.hpp"

namespace zr::host::comm {

bool is_message(const zr_coll& coll) { return coll.op == ZR_SEND || coll.op == ZR_RECV; }
bool is_reduction(const zr_coll& coll) {
  return coll.op == ZR_ALL_REDUCE || coll.op == ZR_REDUCE_SCATTER || coll.op == ZR_REDUCE;
}

bool reads_src(const zr_coll& coll, int rank) {
  if (coll.op == ZR_BROADCAST || coll.op == ZR_SCATTER) return rank == coll.root;
  return coll.op != ZR_RECV && coll.op != ZR_BARRIER;
}

bool writes_dst(const zr_coll& coll, int rank) {
  if (coll.op == ZR_REDUCE || coll.op == ZR_GATHER) return rank == coll.root;
  return coll.op != ZR_SEND && coll.op != ZR_BARRIER;
}

uint32_t flags_of_job(uint32_t flags, uint32_t gradients, uint32_t weights) {
  if (flags & ZR_COLL_GRADIENTS) flags |= gradients;
  if (flags & ZR_COLL_WEIGHTS) flags |= weights;
  return flags & ~(uint32_t{ZR_COLL_GRADIENTS} | ZR_COLL_WEIGHTS);
}

namespace {
int64_t sum_of(const int64_t* counts, int n) {
  int64_t sum = 0;
  for (int r = 0; r < n; ++r) sum += counts[r];
  return sum;
}
// all_gather, gather: src is one part of the full tensor.
bool gathers(const zr_coll& coll) { return coll.op == ZR_ALL_GATHER || coll.op == ZR_GATHER; }
// reduce_scatter, scatter: src is the full tensor.
bool scatters(const zr_coll& coll) { return coll.op == ZR_REDUCE_SCATTER || coll.op == ZR_SCATTER; }
}  // namespace

int64_t total_of(const zr_coll& coll, int world) {
  if (gathers(coll)) return coll.counts ? sum_of(coll.counts, world) : coll.src.count * world;
  if (scatters(coll)) return coll.counts ? sum_of(coll.counts, world) : coll.dst.count * world;
  if (coll.op == ZR_BARRIER) return 0;
  return coll.op == ZR_BROADCAST || coll.op == ZR_RECV ? coll.dst.count : coll.src.count;
}

ElementRange part_of_rank(const int64_t* counts, int64_t total, int r, int world) {
  if (counts) return {sum_of(counts, r), counts[r]};
  return {total / world * r, total / world};
}

uint64_t fingerprint_of(const zr_coll& coll, int world) {
  if (is_message(coll)) return 0;
  // Leaves out what may differ between ranks: the counts of an all_to_all, and a view that only the root has.
  const bool by_dst = coll.op == ZR_BROADCAST || coll.op == ZR_SCATTER;
  const bool has_both = coll.op == ZR_ALL_REDUCE || coll.op == ZR_REDUCE_SCATTER, exchanges = coll.op == ZR_ALL_TO_ALL;
  const struct {
    int64_t total;
    uint32_t op, reduce, flags;
    int32_t dtype, dst, root;
  } fields{exchanges ? 0 : total_of(coll, world),
           coll.op,
           coll.reduce,
           coll.flags,
           coll.op == ZR_BARRIER ? 0
           : by_dst              ? coll.dst.dtype
                                 : coll.src.dtype,
           has_both ? coll.dst.dtype : 0,
           coll.root};
  uint64_t hash = XXH3_64bits(&fields, sizeof fields);
  if (coll.counts && !exchanges) hash = XXH3_64bits_withSeed(coll.counts, static_cast<std::size_t>(world) * 8, hash);
  if (coll.label) hash = XXH3_64bits_withSeed(coll.label, std::strlen(coll.label), hash);
  return hash ? hash : 1;
}

void describe(const zr_coll& coll, int world, std::string& text, std::string_view call) {
  if (coll.op == ZR_BARRIER && !call.empty() && coll.label && call == coll.label) {
    text.assign(call);
    return;
  }
  text.assign(name_of_op(coll.op));
  text += " '";
  text += coll.label ? coll.label : "";
  text += "'";
  if (coll.op != ZR_BARRIER) {
    text += " (";
    text += name_of(coll.op == ZR_BROADCAST || coll.op == ZR_SCATTER || coll.op == ZR_RECV ? coll.dst.dtype
                                                                                           : coll.src.dtype);
    text += ", ";
    char digits[24];
    text.append(digits, std::to_chars(digits, digits + sizeof digits, total_of(coll, world)).ptr);
    text += ")";
  }
  if (call.empty()) return;
  text += control::kInCall;
  text += call;
}

namespace {
std::string view_problem(const char* name, const zr_view& view, const zr_device& device) {
  const std::string text = name;
  if (size_of(view.dtype) == 0) return text + " has an unknown dtype";
  if (view.count < 0) return fmt::format("{} has {} elements", text, view.count);
  if (!view.data && view.count > 0) return fmt::format("{} has {} elements but a null address", text, view.count);
  const bool on_device = view.device.type != ZR_DEVICE_CPU && view.device.type == device.type;
  return view_problem_on(on_device ? device : kHostMemory, text, view);
}

std::string length_problem(const char* name, int64_t actual, int64_t expected, const char* what) {
  if (actual == expected) return "";
  return fmt::format("{} has {} elements, {} has {}", name, actual, what, expected);
}

std::string lengths_problem(const zr_coll& coll, bool reads, bool writes, int rank, int world) {
  const auto first_of = [](const std::string& a, const std::string& b) { return a.empty() ? b : a; };
  if (coll.op == ZR_ALL_TO_ALL) {
    const int64_t* to = coll.counts;
    const int64_t* from = coll.recv_counts ? coll.recv_counts : to;
    const std::string sent = to ? length_problem("src", coll.src.count, sum_of(to, world), "the sent data") : "";
    if (!to && coll.src.count % world)
      return fmt::format("src has {} elements, which cannot be divided equally among {} ranks", coll.src.count, world);
    return first_of(
        sent, length_problem("dst", coll.dst.count, from ? sum_of(from, world) : coll.src.count, "the received data"));
  }
  const int64_t total = total_of(coll, world), local_count = part_of_rank(coll.counts, total, rank, world).count;
  const auto of = [&](const char* name, int64_t count, bool is_part) {
    return length_problem(name, count, is_part ? local_count : total, is_part ? "this rank's part" : "the full tensor");
  };
  if (reads && writes && !gathers(coll) && !scatters(coll))
    return length_problem("dst", coll.dst.count, coll.src.count, "src");
  return first_of(reads ? of("src", coll.src.count, gathers(coll)) : "",
                  writes ? of("dst", coll.dst.count, scatters(coll)) : "");
}

// Of root, peer and reduction, as far as the operation has them.
std::string parameter_problem(const zr_coll& coll, int rank, int world) {
  const bool rooted = coll.op == ZR_BROADCAST || coll.op == ZR_REDUCE || coll.op == ZR_GATHER || coll.op == ZR_SCATTER;
  if (rooted && (coll.root < 0 || coll.root >= world))
    return fmt::format("root {} is out of range (world size {})", coll.root, world);
  if (is_message(coll) && (coll.peer < 0 || coll.peer >= world || coll.peer == rank))
    return fmt::format("peer {} must be another rank (this is rank {}, world size {})", coll.peer, rank, world);
  if (is_reduction(coll) && (coll.reduce < ZR_SUM || coll.reduce > ZR_MAX))
    return fmt::format("reduction code {} is not defined", coll.reduce);
  return "";
}

// Of the views that this rank uses, and of their dtypes.
std::string views_problem(const zr_coll& coll, bool reads, bool writes, const zr_device& device) {
  if (reads)
    if (std::string problem = view_problem("src", coll.src, device); !problem.empty()) return problem;
  if (writes)
    if (std::string problem = view_problem("dst", coll.dst, device); !problem.empty()) return problem;
  if (reads && writes && coll.src.device.type != coll.dst.device.type) return "src and dst are not on the same device";
  const bool upcasts =
      is_reduction(coll) && coll.dst.dtype == ZR_F32 && (coll.src.dtype == ZR_BF16 || coll.src.dtype == ZR_F16);
  if (reads && writes && coll.src.dtype != coll.dst.dtype && !upcasts)
    return fmt::format("src is {} and dst is {}", name_of(coll.src.dtype), name_of(coll.dst.dtype));
  return "";
}

std::string counts_problem(const zr_coll& coll, int world) {
  for (const int64_t* counts : {coll.counts, coll.recv_counts})
    for (int r = 0; counts && r < world; ++r)
      if (counts[r] < 0) return fmt::format("rank {}'s count is {}", r, counts[r]);
  return "";
}
}  // namespace

std::string problem_of(const zr_coll& coll, int rank, int world, const zr_device& device) {
  constexpr uint32_t kFlags =
      uint32_t{ZR_COLL_ACCUMULATE} | ZR_COLL_INT8 | ZR_COLL_INT4 | ZR_COLL_ANY_ORDER | ZR_COLL_SHARED;
  if (coll.op < ZR_ALL_REDUCE || coll.op > ZR_BARRIER) return fmt::format("operation code {} is not defined", coll.op);
  if (std::string problem = unknown_bits_problem("flags", coll.flags, kFlags); !problem.empty()) return problem;
  if (std::string problem = reserved_problem("rsv", static_cast<uint32_t>(coll.rsv)); !problem.empty()) return problem;
  if ((coll.flags & ZR_COLL_SHARED) && coll.op != ZR_ALL_GATHER) return "only an all_gather has ZR_COLL_SHARED";
  if (coll.op == ZR_BARRIER) return "";
  const bool reads = reads_src(coll, rank), writes = writes_dst(coll, rank);
  if (std::string problem = parameter_problem(coll, rank, world); !problem.empty()) return problem;
  if (std::string problem = views_problem(coll, reads, writes, device); !problem.empty()) return problem;
  if (std::string problem = counts_problem(coll, world); !problem.empty()) return problem;
  return lengths_problem(coll, reads, writes, rank, world);
}

bool is_on_device(const zr_coll& coll, int rank) {
  const auto is_there = [](const zr_view& view) { return view.device.type != ZR_DEVICE_CPU; };
  return (reads_src(coll, rank) && is_there(coll.src)) || (writes_dst(coll, rank) && is_there(coll.dst));
}

}  // namespace zr::host::comm
