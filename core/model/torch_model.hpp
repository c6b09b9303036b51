// The libtorch side of Model: parameters bound to flat memory, gradients caught where autograd accumulates them.
#pragma once

#include <torch/types.h>

#include <memory>

#include "model/model.hpp"

namespace zr::host {

class TorchModel final : public Model {
 public:
  /// Names in the model's order; a tensor under several names is one parameter. Throws Failure(user) for parameters
  /// that are not dense floating-point CPU tensors, or that another engine trains.
  /// `reloads`: parameters that an engine left without memory read as zeros, until their values are stored.
  TorchModel(const std::vector<std::pair<std::string, torch::Tensor>>& parameters,
             const std::vector<std::pair<std::string, torch::Tensor>>& buffers, zr_dtype dtype, bool reloads = false);
  ~TorchModel() override;

  const std::vector<Parameter>& parameters() const override;
  std::vector<ModelBuffer> buffers() override;
  void read(uint32_t param, float* out) override;
  std::size_t deferred() const override;
  void construct(const ConstructMemory& memory, bool computes) override;
  void bind(uint32_t param, void* memory, zr_dtype dtype) override;
  void bind_shared(uint32_t param, const void* memory, zr_dtype dtype) override;
  void on_use(Uses uses) override;
  void unbind(uint32_t param, zr_dtype dtype) override;
  void attach(uint32_t param, void* memory) override;
  std::vector<uint32_t> written() override;
  std::vector<uint32_t> exposed() override;
  void verify() override;
  void check_scopes(const std::string& call) override;
  void check_scope(uint32_t param, const std::string& call) override;
  void* reserve_release(uint32_t param, zr_dtype dtype, bool other) override;
  void cancel_release() override;
  void convert_buffers(zr_dtype dtype) override;
  void release() override;
  void on_gradient(Arrived arrived) override;
  void copy_gradient(uint32_t param, int64_t first, const zr_view& dst) override;
  void add_gradient(uint32_t param, int64_t first, const zr_view& dst) override;
  void drop_gradient(uint32_t param) override;
  void hide_gradients(bool hidden) override;
  Temporaries temporaries() const override;
  void forget_peak() override;
  void limit_temporaries(int64_t bytes, const std::function<void(int64_t requested)>& over) override;
  void offload_saved_tensors(OffloadCallbacks callbacks) override;
  void seed(uint64_t seed) override;

  /// Throws Failure(user) naming parameters of the program's model, as it is now, that this one does not train: added
  /// or replaced since, or frozen then and no longer. `parameters`: all of its, or those in question.
  void check_trained(const std::vector<std::pair<std::string, torch::Tensor>>& parameters) const;
  /// What a TorchModel of these would train instead of this one. Throws Failure(user) where none can be made.
  std::vector<Parameter> list_parameters(const std::vector<std::pair<std::string, torch::Tensor>>& parameters,
                                         const std::vector<std::pair<std::string, torch::Tensor>>& buffers) const;
  /// How the program's buffers, as they are now, are not those that this model was made with: "'x' was replaced by
  /// another tensor".
  std::vector<std::string> changed_buffers(const std::vector<std::pair<std::string, torch::Tensor>>& buffers) const;
  bool has_buffers() const;
  /// Takes the program's buffers, as they are now, for its own where only the tensor changed, not its shape or type:
  /// the forward of a TorchScript module assigns new tensors to its buffers. One whose memory others use, too, gets a
  /// copy.
  void adopt_buffers(const std::vector<std::pair<std::string, torch::Tensor>>& buffers);
  /// adopt_buffers(), then throws Failure(user) naming those that changed otherwise, if there are any.
  void check_buffers(const std::vector<std::pair<std::string, torch::Tensor>>& buffers);
  /// True for a buffer that this model was made with.
  bool has_buffer(const torch::Tensor& tensor) const;
  /// release() leaves sharded and shared parameters without memory, for a TorchModel that reloads them.
  void hand_over();

  /// Real memory for parameters, each named once, until end_gather(), which takes over what was written to it, or not.
  /// Collective; letting go without taking over is not.
  void begin_gather(const std::vector<uint32_t>& params);
  void end_gather(const std::vector<uint32_t>& params, bool takes_over);
  /// Expires with this model.
  std::weak_ptr<const void> life() const;
  /// How many were made before it in this process; their order is the same on all ranks.
  uint64_t number() const;

 private:
  void check_deferred(const std::string& name, const torch::Tensor& tensor);
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace zr::host
