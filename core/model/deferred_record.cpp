// Construction's recording of operators.
#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "base/error.hpp"
#include "model/deferred_call.hpp"
#include "model/shape_call.hpp"

namespace zr::host::model {

void Construction::RecordingScope::record(const c10::OperatorHandle& op, c10::DispatchKeySet remaining_keys,
                                          Stack* stack) {
  Call call{op, remaining_keys, stack};
  construction_->record(call);
}

bool Construction::provides(const at::TensorBase& tensor) const {
  return tensor.has_storage() && provides(*storage_impl(tensor));
}
bool Construction::provides(c10::StorageImpl& storage) const {
  const Placeholder* placeholder = Placeholder::find(storage);
  return placeholder && placeholder->provider() == this;
}

void Construction::record(Call& call) {
  bool any = false, own = false, foreign = false;
  call.for_each([&](const at::Tensor& tensor, std::size_t) {
    any = true;
    const bool provided = provides(tensor);
    own |= provided;
    foreign |= !provided && placeholder_of(tensor);
  });
  for (std::size_t i = 0; i < call.count; ++i)
    own |= call.argument(i).isStorage() && provides(*call.argument(i).toStorage().unsafeGetStorageImpl());
  if (!own && (any || !call.traits.makes_tensors)) {
    // Only ordinary tensors, or those of an engine.
    if (foreign) return run_intercepted(call.op, call.keys, call.stack);
    const c10::impl::ExcludeDispatchKeyGuard plain(c10::DispatchKey::DeferredInit);
    return call.redispatch();
  }
  // Some views copy if necessary (to, reshape, contiguous): the operators that they call are recorded here.
  if (call.traits.view) return call.redispatch();
  if (call.traits.metadata) return change_metadata(call);
  if (!call.traits.makes_tensors && !call.traits.writes) return query(call);
  if (call.traits.composite) {
    struct Named {
      std::string& name;
      std::string before;
      ~Named() { name = before; }
    } named{composite_, composite_};
    if (composite_.empty()) composite_ = call.name();
    return call.redispatch();
  }
  const c10::impl::ExcludeDispatchKeyGuard once(c10::DispatchKey::DeferredInit);
  add(call);
}

void Construction::fail_values(const Call& call) const {
  const std::string caller = composite_.empty() ? "" : ", which " + composite_ + " calls,";
  fail_user("zr::deferred: " + call.name() + caller +
            " needs values, which a deferred model has only after the engine is made; call it after that, or build "
            "the model without zr::deferred");
}

void Construction::query(Call& call) {
  ShapeCall meta(call.op, *call.stack);
  try {
    meta.run();
  } catch (const c10::Error&) {
    fail_values(call);
  }
  torch::jit::drop(*call.stack, call.count);
  call.stack->insert(call.stack->end(), meta.results().begin(), meta.results().end());
}

// What a use of the tensor's memory without an operator throws.
std::string Construction::reason_for(const at::Tensor& like, const Call& call) const {
  return c10::str("this tensor ", like.sizes(), " of ", composite_.empty() ? call.name() : composite_,
                  " was built by zr::deferred: it has values once the zr::Engine is made; read them with "
                  "engine.get(), or build the model without zr::deferred",
                  call.traits.empty && composite_.empty()
                      ? "; through pointers (data_ptr(), accessor(), torch::tensor()), a constructor can write 1 MiB "
                        "of a tensor and 16 MiB in all: for more, copy_() a tensor of torch::from_blob()"
                      : "; through pointers (data_ptr(), accessor()), a constructor can use only tensors "
                        "of torch::empty(), before their first operator");
}

at::Tensor Construction::placeholder(const at::Tensor& like, const Call& call) {
  at::Tensor made = Placeholder::make(like.sizes(), like.strides(), like.scalar_type(), this,
                                      static_cast<uint32_t>(storages_.size()), reason_for(like, call));
  storages_.emplace_back(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage_impl(made)));
  return made;
}

void Construction::record_bytes(c10::StorageImpl& storage, std::shared_ptr<const std::string> bytes) {
  if (purpose_ == Purpose::shapes) return;
  const c10::impl::ExcludeDispatchKeyGuard plain(c10::DispatchKey::DeferredInit);
  RecordedOperator recorded;
  recorded.results.push_back(at::empty({0}));
  recorded.results[0].unsafeGetTensorImpl()->set_storage_keep_dtype(
      c10::Storage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(&storage)));
  recorded.bytes = std::move(bytes);
  operators_.push_back(std::move(recorded));
}

void Construction::close_pointers(c10::StorageImpl& storage) {
  pointers_.close(storage, [this](c10::StorageImpl& written, std::shared_ptr<const std::string> bytes) {
    record_bytes(written, std::move(bytes));
  });
}

// The operator runs later, so ordinary tensors are copied now. A later run cannot write to them.
Stack Construction::keep_arguments(const Call& call) const {
  Stack kept;
  for (std::size_t i = 0; i < call.count; ++i)
    kept.push_back(map_tensors(call.argument(i), [&](const at::Tensor& tensor) {
      if (call.writes(i)) check_leaf(tensor);
      if (provides(tensor)) return snapshot(tensor);
      if (call.writes(i))
        fail_user("zr::deferred: " + call.name() +
                  " writes a deferred tensor, which has no values yet, into an ordinary tensor; build both within "
                  "zr::deferred, or build the model without it");
      at::Tensor copy;
      if (placeholder_of(tensor)) {  // of an engine
        const OperatorRecorder::Pause pause;
        const c10::impl::IncludeDispatchKeyGuard intercepted(c10::DispatchKey::DeferredInit);
        copy = tensor.detach().clone();
      } else {
        copy = tensor.detach().clone();
      }
      copy_wrapped_number(tensor, copy);
      return copy;
    }));
  return kept;
}

