// The state that TorchModel keeps for each parameter, and its callbacks around operators. Only torch_*.cpp include it.
#pragma once

#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/forked.hpp"
#include "model/data_views.hpp"
#include "model/deferred.hpp"
#include "model/device.hpp"
#include "model/device_copies.hpp"
#include "model/gradient_downloads.hpp"
#include "model/kept_tensors.hpp"
#include "model/parameter_registry.hpp"
#include "model/placeholder.hpp"
#include "model/saved_tensor_offload.hpp"
#include "model/saved_tensor_scope.hpp"
#include "model/storages.hpp"
#include "model/torch_device_memory.hpp"
#include "model/torch_dtype.hpp"
#include "model/torch_model.hpp"
#include "zr/mutex.hpp"

namespace zr::host::model {

/// How bind() bound a parameter.
struct Binding {
  c10::Storage storage;          // tensors that share it may outlive the engine's memory
  const void* memory = nullptr;  // of the storage
  void* host = nullptr;          // the engine's memory, if the storage has a copy of it on a device
  at::ScalarType type = at::kFloat;
  int64_t version = 0;
  bool has_older_tensors = false;    // tensors from before bind() use the storage
  std::unique_ptr<DataViews> views;  // tensors that data() makes later
  std::unique_ptr<Storages::DeviceBinding> on_device;
};

/// MemoryProvider's functions: any thread. Functions that TorchModel calls: its thread.
struct TorchModel::State final : MemoryProvider {
  struct ParamEntry {
    torch::Tensor tensor;
    Binding binding;
    Placeholder* placeholder = nullptr;  // if unbound; lives as long as the tensor's storage
    const void* shared = nullptr;        // memory that all ranks read, if bound to it
    at::DataPtr copy;                    // of `shared`, while an operator or scope writes
    int readers = 0, writers = 0;        // operators and scopes that use `shared`
    void* attached = nullptr;            // the engine's memory from attach(), if on_device is a copy of it
    at::DataPtr on_device;               // the copy of it on the device
    int scopes = 0;                      // open zr::gather scopes, for any kind of storage
    bool left_without_memory = false;    // an earlier engine left the parameter without memory
    torch::Tensor returned;              // data that return_parameters() gives the parameter; undefined: a copy
    torch::Tensor copy_buffer;           // memory for that copy
    torch::Tensor hidden;                // .grad between backwards: a placeholder
    // Must be kept alive: a new accumulator would not have the hook.
    decltype(torch::autograd::impl::grad_accumulator(std::declval<torch::Tensor>())) accumulator;
    std::uintptr_t hook = 0;
    torch::Tensor gradient;  // of this backward, as autograd produced it
    bool densified = false;
  };
  /// Of a model without parameters and buffers yet.
  explicit State(const TorchModelOptions& options)
      : device(options.device), weight_type(torch_type(options.dtype)), cast_buffers(options.cast_buffers) {}
  const at::Device device;   // that the model computes on
  const OwnerProcess owner;  // the rank; its children have no peers
  const at::ScalarType weight_type;
  const std::vector<std::string> cast_buffers;  // patterns
  std::optional<TorchDeviceMemory> memory;      // of the device, if it is not the CPU
  bool keeps_on_device = false;                 // the engine's memory is on the device
  std::optional<GradientDownloads> downloads;   // if it is not the CPU, and gradients are delivered
  std::vector<torch::Tensor> host_buffers;      // copies of `buffers` in host memory, if the device is not the CPU
  std::function<void(uint32_t param)> computed;
  ParallelFor parallel_for;
  std::vector<plan::Parameter> parameters;
  std::vector<ParamEntry> entries;
  std::vector<std::pair<std::string, torch::Tensor>> buffers;  // without empty ones
  std::vector<ModelBuffer> empty_buffers;
  std::map<std::string, std::string> buffer_kinds;  // original type and shape; also of empty ones
  std::shared_ptr<Construction> construction;       // of a deferred model, until construct()
  std::unique_ptr<Storages> storages;
  KeptTensors kept_buffers;        // of another floating-point type than the weights
  KeptTensors kept_parameters;     // fp32, if the other weights have 16 bits
  bool leaves_for_reload = false;  // leave_for_reload() was called
  Arrived arrived;
  Uses uses;
  std::unique_ptr<SavedTensorOffload> saved_tensor_offload;
  Mutex gradient_mutex;  // serialises gradient_accumulated()
  Mutex sharing_mutex;   // serialises change_readers() and the write copies
  const std::shared_ptr<const void> life = std::make_shared<char>();
  static inline std::atomic<uint64_t> models_made{0};
  const uint64_t number = models_made++;

