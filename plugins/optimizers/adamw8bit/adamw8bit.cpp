// AdamW whose states have 8 bits per element, with a scale per block of 256 elements (Dettmers et al. 2022).
#include "adamw8bit.hpp"

namespace {
class AdamW8Bit : public AdamW8BitOptimizer<AdamW8Bit> {
 public:
  using AdamW8BitOptimizer::AdamW8BitOptimizer;
};
}  // namespace

ZR_OPTIMIZER(AdamW8Bit, "adamw8bit", "zeroth", "0.1.0");
