// What an operation waits for, and what waits for the operation.
#pragma once

#include "zr/base.hpp"

namespace mpi {

class Gate {
 public:
  virtual ~Gate() = default;
  /// True once the operation may read and write its memory; stays true. [any]
  virtual bool is_open() noexcept = 0;
  /// Called once, when the operation uses its memory no longer: ZR_OK if it is complete, else why it never will be.
  /// Must not call the communicator. [any]
  virtual void close(zr_code code) noexcept = 0;
};

}  // namespace mpi
