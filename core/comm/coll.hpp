// The properties of a collective: counts per rank, description, fingerprint, and validation.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/device_memory.hpp"
#include "base/operation.hpp"
#include "zr/abi/communicator.h"

namespace zr::host::comm {

/// Sends and receives: two ranks take part, and they have no fingerprint.
bool is_message(const zr_coll& coll);
/// all_reduce, reduce_scatter, reduce.
bool is_reduction(const zr_coll& coll);
/// Whether the operation reads the src of `rank`, and whether it writes the dst of `rank`.
bool reads_src(const zr_coll& coll, int rank);
bool writes_dst(const zr_coll& coll, int rank);

/// The flags of a strategy's or an optimizer's collective as the communicator gets them: ZR_COLL_GRADIENTS becomes
/// `gradients`, and ZR_COLL_WEIGHTS `weights`.
uint32_t flags_of_job(uint32_t flags, uint32_t gradients, uint32_t weights);

/// Elements of the full tensor; equal on all ranks, except for all_to_all, send and recv.
int64_t total_of(const zr_coll& coll, int world);
/// A contiguous range of elements.
struct ElementRange {
  int64_t first, count;
  int64_t end() const { return first + count; }
};
/// The part of rank `r` of `total` elements: given by `counts`, or equal parts if `counts` is null.
ElementRange part_of_rank(const int64_t* counts, int64_t total, int r, int world);

/// Equal on all ranks that issue the same operation. 0 for send and recv, never 0 otherwise.
uint64_t fingerprint_of(const zr_coll& coll, int world);
/// Writes "all_reduce 'bucket 3' (fp32, 4194304) in engine.backward()" into `text` and reuses its memory. `call`: the
/// call of the program, or ""; a barrier whose label equals `call` is described by the call alone.
void describe(const zr_coll& coll, int world, std::string& text, std::string_view call = {});
/// Validates the arguments. `device`: a device whose memory is allowed too. Returns "",
/// or why they are invalid: "dst has 5 elements, this rank's part has 6".
std::string problem_of(const zr_coll& coll, int rank, int world, const zr_device& device = kHostMemory);
/// Whether the memory that `rank` reads or writes is on a device other than the CPU.
bool is_on_device(const zr_coll& coll, int rank);

}  // namespace zr::host::comm
