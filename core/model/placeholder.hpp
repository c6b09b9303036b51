// Storage that keeps its size but has no memory between uses, and what stands behind it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>

#include <atomic>
#include <cstdint>
#include <string>

namespace zr::host {

/// A placeholder's place in one operator's arguments.
struct ParamUse {
  class Placeholder* placeholder;
  bool written;  // the operator writes to it
};

class Placeholder;

/// Whoever gives placeholders memory while an operator uses them. Any thread, several at once.
class MemoryProvider {
 public:
  virtual ~MemoryProvider() = default;
  /// An operator is about to run: on return every placeholder has memory. Throws what the operator shall throw.
  virtual void enter(const ParamUse* param_uses, std::size_t n) = 0;
  /// It has run; not `done`: it has thrown, and nothing that it wrote counts.
  virtual void leave(const ParamUse* param_uses, std::size_t n, bool done) = 0;
  /// A scope of the program holds the placeholder's memory: Tensor::set_() on it copies the values there. Training
  /// thread.
  virtual bool in_scope(const Placeholder&) const { return false; }
  /// How else its data can be replaced; a clause of an error.
  virtual std::string alternative() const = 0;
};

/// Stands behind one storage as the context of its data pointer, and lives as long as that storage. Tensors on it carry
/// the DeferredInit key (intercept.hpp), as do their views. Reading its memory without an operator throws `reason`.
class Placeholder {
 public:
  /// A dense CPU tensor without memory, row-major where no strides are given. `provider` may be null: then every use
  /// throws `reason`.
  static at::Tensor make(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type, MemoryProvider* provider,
                         uint32_t index, std::string reason);
  static at::Tensor make(at::IntArrayRef sizes, at::ScalarType type, MemoryProvider* provider, uint32_t index,
                         std::string reason);
  /// What stands behind a storage; null if it is an ordinary one.
  static Placeholder* find(c10::StorageImpl& storage);
  static Placeholder* find(const at::TensorBase& tensor);
  /// The tensor's operators are intercepted from now on, or no longer.
  static void mark(const at::TensorBase& tensor, bool intercepted);
  static bool is_marked(const at::TensorBase& tensor) {
    return tensor.defined() && tensor.key_set().has(c10::DispatchKey::DeferredInit);
  }

  /// Memory of the storage's size, lent until detach().
  void attach(void* memory);
  void detach();
  void* memory() const;
  /// What is attached may be read now, or reads throw as without memory.
  void expose(bool readable);
  /// The storage has this memory for good, and is an ordinary one; the placeholder is gone.
  void keep(at::DataPtr memory);

  MemoryProvider* provider() const { return provider_; }
  uint32_t index() const { return index_; }  // the provider's own number for it
  const std::string& reason() const { return reason_; }
  c10::StorageImpl& storage() const { return *storage_; }
  /// Without a provider from now on; uses throw `reason`.
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
  std::atomic<int> references_{0};  // data pointers that name it
};

}  // namespace zr::host
