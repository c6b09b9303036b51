// The kernel of every other operator: shapes on the host, the CPU kernel in a task of the current stream.
#include <ATen/EmptyTensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstdio>
#include <cstdlib>
#include <set>

#include "sim.hpp"

namespace zr::test::sim {
namespace {

using torch::jit::Stack;
using Names = std::set<std::string_view>;

// The Meta kernel is a composite one, whose dtypes or strides differ from those of the CPU kernel, or it throws.
const Names kShapesOnZeros = {"aten::convolution",
                              "aten::convolution_backward",
                              "aten::native_layer_norm",
                              "aten::native_layer_norm_backward",
                              "aten::native_group_norm",
                              "aten::native_group_norm_backward",
                              "aten::_fused_rms_norm",
                              "aten::_fused_rms_norm_backward",
                              "aten::mkldnn_rnn_layer",
                              "aten::mkldnn_rnn_layer_backward",
                              "aten::embedding_dense_backward"};
// The shapes of the results depend on values.
const Names kShapesOfValues = {"aten::nonzero",
                               "aten::masked_select",
                               "aten::_unique",
                               "aten::_unique2",
                               "aten::unique_dim",
                               "aten::unique_consecutive",
                               "aten::unique_dim_consecutive",
                               "aten::bincount",
                               "aten::repeat_interleave",
                               "aten::segment_reduce",
                               "aten::_embedding_bag",
                               "aten::_embedding_bag_forward_only",
                               "aten::linalg_lstsq",
                               "aten::_histogramdd_bin_edges"};
// CUDA accepts CPU tensors that are not scalars here.
const Names kCpuArguments = {"aten::index",
                             "aten::_unsafe_index",
                             "aten::index_put_",
                             "aten::index_put",
                             "aten::_index_put_impl_",
                             "aten::_unsafe_index_put",
                             "aten::_pack_padded_sequence",
                             "aten::_ctc_loss"};

// Applies a function to each tensor of an argument or result and replaces devices.
template <typename F>
c10::IValue map_tensors(const c10::IValue& value, c10::DeviceType device, const F& f) {
  if (value.isTensor()) return f(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& each : value.toTensorVector()) list.push_back(f(each));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& each : value.toOptionalTensorVector())
      list.push_back(each.has_value() ? std::optional<at::Tensor>(f(*each)) : std::nullopt);
    return list;
  }
  if (value.isDevice()) return c10::Device(device);
  return value;
}

template <typename F>
void for_tensors(const c10::IValue& value, const F& f) {
  map_tensors(value, kSim, [&](const at::Tensor& each) {
    if (each.defined()) f(each);
    return each;
  });
}

bool is_generator(const c10::Argument& argument) {
  const c10::Type* type = argument.type().get();
  if (const auto* const optional = type->castRaw<c10::OptionalType>()) type = optional->getElementType().get();
  return type->kind() == c10::TypeKind::GeneratorType;
}

at::Tensor meta_like(const at::Tensor& t, Mirror& mirror) { return t.defined() ? mirror.of(t) : t; }

at::Tensor zeros_like_layout(const at::Tensor& t) {
  if (!t.defined()) return t;
  if (t.is_cpu()) return t.clone();
  at::Tensor zeros = at::detail::empty_strided_cpu(t.sizes(), t.strides(), t.scalar_type());
  return zeros.zero_();
}

