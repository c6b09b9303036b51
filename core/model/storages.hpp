// Which tensors of a model share storage, and what becomes of a storage whose parameter moves elsewhere.
#pragma once

#include <torch/types.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

namespace zr::host {

/// True if an element of one tensor occupies a byte of the other. Both are dense tensors.
bool overlap(const torch::Tensor& a, const torch::Tensor& b);

/// The storages of a model's parameters and buffers before the engine moves the parameters. A parameter that is moved
/// leaves tensors behind that were made from it earlier (a view or a detach() that a constructor kept): their storage
/// is closed, so that a read of stale values throws. Training thread.
class Storages {
 public:
  using Tensors = std::vector<std::pair<std::string, torch::Tensor>>;
  /// Throws Failure(user) naming two tensors whose memory overlaps, and parameters with overlapping elements of their
  /// own. Tied weights are listed once.
  Storages(const Tensors& parameters, const Tensors& buffers);

  /// The parameter's whole storage can be given other memory of `type`, which all tensors on it then see.
  bool replaceable(const torch::Tensor& parameter, at::ScalarType type) const;
  /// Gives the parameter the data of `other`, as set_data() does, and closes the storage it leaves.
  void move(const std::string& name, const torch::Tensor& parameter, const torch::Tensor& other);
  /// The same of a buffer.
  void move_buffer(const std::string& name, const torch::Tensor& buffer, const torch::Tensor& other);

  /// Memory of an engine; any storage with it belongs to a parameter in training.
  static at::DataPtr engine_memory(void* memory);
  static bool has_engine_memory(const at::TensorBase& tensor);

 private:
  struct Users {
    std::vector<std::pair<std::string, torch::Tensor>> parameters, buffers;
  };
  /// Of tensors on one storage, or on several at the same addresses (from_blob()).
  static void check_overlaps(const Tensors& parameters, const Tensors& buffers);
  void check_unregistered(const Users& users) const;
  void leave(const std::string& what, const torch::Tensor& tensor, const torch::Tensor& other);
  std::map<const c10::StorageImpl*, Users> users_;       // of storages with several registered tensors
  std::map<const c10::StorageImpl*, std::size_t> left_;  // registered tensors that are still on it
};

}  // namespace zr::host
