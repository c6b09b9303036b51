// An optimizer with a state of which every rank would have all elements: the host must reject it.
#include "zr/abi/draft/optimizer_shapes.h"
#include "zr/optimizer.hpp"

namespace {

struct Blocks : zr::Optimizer<Blocks> {
  static constexpr zr_slot slots[] = {zr_slot{"scale", ZR_F32, ZR_SLOT_PER_BLOCK, ZR_SLOT_UNSHARDED, 64}};
  void update(const zr::Update&) const {}
};

}  // namespace

ZR_OPTIMIZER(Blocks, "blocks", "test", "1.0.0");