// One call of an operator.
class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack& stack) : op_(op), schema_(op.schema()), stack_(stack) {
    const auto arguments = torch::jit::last(stack, schema_.arguments().size());
    args_.assign(arguments.begin(), arguments.end());
    find_device();
    for (std::size_t i = 0; i < args_.size(); ++i) {
      const auto* const alias = schema_.arguments()[i].alias_info();
      if (alias != nullptr && alias->isWrite()) writes_ = true;
      if (is_generator(schema_.arguments()[i])) draw_for(i);
    }
    for (const c10::Argument& each : schema_.returns()) {
      if (each.alias_info() == nullptr) fresh_ = true;
      if (each.type()->kind() != c10::TypeKind::TensorType && each.type()->kind() != c10::TypeKind::ListType)
        host_value_ = true;
      if (each.type()->kind() == c10::TypeKind::ListType &&
          each.type()->castRaw<c10::ListType>()->getElementType()->kind() != c10::TypeKind::TensorType)
        host_value_ = true;
    }
  }

  void run() {
    const c10::DeviceGuard guard(c10::Device(kSim, device_));
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    if (host_value_) return run_and_wait();
    if (const auto shapes = infer()) return enqueue(*shapes);
    if (writes_ && !fresh_ && !has_out() && !rejected_) return enqueue({});
    run_and_wait();
  }

 private:
  const std::string& name() const { return schema_.name(); }

  void find_device() {
    std::optional<c10::Device> device;
    for (const c10::IValue& each : args_)
      for_tensors(each, [&](const at::Tensor& t) {
        if (t.device().type() != kSim) return;
        if (device.has_value() && *device != t.device()) different_devices(*device, t.device());
        device = t.device();
      });
    for (std::size_t i = 0; i < args_.size(); ++i) {
      const auto* const alias = schema_.arguments()[i].alias_info();
      const bool written = alias != nullptr && alias->isWrite();
      for_tensors(args_[i], [&](const at::Tensor& t) {
        if (t.device().type() == kSim) return;
        const bool allowed = t.is_cpu() && !written && (t.dim() == 0 || kCpuArguments.count(name()) != 0);
        if (!allowed && device.has_value()) different_devices(*device, t.device());
      });
      if (!device.has_value() && args_[i].isDevice() && args_[i].toDevice().has_index()) device = args_[i].toDevice();
    }
    device_ = device.has_value() ? device->index() : current_device();
  }

  [[noreturn]] void different_devices(c10::Device a, c10::Device b) const {
    TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", a, " and ", b,
                "! (in ", name(), ")");
  }

  void draw_for(std::size_t i) {
    generator_ = i;
    std::optional<at::Generator> from;
    if (args_[i].isGenerator()) from = args_[i].toGenerator();
    seed_ = draw_seed(from, device_);
  }

  bool has_out() const {
    for (const c10::Argument& each : schema_.arguments())
      if (each.is_out()) return true;
    return false;
  }

  // The arguments with each tensor replaced.
  template <typename F>
  Stack arguments(c10::DeviceType device, const F& f) const {
    Stack stack;
    for (const c10::IValue& each : args_) stack.push_back(map_tensors(each, device, f));
    return stack;
  }

  // Results without data: on Meta, or else of the CPU kernel on zeros. Nothing if neither is possible.
  std::optional<Stack> infer() {
    if (kShapesOfValues.count(name()) != 0 || has_mask()) return std::nullopt;
    const auto on_meta = kShapesOnZeros.count(name()) != 0 ? std::nullopt : infer(/*zeros=*/false);
    if (on_meta.has_value()) return on_meta;
    return fresh_ || has_out() ? infer(/*zeros=*/true) : std::nullopt;
  }

  std::optional<Stack> infer(bool zeros) {
    Mirror mirror(Mirror::kMeta);
    Stack stack = zeros ? arguments(c10::kCPU, zeros_like_layout)
                        : arguments(c10::kMeta, [&](const at::Tensor& t) { return meta_like(t, mirror); });
    if (generator_.has_value())
      stack[*generator_] = zeros ? c10::IValue(at::detail::createCPUGenerator(seed_)) : c10::IValue();
    try {
      op_.callBoxed(stack);
    } catch (const c10::NotImplementedError&) {
      return std::nullopt;
    } catch (const c10::Error&) {
      rejected_ = true;  // run_and_wait() reports the error of the CPU kernel, if it has one
      return std::nullopt;
    }
    bool usable = true;
    for (const c10::IValue& each : stack)
      for_tensors(each, [&](const at::Tensor& t) { usable = usable && (zeros || t.is_meta()); });
    if (!usable) return std::nullopt;
    return stack;
  }

  // A mask among the indices: the shape of the result depends on its values.
  bool has_mask() const {
    bool mask = false;
    for (const c10::IValue& each : args_)
      if (fresh_ && each.isOptionalTensorList())
        for_tensors(each, [&](const at::Tensor& t) {
          mask = mask || t.scalar_type() == at::kBool || t.scalar_type() == at::kByte;
        });
    return mask;
  }

  // The argument that a result aliases.
  std::size_t aliased(const c10::Argument& result) const {
    for (std::size_t i = 0; i < args_.size(); ++i) {
      const auto* const alias = schema_.arguments()[i].alias_info();
      if (alias != nullptr && alias->beforeSets() == result.alias_info()->beforeSets()) return i;
    }
    TORCH_CHECK(false, "sim: a result of ", name(), " aliases no argument");
  }

  // The CPU arguments of a task. CPU tensors are copied: the caller may change them.
  Stack task_arguments() const {
    Mirror mirror(Mirror::kBacking);
    Stack stack = arguments(c10::kCPU, [&](const at::Tensor& t) {
      if (!t.defined() || t.device().type() == kSim) return t.defined() ? mirror.of(t) : t;
      at::Tensor copy = t.clone();
      if (t.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
      return copy;
    });
    if (generator_.has_value()) stack[*generator_] = at::detail::createCPUGenerator(seed_);
    return stack;
  }

  // Gives an out= argument the sizes of its result.
  static void fit(const at::Tensor& out, const at::Tensor& shape) {
    if (out.sizes() == shape.sizes()) return;
    out.resize_(shape.sizes());
    out.unsafeGetTensorImpl()->set_sizes_and_strides(shape.sizes(), shape.strides());
  }

  void finish(Stack results) {
    torch::jit::drop(stack_, schema_.arguments().size());
    for (c10::IValue& each : results) stack_.push_back(std::move(each));
  }

  void enqueue(const Stack& shapes) {
    Stack results;
    std::vector<at::Tensor> outputs;  // CPU tensors over the new results; undefined: nothing to copy
    bool view = false;
    for (std::size_t r = 0; r < schema_.returns().size(); ++r) {
      const c10::Argument& declared = schema_.returns()[r];
      if (declared.alias_info() == nullptr) {
        results.push_back(map_tensors(shapes[r], kSim, [&](const at::Tensor& t) {
          outputs.emplace_back();
          if (!t.defined()) return t;
          at::Tensor made = empty_strided_on(device_, t.sizes(), t.strides(), t.scalar_type());
          outputs.back() = backing_tensor(made);
          return made;
        }));
        continue;
      }
      const c10::IValue& source = args_[aliased(declared)];
      if (declared.alias_info()->isWrite()) {
        if (!shapes.empty() && source.isTensor()) fit(source.toTensor(), shapes[r].toTensor());
        results.push_back(source);
      } else {
        view = true;
        results.push_back(map_tensors(shapes[r], kSim, [&](const at::Tensor& t) {
          return view_of(source.toTensor(), t.sizes(), t.strides(), t.storage_offset(), t.scalar_type());
        }));
      }
    }
    if (!view || !outputs.empty()) {
      current_queue(device_).enqueue(
          name(), [op = op_, stack = task_arguments(), outputs = std::move(outputs), grad = grad_]() mutable {
            const at::AutoGradMode mode(grad);
            op.callBoxed(stack);
            copy_results(op.schema(), stack, outputs);
          });
    }
    finish(std::move(results));
  }

  static void copy_results(const c10::FunctionSchema& schema, const Stack& results, std::vector<at::Tensor>& outputs) {
    std::size_t next = 0;
    for (std::size_t r = 0; r < results.size(); ++r) {
      if (schema.returns()[r].alias_info() != nullptr) continue;
      map_tensors(results[r], c10::kCPU, [&](const at::Tensor& t) {
        at::Tensor& to = outputs.at(next++);
        if (to.defined() && t.defined()) {
          TORCH_CHECK(to.sizes() == t.sizes() && to.scalar_type() == t.scalar_type(), "result ", r, " has shape ",
                      t.sizes(), " ", t.scalar_type(), "; expected ", to.sizes(), " ", to.scalar_type());
          to.copy_(t);
        }
        return t;
      });
    }
  }

  // For shapes or values that depend on data: runs the operator, waits, and copies the results to the device.
  void run_and_wait() {
    static const bool log = env_number("ZR_SIM_LOG", 0) != 0;
    if (log) std::fprintf(stderr, "sim: %s waits for the device\n", name().c_str());
    const auto stack = std::make_shared<Stack>(task_arguments());
    for (std::size_t i = 0; i < args_.size(); ++i)  // the CPU kernel may resize an out= argument
      if (schema_.arguments()[i].is_out() && args_[i].isTensor())
        (*stack)[i] = at::detail::empty_cpu({0}, args_[i].toTensor().scalar_type());
    const auto error = std::make_shared<std::exception_ptr>();
    StreamQueue& queue = current_queue(device_);
    const uint64_t ticket = queue.enqueue(name(), [op = op_, stack, error, grad = grad_] {
      const at::AutoGradMode mode(grad);
      try {
        op.callBoxed(*stack);
      } catch (...) {
        *error = std::current_exception();
      }
    });
    synchronize(queue, ticket);
    if (*error) std::rethrow_exception(*error);
    Stack results;
    for (std::size_t r = 0; r < schema_.returns().size(); ++r) {
      const c10::Argument& declared = schema_.returns()[r];
      if (declared.alias_info() == nullptr) {
        results.push_back(map_tensors((*stack)[r], kSim, [&](const at::Tensor& t) { return to_device(t); }));
        continue;
      }
      TORCH_CHECK(declared.alias_info()->isWrite(), "sim: the view operator ", name(), " has no Meta kernel");
      const std::size_t i = aliased(declared);
      if (schema_.arguments()[i].is_out() && args_[i].isTensor()) {
        const at::Tensor out = args_[i].toTensor(), from = (*stack)[r].toTensor();
        fit(out, from);
        out.copy_(from);
      }
      results.push_back(args_[i]);
    }
    finish(std::move(results));
  }

  at::Tensor to_device(const at::Tensor& t) const {
    if (!t.defined()) return t;
    const at::Tensor made = empty_strided_on(device_, t.sizes(), t.strides(), t.scalar_type());
    if (t.numel() > 0)
      current_queue(device_).enqueue("result", [to = backing_tensor(made), from = t]() mutable { to.copy_(from); });
    return made;
  }

  const c10::OperatorHandle op_;
  const c10::FunctionSchema& schema_;
  Stack& stack_;
  Stack args_;
  c10::DeviceIndex device_ = 0;
  std::optional<std::size_t> generator_;
  uint64_t seed_ = 0;
  const bool grad_ = at::GradMode::is_enabled();  // some CPU kernels read it, for example mkldnn_rnn_layer
  bool rejected_ = false;                         // the Meta kernel threw an error of its own
  bool writes_ = false, fresh_ = false, host_value_ = false;
};

}  // namespace

