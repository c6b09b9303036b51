// What an optimizer declares about the update of a parameter, and where the parameter may therefore be cut.
#pragma once

#include <cstdint>
#include <vector>

#include "zr/abi/optimizer.h"

namespace zr::host::plan {

struct Parameter;

/// The names of the slots are valid as long as the optimizer's instance.
struct OptimizerDescription {
  uint32_t granularity = ZR_ELEMENTWISE;  // also those of zr/abi/draft/optimizer_shapes.h
  uint32_t needs = 0;                     // bits of zr/abi/draft/local_gradients.h
  std::vector<zr_slot> slots;
  std::vector<zr_slot> private_slots{};  // states of steps with local gradients; each rank has values of its own
  /// By pass: number of sums over the parameter that the pass adds up (zr/abi/draft/partial_sums.h). Empty: none.
  std::vector<uint32_t> sums;
  double cost = 0;  // of the update per parameter, in units that are the same for all parameters; 0: its elements
  bool ignores_norm = false;  // the update does not read the gradient norm
  uint64_t stream_types = 0;  // the device types whose memory it updates in the order of a stream; bit i: type i
  /// The parameter may be updated in any parts.
  bool elementwise() const;
  uint32_t most_sums() const;  // the largest number of sums of a pass
  int64_t all_sums() const;    // of all passes
};
/// Names of slots are compared as text.
bool operator==(const OptimizerDescription& a, const OptimizerDescription& b);

/// Elements per row: the product of all dimensions but the first.
int64_t row_elements(const Parameter& parameter);

/// The elements of a complete part of the parameter for the optimizer. The parameter may be cut only at multiples of
/// it, counted from the start: a multiple of the norm block, or the count of the parameter.
int64_t cut_block(const Parameter& parameter, const OptimizerDescription& description);

/// `block` consecutive elements of a parameter have `width` elements of a state; the last block may be shorter.
struct StateShape {
  int64_t block = 1, width = 1;
  /// Elements of the state for the first `elements` elements of a parameter; exact at multiples of `block`.
  int64_t of(int64_t elements) const { return (elements + block - 1) / block * width; }
  /// The shape of the state of a full parameter.
  std::vector<int64_t> full(const Parameter& parameter) const;
  bool operator==(const StateShape&) const = default;
};
/// The shape of a state of the parameter.
StateShape state_shape(const Parameter& parameter, const zr_slot& slot);
}  // namespace zr::host::plan
