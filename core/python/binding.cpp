// The classes of libzeroth_python.so: torch.classes.zeroth.
#include "python/boundary.hpp"

namespace zr::python {

TORCH_LIBRARY(zeroth, m) {  // in this order: a class before those whose methods have it
  define_scopes(m);
  define_program(m);
  define_engine(m);
}

}  // namespace zr::python
