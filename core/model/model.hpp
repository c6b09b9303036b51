// A model that the engine trains, without libtorch. Each part of the engine uses the one of its four interfaces that it
// needs.
#pragma once

#include <cstdint>

#include "model/buffer_source.hpp"
#include "model/gradient_source.hpp"
#include "model/library_memory.hpp"
#include "model/parameter_memory.hpp"

namespace zr::host::model {

/// Implemented on libtorch (torch_model.hpp) and by tests.
class Model : public ParameterMemory, public GradientSource, public BufferSource, public LibraryMemory {
 public:
  /// Reseeds the random generators that dropout draws from. Training thread.
  virtual void seed(uint64_t seed) = 0;
};

}  // namespace zr::host::model
