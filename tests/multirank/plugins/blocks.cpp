// An optimizer with a state that 64 elements share: the host must reject it, because sharding splits such blocks.
#include "zr/abi/draft/optimizer_shapes.h"
#include "zr/optimizer.hpp"

namespace {

struct Blocks : zr::Optimizer<Blocks> {
  static constexpr zr_slot slots[] = {zr_slot{"scale", ZR_F32, ZR_SLOT_PER_BLOCK, 0, 64}};
  void update(const zr::Update&) const {}
};

}  // namespace

ZR_OPTIMIZER(Blocks, "blocks", "test", "1.0.0");