// On the CPU, libtorch converts arguments of several types first, which can change the strides of the result; on meta
// tensors it does not.
bool Construction::converts(const Call& call) {
  std::optional<at::ScalarType> type;
  bool several = false, reordered = false;
  call.for_each([&](const at::Tensor& tensor, std::size_t) {
    several |= type && *type != tensor.scalar_type();
    type = tensor.scalar_type();
    reordered |= !tensor.is_contiguous();
  });
  return several && reordered;
}

// The call without values: on meta tensors, or else on temporary memory.
ShapeCall Construction::shape_of(const Call& call) const {
  const bool by_values =
      call.op.hasTag(at::Tag::data_dependent_output) || call.op.hasTag(at::Tag::dynamic_output_shape);
  ShapeCall meta(call.op, *call.stack);
  bool is_known = true;
  try {
    meta.run();
    if (call.traits.writes || !converts(call)) return meta;
  } catch (const c10::NotImplementedError&) {
    if (by_values) fail_values(call);
    is_known = false;
  } catch (const c10::Error& error) {
    if (by_values || std::string(error.what_without_backtrace()).find("meta") != std::string::npos) fail_values(call);
    throw;  // as in an ordinary construction
  }
  ShapeCall on_memory(call.op, *call.stack, ShapeCall::On::memory);
  const KeptRandomState random(Stack(call.stack->end() - static_cast<std::ptrdiff_t>(call.count), call.stack->end()));
  try {
    on_memory.run();
  } catch (const c10::Error&) {
    if (is_known) return meta;
    fail_values(call);
  }
  return on_memory;
}

std::vector<at::Tensor> Construction::infer(Call& call) {
  const ShapeCall shapes = shape_of(call);
  shapes.resize_arguments();
  torch::jit::drop(*call.stack, call.count);
  std::vector<at::Tensor> made;
  for (const c10::IValue& value : shapes.results())
    call.stack->push_back(map_tensors(value, [&](const at::Tensor& result) {
      if (result.layout() != at::kStrided)
        fail_user("zr::deferred: " + call.name() + " makes a tensor of layout " + c10::str(result.layout()) +
                  ", which a deferred model cannot have; call it after the engine is made, or build the model without "
                  "zr::deferred");
      if (at::Tensor argument = shapes.argument(result); argument.defined()) {
        made.emplace_back();
        return argument;
      }
      // An alias that the schema does not name.
      if (at::Tensor alias = shapes.alias(result); alias.defined()) {
        made.emplace_back();
        return alias;
      }
      const at::Tensor tensor = placeholder(result, call);
      made.push_back(snapshot(tensor));
      return tensor;
    }));
  return made;
}

void Construction::add(Call& call) {
  if (at::autocast::is_autocast_enabled(at::kCPU))
    fail_user(
        "zr::deferred: autocast is enabled in the constructor, which the deferred model cannot repeat; build the "
        "model without autocast, or without zr::deferred");
  for (std::size_t i = 0; i < call.count; ++i)
    if (const c10::IValue& value = call.argument(i); value.isDevice() && !value.toDevice().is_cpu())
      fail_user("zr::deferred: " + call.name() + " makes a tensor on " + value.toDevice().str() +
                ", but a deferred model is built on the CPU; build it there (job.device moves it to the device), or "
                "without zr::deferred");
  call.for_each([&](const at::Tensor& tensor, std::size_t) {
    if (provides(tensor) && !call.traits.empty) close_pointers(*storage_impl(tensor));
  });
  for (std::size_t i = 0; i < call.count; ++i)
    if (call.writes(i))
      map_tensors(call.argument(i), [&](const at::Tensor& tensor) {
        if (provides(tensor)) pointers_.outdate(*storage_impl(tensor));
        return tensor;
      });
  ++size_;
  RecordedOperator recorded;
  recorded.op = call.op;
  recorded.arguments = keep_arguments(call);
  const bool draws_numbers = draws(call.op);
  if (draws_numbers && draws_by_values(call.op) &&
      std::any_of(recorded.arguments.begin(), recorded.arguments.end(), [&](const c10::IValue& value) {
        bool any = false;
        map_tensors(value, [&](const at::Tensor& tensor) {
          any |= provides(tensor);
          return tensor;
        });
        return any;
      }))
    fail_values(call);
  recorded.results = infer(call);
  if (call.traits.empty) {
    if (Placeholder* made = placeholder_of(recorded.results[0])) pointers_.open(*made);
    return;
  }
  if (purpose_ == Purpose::shapes) return;
  if (draws_numbers) recorded.random = random_.draw(call.op, recorded.arguments);
  recorded.default_dtype = c10::get_default_dtype_as_scalartype();
  recorded.threads = at::get_num_threads();
  operators_.push_back(std::move(recorded));
}

}  // namespace zr::host::model
