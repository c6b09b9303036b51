// An optimizer of the C++ layer whose constructor throws.
#include "zr/optimizer.hpp"

struct Thrower : zr::Optimizer<Thrower> {
  Thrower() { throw std::runtime_error("the table of twiddles is empty"); }
  void update(const zr::Update&) const {}
};
ZR_OPTIMIZER(Thrower, "bad", "tests", "1.0");
