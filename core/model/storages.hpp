// Tensors of a model that share a storage, and storages whose parameter the engine moved to other memory.
#pragma once

#include <torch/types.h>

#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace zr::host::model {

/// True if the two tensors share at least one byte. Both must be strided tensors.
bool overlap(const torch::Tensor& a, const torch::Tensor& b);

/// The storages of a model's parameters and buffers before the engine moves the parameters. Tensors that were created
/// from a parameter earlier (a view or a detach() that a constructor kept) stay on the old storage. It is closed, so
/// that a read of stale values throws. Training thread.
class Storages {
 public:
  using Tensors = std::vector<std::pair<std::string, torch::Tensor>>;
  /// Number of tensors on a storage that are not the program's.
  using Internal = std::function<int64_t(const c10::StorageImpl* storage)>;
  /// Throws UserError naming two tensors whose memory overlaps, or a parameter whose own elements overlap. Tied
  /// weights must be listed once.
  Storages(const Tensors& parameters, const Tensors& buffers, const Internal& internal = nullptr);

  /// True if the memory of the parameter's storage can be replaced by other memory of `type` on the parameter's device,
  /// so that all tensors on the storage see it.
  bool replaceable(const torch::Tensor& parameter, at::ScalarType type) const;
  /// Gives the parameter the data of `other`, as set_data() does, and closes its old storage.
  void replace_data(const std::string& name, const torch::Tensor& parameter, const torch::Tensor& other);
  /// Gives the buffer the data of `other`, as set_data() does, and closes its old storage.
  void replace_buffer_data(const std::string& name, const torch::Tensor& buffer, const torch::Tensor& other);

  /// Gives the tensor the data of `other`, as set_data() does, also between any two devices.
  static void set_data(const torch::Tensor& tensor, const torch::Tensor& other);

  /// A data pointer to memory of an engine; a storage with such a pointer belongs to a parameter in training.
  static at::DataPtr engine_memory(void* memory, at::Device device);
  /// True for a tensor on such a storage, or on one that has a DeviceBinding. Any thread.
  static bool has_engine_memory(const at::TensorBase& tensor);
  /// While one exists, the storage, which has memory of a device, belongs to a parameter in training.
  class DeviceBinding {
   public:
    explicit DeviceBinding(const c10::Storage& storage);
    ~DeviceBinding();
    DeviceBinding(const DeviceBinding&) = delete;

   private:
    const c10::StorageImpl* const storage_;  // only used as a key
  };

 private:
  struct Users {
    std::vector<std::pair<std::string, torch::Tensor>> parameters, buffers;
  };
  /// Checks tensors on one storage, or on several storages at the same addresses (from_blob()).
  static void check_overlaps(const Tensors& parameters, const Tensors& buffers);
  static void check_unregistered(const Users& users, int64_t internal);
  void replace_and_close(const std::string& what, const torch::Tensor& tensor, const torch::Tensor& other);
  std::map<const c10::StorageImpl*, Users> users_;  // storages with several registered tensors
  std::map<const c10::StorageImpl*, std::size_t>
      remaining_tensors_;  // number of registered tensors still on the storage
};

}  // namespace zr::host::model
