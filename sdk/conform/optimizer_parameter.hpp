// A parameter as optimizers see it: what they report about it, where it may be cut, and its arrays.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "conform/memory.hpp"
#include "zr/abi/optimizer.h"

namespace zr::conform {

/// The dimensions of a parameter, outermost first.
using Shape = std::vector<int64_t>;
int64_t elements_of(const Shape& shape);
/// "[24, 40]".
std::string text_of(const Shape& shape);

/// Strategies cut parameters at multiples of it only: zr_plan_in.norm_block of these checks.
constexpr int64_t kNormBlock = 1024;

/// Ranges of elements: first, count.
using Cuts = std::vector<std::pair<int64_t, int64_t>>;

/// What an optimizer reports about the update of one parameter.
struct Description {
  zr_optimizer_desc desc{};
  std::vector<zr_slot> slots;  // their names are valid as long as the instance
  uint32_t passes = 0;         // as reported (zr/abi/draft/partial_sums.h)
  std::vector<uint32_t> sums;  // by pass, at most ZR_MAX_PASSES: sums per block
  Shape shape;
  /// Slices begin at its multiples (zr_param.cut_block).
  int64_t cut_block() const;
  /// The result for an element depends on the values of that element only.
  bool is_elementwise() const;
  /// No value of the parameter affects elements of another cut_block.
  bool has_independent_blocks() const { return sums.empty(); }
  /// Elements of a state for the first `elements` elements of the parameter.
  int64_t state_elements(const zr_slot& slot, int64_t elements) const;
  /// Everything that describe() reported.
  std::string text() const;
  /// The parameter cut at random places where this description permits it; one range if it cannot be cut.
  Cuts random_cuts(std::mt19937_64& random) const;
};

/// The arrays of one parameter, with guard pages.
struct ParameterArrays {
  struct Layout {
    Shape shape{};
    zr_dtype weight_dtype = ZR_F32;
    std::size_t shift = 0;     // bytes by which every array is out of its alignment
    uint8_t undefined = 0x99;  // content of a low-precision weight on entry
  };
  /// Random weights, zeroed states. The same generator state gives the same weights for every layout.
  ParameterArrays(const Layout& layout, const Description& description, std::mt19937_64 random);
  void new_gradient();
  /// The bits of everything that an update writes.
  std::string bits() const;
  /// The bits of the weight, the master weight, and each state.
  std::vector<std::string> contents() const;
  /// The bits of the fp32 weights: of the master if there is one.
  std::string master_bits() const { return master.content(); }
  /// Fails if a byte outside the arrays, or of the gradient, was written.
  void check_surroundings(const std::string& gradient_before) const;
  /// Fails if an element outside the range differs from `before`, the contents() of earlier.
  void check_rest(const std::vector<std::string>& before, const std::pair<int64_t, int64_t>& range) const;
  /// zr_update_slice.weight of a range of elements.
  zr_view weight_view(int64_t first, int64_t n) const;
  /// zr_update_slice.master: empty for fp32 weights.
  zr_view master_view(int64_t first, int64_t n) const;
  /// zr_update_slice.grad of a range of elements.
  zr_view grad_view(int64_t first, int64_t n) const;
  /// zr_update_slice.slots of a range of complete blocks.
  std::vector<zr_view> state_views(int64_t first, int64_t n) const;
  bool has_16bit_weights() const { return layout.weight_dtype != ZR_F32; }

  Layout layout;
  int64_t count;
  Description description;
  Array master, weight16, grad;  // weight16: empty for fp32 weights
  std::vector<Array> states;

 private:
  float number();
  std::mt19937_64 random_;
};

}  // namespace zr::conform
