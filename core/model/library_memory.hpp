// Memory that the model's library holds itself, and what it saves for backward.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace zr::host::model {

/// Memory of a device other than the CPU that the model's library holds, in bytes.
struct DeviceBytes {
  int64_t held = 0, peak = 0;  // peak: since LibraryMemory::forget_peak()
  int64_t of_engines = 0;      // the part of `held` that engines of this process allocated with DeviceMemory
  bool counted = false;        // the library counts this memory; otherwise all are 0
};

/// Training thread only unless marked otherwise.
class LibraryMemory {
 public:
  virtual ~LibraryMemory() = default;
  /// Memory of the model's library other than parameters: activations, gradients in progress, temporaries, batches.
  /// Counted for the process since the first model was made. [any]
  struct Temporaries {
    int64_t held = 0, peak = 0;  // bytes; peak: since forget_peak()
  };
  virtual Temporaries temporaries() const = 0;
  virtual DeviceBytes device_memory() const = 0;  // not counted for a model on the CPU
  virtual void forget_peak() = 0;                 // sets the peaks to the bytes held now
  /// Before an allocation that would exceed `bytes`, calls over(requested) on the allocating thread; if it returns, the
  /// allocation is made. Replaces the previous limit; an empty function removes it.
  virtual void limit_temporaries(int64_t bytes, const std::function<void(int64_t requested)>& over) = 0;

  /// Store for tensors that autograd saves for backward, as records of bytes. One call at a time, any thread.
  struct OffloadCallbacks {
    int64_t min_bytes = 0;                                               // smaller storages are not offloaded
    std::function<uint64_t(const void* data, int64_t bytes)> put;        // copies data; returns the record's number
    std::function<void(uint64_t record, void* to)> get;                  // may be called repeatedly
    std::function<void(const std::vector<uint64_t>& records)> prefetch;  // needed next, in this order
    std::function<void(uint64_t record)> drop;                           // no longer needed; must not throw
  };
  /// From now on, offloads the tensors that operators of this thread save; their memory is freed when nothing else uses
  /// it. They are restored bit-identically. Replaces the previous callbacks. Without put(), autograd keeps all saved
  /// tensors itself, and graphs recorded before can no longer be used.
  virtual void offload_saved_tensors(OffloadCallbacks callbacks) = 0;
};

}  // namespace zr::host::model
