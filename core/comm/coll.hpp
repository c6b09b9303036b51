// What a collective is, in words and numbers: its parts, its name, its fingerprint, and whether it makes sense.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "zr/abi/communicator.h"

namespace zr::host {

std::string_view name_of_op(uint32_t op);  // "all_reduce"
/// Sends and receives: two ranks take part, and they have no fingerprint.
bool is_message(const zr_coll& coll);
/// all_reduce, reduce_scatter, reduce.
bool is_reduction(const zr_coll& coll);
/// The rank's src is read; its dst is written.
bool reads_src(const zr_coll& coll, int rank);
bool writes_dst(const zr_coll& coll, int rank);

/// Elements of the whole operation: equal on all ranks but for all_to_all, send and recv.
int64_t total_of(const zr_coll& coll, int world);
/// A run of elements.
struct ElementRange {
  int64_t first, count;
  int64_t end() const { return first + count; }
};
/// Rank r's part of `total` elements, by counts or, if these are null, equal.
ElementRange part_of_rank(const int64_t* counts, int64_t total, int r, int world);

/// Equal on all ranks that mean the same operation; never 0, but for send and recv.
uint64_t fingerprint_of(const zr_coll& coll, int world);
/// "all_reduce 'bucket 3' (fp32, 4194304) in engine.backward()" into `text`, whose memory is used again. `call`: what
/// the program called, or ""; a barrier with that label is described by the call alone.
void describe(const zr_coll& coll, int world, std::string& text, std::string_view call = {});
/// "" or why no communicator could do it: "dst has 5 elements, this rank's part has 6".
std::string problem_of(const zr_coll& coll, int rank, int world);

}  // namespace zr::host