void enqueue_operator(const c10::OperatorHandle& op, torch::jit::Stack* stack) { Call(op, *stack).run(); }

namespace {

// Registered in other files of this folder.
const Names kOwnKernels = {"aten::empty.memory_format",
                           "aten::empty_strided",
                           "aten::as_strided",
                           "aten::view",
                           "aten::_reshape_alias",
                           "aten::resize_",
                           "aten::set_.source_Storage_storage_offset",
                           "aten::set_.source_Storage",
                           "aten::set_.source_Tensor",
                           "aten::set_",
                           "aten::record_stream",
                           "aten::_copy_from",
                           "aten::_copy_from_and_resize",
                           "aten::native_dropout",
                           "aten::_fused_sdp_choice"};

// Directly, and not only as the fallback: a decomposition that a composite kernel defines would be chosen before the
// fallback, and its bits differ from those of the CPU kernel.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  const auto add = [&](const std::string& name) {
    m.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&enqueue_operator>());
  };
  for (const c10::OperatorName& each :
       c10::Dispatcher::singleton().getRegistrationsForDispatchKey(c10::DispatchKey::CPU)) {
    const std::string name = each.overload_name.empty() ? each.name : each.name + "." + each.overload_name;
    if (name.starts_with("aten::") && kOwnKernels.count(name) == 0) add(name);
  }
  // Composite on the CPU, but the composite kernel selects the implementation by device.
  add("aten::convolution");
  add("aten::convolution_backward");
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&enqueue_operator>()); }

}  // namespace
}  // namespace zr::test::sim
