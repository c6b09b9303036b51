// AdamW: adaptive moments with bias correction and decoupled weight decay (Loshchilov and Hutter 2019, algorithm 2).
#include "adamw.hpp"

namespace {
class AdamW : public AdamWOptimizer<AdamW> {
 public:
  using AdamWOptimizer::AdamWOptimizer;
};
}  // namespace

ZR_OPTIMIZER(AdamW, "adamw", "zeroth", "0.1.0");
