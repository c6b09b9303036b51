// zr::Engine: unsharded tensors by name.
#include <sstream>

#include "api/engine_state.hpp"
#include "base/text.hpp"

namespace zr {

namespace {
host::state::LogicalTensor engine_kind(TensorKind kind) {
  return kind == TensorKind::value      ? host::state::LogicalTensor::value
         : kind == TensorKind::gradient ? host::state::LogicalTensor::gradient
                                        : host::state::LogicalTensor::state;
}

// The arguments of engine.get() or engine.set() in error reports: "\"b.weight\", state, \"exp_avg\"".
std::string arguments_of(const std::string& parameter, TensorKind kind, const std::string& slot) {
  std::string text = "\"" + host::printable(parameter) + "\"";
  if (kind == TensorKind::gradient) text += ", gradient";
  if (kind == TensorKind::state) text += ", state, \"" + host::printable(slot) + "\"";
  return text;
}

void check_slot(const std::string& call, TensorKind kind, const std::string& slot) {
  if (kind != TensorKind::state && !slot.empty())
    host::fail_user(call + ": '" + host::printable(slot) +
                    "' names an optimizer state; pass it with zr::TensorKind::state, or leave it empty");
}
}  // namespace

torch::Tensor Engine::get(const std::string& parameter, TensorKind kind, const std::string& slot) {
  return state_->collective(
      "get", arguments_of(parameter, kind, slot), [&](host::engine::Session& session, const State::Call& call) {
        call.not_in_swap();
        check_slot(call.text(), kind, slot);
        state_->torch_model->check_trained(state_->module->parameter(parameter));
        const uint32_t index = session.tensors().find(parameter);
        torch::Tensor tensor = torch::empty(session.plan().input.parameters[index].shape, torch::kFloat);
        session.tensors().read(index, engine_kind(kind), slot, tensor.data_ptr<float>());
        return tensor;
      });
}

void Engine::set(const std::string& parameter, TensorKind kind, const torch::Tensor& tensor, const std::string& slot) {
  state_->collective(
      "set", arguments_of(parameter, kind, slot), [&](host::engine::Session& session, const State::Call& call) {
        call.not_in_swap();
        check_slot(call.text(), kind, slot);
        state_->torch_model->check_trained(state_->module->parameter(parameter));
        const uint32_t index = session.tensors().find(parameter);
        const std::vector<int64_t>& shape = session.plan().input.parameters[index].shape;
        if (!tensor.defined()) host::fail_user(call.text() + ": the tensor is undefined; pass a tensor with values");
        if (tensor.layout() != torch::kStrided || !state_->holds(tensor) || tensor.is_complex() ||
            tensor.is_quantized())
          host::fail_user(call.text() + ": the tensor is " + c10::toString(tensor.scalar_type()) + " on " +
                          tensor.device().str() + (tensor.layout() == torch::kStrided ? "" : ", not dense") +
                          ", but must be a dense, real tensor in CPU memory" +
                          (state_->device.is_cpu() ? "" : " or on " + state_->device.str()));
        if (tensor.sizes() != shape) {
          std::ostringstream text;
          text << call.text() << ": the tensor has shape " << tensor.sizes() << ", but the parameter has shape "
               << c10::IntArrayRef(shape);
          host::fail_user(text.str());
        }
        const torch::Tensor values = tensor.detach().to(torch::kCPU, torch::kFloat).contiguous();
        session.tensors().write(index, engine_kind(kind), slot, values.data_ptr<float>());
      });
}

torch::Tensor Engine::buffer(const std::string& name) {
  return state_->collective("buffer", quoted(name), [&](host::engine::Session& session, const State::Call&) {
    const torch::Tensor buffer = state_->buffer(name);
    torch::Tensor value = torch::empty(buffer.sizes(), buffer.options().device(torch::kCPU));
    if (value.numel() == 0) return value;
    const std::string bytes = session.tensors().buffer(name);
    if (bytes.size() != value.nbytes())
      host::fail_internal("buffer '" + name + "' has " + std::to_string(bytes.size()) + " bytes, not " +
                          std::to_string(value.nbytes()));
    std::memcpy(value.data_ptr(), bytes.data(), bytes.size());
    return value.to(buffer.device());
  });
}

void Engine::set_buffer(const std::string& name, const torch::Tensor& tensor) {
  state_->collective(
      "set_buffer", "\"" + host::printable(name) + "\"", [&](host::engine::Session& session, const State::Call& call) {
        const torch::Tensor buffer = state_->buffer(name);
        if (!tensor.defined()) host::fail_user(call.text() + ": the tensor is undefined; pass a tensor with values");
        if (tensor.sizes() != buffer.sizes())
          host::fail_user("engine.set_buffer('" + name + "'): the tensor has shape " + c10::str(tensor.sizes()) +
                          ", but the buffer has shape " + c10::str(buffer.sizes()));
        const torch::Tensor value = tensor.detach().to(buffer.options().device(torch::kCPU)).contiguous();
        if (value.numel() > 0)
          session.tensors().set_buffer(name, std::string(static_cast<const char*>(value.data_ptr()), value.nbytes()));
      });
}

std::string Engine::weights_hash() {
  return state_->collective("weights_hash", "", [](host::engine::Session& session, const State::Call& call) {
    call.not_in_swap();
    return session.tensors().weights_hash();
  });
}

}  // namespace zr
