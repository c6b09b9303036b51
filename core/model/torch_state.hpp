// What TorchModel keeps of each parameter, and what happens around operators on it. Included by torch_*.cpp alone.
#pragma once

#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "model/data_views.hpp"
#include "model/deferred.hpp"
#include "model/parameter_registry.hpp"
#include "model/placeholder.hpp"
#include "model/saved_tensor_offload.hpp"
#include "model/saved_tensor_scope.hpp"
#include "model/storages.hpp"
#include "model/torch_model.hpp"

namespace zr::host {

/// The type of weights; others are a bug.
at::ScalarType torch_type(zr_dtype dtype);

/// What bind() made of a parameter.
struct Binding {
  c10::Storage storage;  // tensors that share it outlive the engine's memory
  const void* memory = nullptr;
  at::ScalarType type = at::kFloat;
  int64_t version = 0;
  bool early = false;                // tensors that were made before bind() are on the storage
  std::unique_ptr<DataViews> views;  // made later
};

/// Any thread, as MemoryProvider says, but for what TorchModel calls itself.
struct TorchModel::State final : MemoryProvider {
  struct ParamEntry {
    torch::Tensor tensor;
    Binding binding;
    Placeholder* placeholder = nullptr;  // unbound: lives as long as the tensor's storage
    const void* shared = nullptr;        // bound to memory that all ranks read
    at::DataPtr copy;                    // of it, while it is written to
    int readers = 0, writers = 0;        // operators and scopes on what is shared
    int scopes = 0;                      // of zr::gather, however the parameter is stored
    bool vacant = false;                 // an earlier engine left it without memory
    torch::Tensor returned;              // what release() gives the parameter; undefined: a copy of its memory
    torch::Tensor copy_buffer;           // bytes for that copy
    torch::Tensor hidden;                // stands in .grad between backwards
    // The accumulator must be kept alive: a fresh one would not know the hook.
    decltype(torch::autograd::impl::grad_accumulator(std::declval<torch::Tensor>())) accumulator;
    std::uintptr_t hook = 0;
    torch::Tensor gradient;  // of this backward, as autograd handed it over
    bool densified = false;
  };
  std::vector<Parameter> parameters;
  std::vector<ParamEntry> entries;
  std::vector<std::pair<std::string, torch::Tensor>> buffers;  // but empty ones
  std::map<std::string, std::string> buffer_kinds;             // type and shape when this was made; of empty ones, too
  std::shared_ptr<Construction> construction;                  // of a deferred model, until construct()
  std::unique_ptr<Storages> storages;
  at::ScalarType buffer_type;  // of floating-point buffers
  bool hands_over = false;     // see TorchModel
  Arrived arrived;
  Uses uses;
  std::unique_ptr<SavedTensorOffload> saved_tensor_offload;
  std::mutex mutex, sharing;
  const std::shared_ptr<const void> life = std::make_shared<char>();
  static inline std::atomic<uint64_t> made{0};
  const uint64_t number = made++;

  ~State() override {
    for (auto& entry : entries) ParameterRegistry::remove(entry.tensor.unsafeGetTensorImpl());
  }

  /// "Float [2, 3]".
  static std::string kind_of(const torch::Tensor& tensor) {
    return c10::str(tensor.scalar_type(), " ", tensor.sizes());
  }
  /// Floating-point buffers follow the weights' dtype; all are row-major.
  void convert_buffers();
  /// The parameter has no memory, and its operators come to enter() and leave(); reads past them throw `reason`.
  void intercept(uint32_t param, at::ScalarType type, const std::string& reason);
  /// See MemoryProvider.
  void enter(const ParamUse* param_uses, std::size_t n) override;
  void leave(const ParamUse* param_uses, std::size_t n, bool done) override;
  bool in_scope(const Placeholder& placeholder) const override;
  std::string alternative() const override;
  /// One more (by = 1) or less (-1) may read what is shared. Outside operators and scopes nobody can, so that a write
  /// past both is refused, not a fault.
  void expose(uint32_t param, int by);
  /// What is shared is written to in a copy of this rank's own, one for scopes and the operators within them; the
  /// owners of its parts then take them over, unless an exception ended the scope.
  void begin_write_copy(uint32_t param);
  void end_write_copy(uint32_t param, bool takes_over);
  /// A bound parameter whose data was exchanged within a scope (torch::load): its values are copied to the engine's
  /// memory if the engine takes them over, and the parameter is bound again. Returns its name if the shapes differ.
  std::string rebind_exchanged(uint32_t param, bool takes_over);
  /// Autograd has accumulated into a parameter's .grad.
  void gradient_accumulated(uint32_t param);
};

}  // namespace zr::host
