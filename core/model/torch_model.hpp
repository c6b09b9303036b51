// Model on libtorch: binds parameters to flat memory and takes gradients where autograd accumulates them.
#pragma once

#include <torch/types.h>

#include <memory>

#include "model/model.hpp"

namespace zr::host::model {

struct TorchModelOptions {
  zr_dtype dtype = ZR_F32;  // of the weights
  /// Patterns of the floating-point buffers that are rounded to `dtype`; the others keep their types.
  std::vector<std::string> cast_buffers{};
  /// Where the model computes; bind() and unbind() move its parameters there, the constructor its buffers.
  at::Device device = at::kCPU;
  /// Parameters that an earlier engine left without memory read as zeros until their values are loaded.
  bool reloads = false;
};

class TorchModel final : public Model {
 public:
  /// Names are in the model's order; a tensor with several names is one parameter. Throws UserError for parameters
  /// that are not dense floating-point tensors on the CPU or on `device`, or that another engine trains.
  TorchModel(const std::vector<std::pair<std::string, torch::Tensor>>& parameters,
             const std::vector<std::pair<std::string, torch::Tensor>>& buffers, const TorchModelOptions& options);
  ~TorchModel() override;

  const std::vector<plan::Parameter>& parameters() const override;
  std::vector<ModelBuffer> buffers() override;
  void write_buffers() override;
  std::vector<ModelBuffer> empty_buffers() const override;
  void read(uint32_t param, float* out) override;
  std::size_t deferred() const override;
  void construct(const ConstructMemory& memory, bool runs_operators) override;
  void bind(uint32_t param, void* memory, zr_dtype dtype) override;
  DeviceMemory* memory() override;
  void keep_on_device() override;
  void weights_changed(bool frozen_too) override;
  void values_replaced(const std::vector<uint32_t>& params) override;
  void use_threads(ParallelFor parallel_for) override;
  void bind_shared(uint32_t param, const void* memory, zr_dtype dtype) override;
  void on_use(Uses uses) override;
  void unbind(uint32_t param, zr_dtype dtype) override;
  void attach(uint32_t param, void* memory) override;
  std::vector<uint32_t> written() override;
  std::vector<uint32_t> may_be_written_untracked() override;
  void check_bindings() override;
  void check_scopes(const std::string& call) override;
  void check_scope(uint32_t param, const std::string& call) override;
  void* reserve_parameter(uint32_t param, zr_dtype dtype, bool other) override;
  void cancel_reserved_parameters() override;
  void convert_buffers(zr_dtype dtype) override;
  void return_parameters() override;
  void on_gradient(Arrived arrived) override;
  void on_gradient_computed(std::function<void(uint32_t param)> computed) override;
  void deliver_on_thread(bool on) override;
  void finish_gradients() override;
  void drop_computed_gradients() override;
  zr_view gradient(uint32_t param) override;
  void copy_gradient(uint32_t param, int64_t first, const zr_view& dst) override;
  void add_gradient(uint32_t param, int64_t first, const zr_view& dst) override;
  void drop_gradient(uint32_t param) override;
  void hide_gradients(bool hidden) override;
  Temporaries temporaries() const override;
  DeviceBytes device_memory() const override;
  void forget_peak() override;
  void limit_temporaries(int64_t bytes, const std::function<void(int64_t requested)>& over) override;
  void offload_saved_tensors(OffloadCallbacks callbacks) override;
  void seed(uint64_t seed) override;

  /// Throws UserError naming parameters of the program's current model that this TorchModel does not train: added,
  /// replaced or unfrozen since it was made. `parameters`: all parameters of the model, or those to check.
  void check_trained(const std::vector<std::pair<std::string, torch::Tensor>>& parameters) const;
  /// The parameters that a new TorchModel of these tensors would train. Throws UserError if it cannot be made.
  std::vector<plan::Parameter> list_parameters(const std::vector<std::pair<std::string, torch::Tensor>>& parameters,
                                               const std::vector<std::pair<std::string, torch::Tensor>>& buffers) const;
  /// How the program's current buffers differ from those that this model was made with, as in "'x' was replaced by
  /// another tensor".
  std::vector<std::string> changed_buffers(const std::vector<std::pair<std::string, torch::Tensor>>& buffers) const;
  bool has_buffers() const;
  /// Parameters whose shape the program has changed since this model was made: "'w' is [2, 3] and was [3, 2]".
  std::vector<std::string> reshaped_parameters() const;
  /// Uses the program's current buffers if only the tensor changed, not its shape or type: the forward of a TorchScript
  /// module assigns new tensors to its buffers. Copies a buffer if other tensors use its memory too.
  void adopt_buffers(const std::vector<std::pair<std::string, torch::Tensor>>& buffers);
  /// Calls adopt_buffers(), then throws UserError naming buffers that changed in another way, if any.
  void check_buffers(const std::vector<std::pair<std::string, torch::Tensor>>& buffers);
  /// True for a buffer of this model.
  bool has_buffer(const torch::Tensor& tensor) const;
  /// Makes return_parameters() leave sharded and shared parameters without memory, for a TorchModel that reloads them.
  void leave_for_reload();

  /// Gives the parameters (each listed once) full memory until end_gather(). With `keeps_writes`, end_gather() takes
  /// over the values written to it; otherwise it discards them. Collective, except end_gather() without `keeps_writes`.
  void begin_gather(const std::vector<uint32_t>& params);
  void end_gather(const std::vector<uint32_t>& params, bool keeps_writes);
  /// Expires with this model.
  std::weak_ptr<const void> life() const;
  /// How many TorchModels this process made before; their order is the same on all ranks.
  uint64_t number() const;

 private:
  void check_deferred(const std::string& what, const torch::Tensor& tensor);
  void add_parameter(const std::string& name, const torch::Tensor& tensor, bool reloads);
  void add_buffers(const std::vector<std::pair<std::string, torch::Tensor>>& buffers);
  void move_empty(const std::vector<std::pair<std::string, torch::Tensor>>& tensors);
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace zr::host::model
