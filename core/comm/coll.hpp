// What a collective is, in words and numbers: its total, its name, its fingerprint, the bytes it brings to a rank.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "zr/abi/communicator.h"

namespace zr::host {

std::string_view name_of_op(uint32_t op);  // "all_reduce"
/// Elements of the whole operation: equal on all ranks but for all_to_all, send and recv.
int64_t total_of(const zr_coll& coll, int rank, int world);
/// Elements of each rank's part of a total, given counts or equal.
std::vector<int64_t> parts_of(const int64_t* counts, int64_t total, int world);
/// Equal on all ranks that mean the same operation; 0 for send and recv.
uint64_t fingerprint_of(const zr_coll& coll, int rank, int world);
/// "all_reduce 'bucket 3' (fp32, 4194304)" into `text`, whose memory is used again.
void describe(const zr_coll& coll, int64_t total, std::string& text);
/// Bytes this rank receives; live(view) counts a view's elements that are not padding.
int64_t received_bytes(const zr_coll& coll, int rank, int world, const std::function<int64_t(const zr_view&)>& live);

}  // namespace zr::host