  ~State() override {
    for (auto& entry : entries) ParameterRegistry::remove(entry.tensor.unsafeGetTensorImpl());
  }

  /// "Float [2, 3]".
  static std::string kind_of(const torch::Tensor& tensor) {
    return c10::str(tensor.scalar_type(), " ", tensor.sizes());
  }
  bool is_on_cpu() const { return device.is_cpu(); }
  /// Whether parameters use the engine's memory itself. Otherwise it is host memory, with copies of what is on the
  /// device.
  bool uses_engine_memory() const { return is_on_cpu() || keeps_on_device; }
  /// A tensor over memory of the engine for gradients.
  torch::Tensor over(const zr_view& view) const {
    return tensor_over(view.data, {view.count}, torch_type(view.dtype), keeps_on_device ? device : at::kCPU);
  }
  /// While it lives, operators of this thread run on the engine's stream, if the engine's memory is on the device.
  std::optional<TorchDeviceMemory::Scope> engine_stream() const {
    if (!keeps_on_device) return std::nullopt;
    return std::optional<TorchDeviceMemory::Scope>(std::in_place, *memory);
  }
  /// A tensor's options with this dtype, on the model's device.
  at::TensorOptions options(at::ScalarType type) const { return at::TensorOptions().dtype(type).device(device); }
  /// Rounds the buffers of cast_buffers to the weights' dtype, and converts all buffers to row-major layout on the
  /// model's device.
  void convert_buffers();
  /// True for a floating-point buffer that matches a pattern of cast_buffers.
  bool is_cast(const std::string& name, const torch::Tensor& buffer) const;
  /// Registers a parameter that has its memory, or its placeholder, if it keeps fp32 in a 16-bit model.
  void mark_kept_parameter(uint32_t param, at::ScalarType type);
  /// Registers the buffers that keep another floating-point type than 16-bit weights.
  void mark_kept_buffers();
  /// Removes the parameter's memory. Its operators call enter() and leave(); other reads of its memory throw `reason`.
  void intercept(uint32_t param, at::ScalarType type, const std::string& reason);
  /// Throws UserError in a child that fork() made.
  void check_process() const;
  /// Implements MemoryProvider.
  void enter(const ParamUse* param_uses, std::size_t n) override;
  void leave(const ParamUse* param_uses, std::size_t n, bool done) override;
  bool in_scope(const Placeholder& placeholder) const override;
  std::string remedy() const override;
  /// Adds `change` (1 or -1) to the readers of shared memory. Without readers it is not readable, so an access outside
  /// operators and scopes throws an error instead of causing a segmentation fault.
  void change_readers(uint32_t param, int change);
  /// Writes to shared memory go to a copy of this rank, one for scopes and the operators within them. Each rank that
  /// owns a shard then takes over its part, unless an exception ended the scope.
  void begin_write_copy(uint32_t param);
  void end_write_copy(uint32_t param, bool keeps_writes);
  /// Binds a bound parameter again if its data was replaced within a scope (torch::load). With `keeps_writes`, copies
  /// the new values to the engine's memory. Returns the parameter's name if the shapes differ.
  std::string rebind_replaced(uint32_t param, bool keeps_writes);
  /// Give a parameter memory that does not belong to the engine, with its values: a parameter bound to shared memory, a
  /// sharded one (only if reserve_parameter() reserved its memory; otherwise its values are lost), or one bound to
  /// memory of this rank.
  void return_shared(uint32_t param);
  void return_sharded(uint32_t param);
  void return_bound(uint32_t param);
  /// The tensor that a parameter without memory of its own gets when the engine returns its parameters.
  torch::Tensor returned_tensor(uint32_t param);
  /// Copies a parameter that the program wrote to from the device to the engine's memory: that of bind(), or that of
  /// attach().
  void download_bound(uint32_t param);
  void download_attached(uint32_t param);
  /// Called when autograd has accumulated into a parameter's .grad.
  void gradient_accumulated(uint32_t param);
  /// Passes a gradient of this backward, dense and in host memory, to the engine.
  void deliver(uint32_t param, const torch::Tensor& gradient);
};

}  // namespace zr::host::model
