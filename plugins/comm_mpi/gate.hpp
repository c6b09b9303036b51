// What an operation waits for, and what waits for the operation.
#pragma once

namespace mpi {

class Gate {
 public:
  virtual ~Gate() = default;
  /// True once the operation may read and write its memory; stays true. Throws PluginError. [MPI thread]
  virtual bool is_open() = 0;
  /// Called once, when the operation uses its memory no longer: it is complete, or it has failed. [any]
  virtual void close(bool is_complete) noexcept = 0;
};

}  // namespace mpi
