// An optimizer with two states of the same name: the host must reject it, because checkpoints could not be loaded.
#include "zr/optimizer.hpp"

namespace {

struct Twins : zr::Optimizer<Twins> {
  static constexpr zr_slot slots[] = {zr::slot("velocity"), zr::slot("velocity")};
  void update(const zr::Update&) const {}
};

}  // namespace

ZR_OPTIMIZER(Twins, "twins", "test", "1.0.0");
