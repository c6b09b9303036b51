// Storages that keep their size but have no memory between uses, and the providers of that memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>

#include <atomic>
#include <cstdint>
#include <string>

namespace zr::host::model {

/// A placeholder among the arguments of one operator.
struct ParamUse {
  class Placeholder* placeholder;
  bool written;  // the operator writes to it
};

class Placeholder;

/// Gives placeholders memory while an operator uses them. Any thread, several at once.
class MemoryProvider {
 public:
  virtual ~MemoryProvider() = default;
  /// Called before an operator runs: on return every placeholder has memory. An exception is passed on to the caller of
  /// the operator.
  virtual void enter(const ParamUse* param_uses, std::size_t n) = 0;
  /// Called after the operator. If it threw, `done` is false and its writes are discarded.
  virtual void leave(const ParamUse* param_uses, std::size_t n, bool done) = 0;
  /// True if a zr::gather scope holds the placeholder's memory; Tensor::set_() then copies the values into it. Training
  /// thread.
  virtual bool in_scope(const Placeholder&) const { return false; }
  /// A clause for an error message: how the program can replace the data instead.
  virtual std::string remedy() const = 0;
};

/// The context of one storage's data pointer; lives as long as that storage. Tensors on the storage and their views
/// carry the DeferredInit key (intercept.hpp). Reading its memory without an operator throws `reason`.
class Placeholder {
 public:
  /// A dense tensor without memory, row-major if no strides are given; options: its dtype and device. `provider` may be
  /// null: then every use throws `reason`.
  static at::Tensor make(at::IntArrayRef sizes, at::IntArrayRef strides, const at::TensorOptions& options,
                         MemoryProvider* provider, uint32_t index, std::string reason);
  static at::Tensor make(at::IntArrayRef sizes, const at::TensorOptions& options, MemoryProvider* provider,
                         uint32_t index, std::string reason);
  /// The placeholder of a storage; null if the storage is an ordinary one.
  static Placeholder* find(c10::StorageImpl& storage);
  static Placeholder* find(const at::TensorBase& tensor);
  /// Starts or stops the interception of the tensor's operators.
  static void mark(const at::TensorBase& tensor, bool intercepted);
  static bool is_marked(const at::TensorBase& tensor) {
    return tensor.defined() && tensor.key_set().has(c10::DispatchKey::DeferredInit);
  }

  /// Attaches memory of the storage's size, on its device, until detach().
  void attach(void* memory);
  void detach();
  void* memory() const;
  /// Makes the attached memory readable, or makes reads throw as without memory.
  void set_readable(bool readable);
  /// Gives the storage this memory permanently, which makes it an ordinary storage. Deletes the placeholder.
  void keep(at::DataPtr memory);

  MemoryProvider* provider() const { return provider_; }
  uint32_t index() const { return index_; }  // assigned by the provider
  const std::string& reason() const { return reason_; }
  c10::StorageImpl& storage() const { return *storage_; }
  /// Removes the provider; uses throw `reason` from now on.
  void orphan(const std::string& reason);

 private:
  Placeholder(MemoryProvider* provider, uint32_t index, std::string reason)
      : provider_(provider), index_(index), reason_(std::move(reason)) {}
  static void free_reference(void* placeholder);
  at::DataPtr pointer(void* memory);

  std::atomic<MemoryProvider*> provider_;
  uint32_t index_;
  std::string reason_;
  c10::StorageImpl* storage_ = nullptr;
  at::Device device_ = at::kCPU;
  std::atomic<int> references_{0};  // data pointers that refer to it
};

}  // namespace zr::host::model
