#include "model/deferred.hpp"

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <unordered_set>

#include "base/error.hpp"
#include "zr/mutex.hpp"

namespace zr::host::model {

namespace {
// Constructions that have not been replayed yet.
struct PendingConstructions {
  Mutex mutex;
  std::vector<std::shared_ptr<Construction>> constructions ZR_GUARDED_BY(mutex);
  static PendingConstructions& get() {
    static auto* pending = new PendingConstructions;  // tensors may outlive statics
    return *pending;
  }
};

at::Tensor random_state() { return at::globalContext().defaultGenerator(at::kCPU).get_state(); }
void set_random_state(const at::Tensor& state) {
  at::Generator generator = at::globalContext().defaultGenerator(at::kCPU);
  generator.set_state(state);
}
bool same_bytes(const at::Tensor& a, const at::Tensor& b) {
  return a.nbytes() == b.nbytes() && std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

// Applies fn to every tensor of a value, also in lists.
template <class F>
c10::IValue map_tensors(const c10::IValue& value, F&& fn) {
  if (value.isTensor()) return value.toTensor().defined() ? c10::IValue(fn(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(fn(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor> tensor : value.toOptionalTensorList())
      list.push_back(tensor && tensor->defined() ? std::optional(fn(*tensor)) : tensor);
    return list;
  }
  return value;
}

at::Tensor to_meta(const at::Tensor& tensor) {
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta).requires_grad(false));
}

// True if the operator overwrites a full storage in place, so that its previous values are not used.
bool overwrites(const c10::OperatorHandle& op, const c10::IValue& self) {
  static const auto* names = new std::unordered_set<std::string>{"aten::normal_", "aten::uniform_", "aten::zero_",
                                                                 "aten::fill_", "aten::copy_"};  // never destroyed
  if (!names->count(op.schema().name())) return false;
  const at::Tensor& tensor = self.toTensor();
  return tensor.nbytes() == tensor.storage().nbytes();
}
bool computes_nothing(const c10::OperatorHandle& op) {
  return op.schema().name() == "aten::empty" || op.schema().name() == "aten::empty_like" ||
         op.schema().name() == "aten::empty_strided";
}

bool writes(const c10::OperatorHandle& op) {
  const auto& arguments = op.schema().arguments();
  return std::any_of(arguments.begin(), arguments.end(),
                     [](const auto& a) { return a.alias_info() && a.alias_info()->isWrite(); });
}
}  // namespace

Construction::RecordingScope::RecordingScope() : construction_(std::make_shared<Construction>()) {
  PendingConstructions& pending = PendingConstructions::get();
  const MutexLock lock(pending.mutex);
  pending.constructions.push_back(construction_);
}

void Construction::RecordingScope::record(const c10::OperatorHandle& op, c10::DispatchKeySet remaining_keys,
                                          Stack* stack) {
  // Views and changes of shape use no memory. Some copy if necessary (to, reshape, contiguous): the operators that they
  // call are recorded here.
  if (is_view(op.schema()) || op.hasTag(at::Tag::inplace_view)) return op.redispatchBoxed(remaining_keys, stack);
  // Operators that another operator calls are not recorded.
  const c10::impl::ExcludeDispatchKeyGuard once(c10::DispatchKey::DeferredInit);
  construction_->add(op, remaining_keys, stack);
}

std::shared_ptr<Construction> Construction::of(const at::Tensor& tensor) {
  const Placeholder* placeholder = Placeholder::find(tensor);
  if (!placeholder) return nullptr;
  PendingConstructions& pending = PendingConstructions::get();
  const MutexLock lock(pending.mutex);
  for (const auto& construction : pending.constructions)
    if (construction.get() == placeholder->provider()) return construction;
  return nullptr;
}

std::string Construction::remedy() const {
  return "set checkpoint.init to a .safetensors file or a checkpoint, or call engine.load(), or torch::load() within a "
         "zr::gather(model->parameters()) scope once the engine is made";
}

void Construction::enter(const ParamUse* param_uses, std::size_t) { fail_user(param_uses->placeholder->reason()); }

at::Tensor Construction::placeholder(const at::Tensor& like) {
  return Placeholder::make(like.sizes(), like.strides(), like.scalar_type(), this, placeholder_count_++,
                           "this tensor was built by zr::deferred: it has values once the zr::Engine is made; read "
                           "them with engine.get(), or build the model without zr::deferred");
}

// Runs an operator on meta tensors, and makes placeholders for its results.
void Construction::infer(const c10::OperatorHandle& op, Stack* stack, std::vector<at::Tensor>& results) {
  const auto& arguments = op.schema().arguments();
  const std::size_t first = stack->size() - arguments.size();
  Stack shapes;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    shapes.push_back(arguments[i].name() == "device" ? c10::IValue(c10::Device(c10::kMeta))
                                                     : map_tensors((*stack)[first + i], to_meta));
  }
  try {
    op.callBoxed(shapes);
  } catch (const c10::Error&) {
    fail_user("zr::deferred: " + op.schema().name() +
              " needs values, which a deferred model has only after the engine is made; call it after that, or build "
              "the model without zr::deferred");
  }
  torch::jit::drop(*stack, arguments.size());
  for (const c10::IValue& shape : shapes)
    stack->push_back(map_tensors(shape, [&](const at::Tensor& meta) {
      results.push_back(placeholder(meta));
      return results.back();
    }));
}

void Construction::add(const c10::OperatorHandle& op, c10::DispatchKeySet remaining_keys, Stack* stack) {
  std::vector<ParamUse> param_uses;
  find_param_uses(op, *stack, param_uses);
  const auto& schema = op.schema();
  const bool has_tensors =
      std::any_of(stack->end() - static_cast<std::ptrdiff_t>(schema.arguments().size()), stack->end(),
                  [](const c10::IValue& v) { return v.isTensor() || v.isTensorList() || v.isOptionalTensorList(); });
  // Operators that use only ordinary tensors run at once.
  if (param_uses.empty() && has_tensors) return op.redispatchBoxed(remaining_keys, stack);
  Step step{op, Stack(stack->end() - static_cast<std::ptrdiff_t>(schema.arguments().size()), stack->end()), {}, {}};
  keep_inputs(op, step.arguments);
  const at::Tensor random = random_state();
  if (steps_.empty() || !same_bytes(random, random_)) step.random = random;
  random_ = random;
  if (writes(op)) {
    // In place: the results are arguments.
    const std::size_t first = stack->size() - schema.arguments().size();
    Stack results;
    for (const auto& result : schema.returns())
      for (std::size_t i = 0; i < schema.arguments().size(); ++i) {
        const auto* alias = schema.arguments()[i].alias_info();
        if (!alias || !result.alias_info() || *alias != *result.alias_info()) continue;
        results.push_back((*stack)[first + i]);
        break;
      }
    torch::jit::drop(*stack, schema.arguments().size());
    stack->insert(stack->end(), results.begin(), results.end());
  } else {
    infer(op, stack, step.results);
  }
  steps_.push_back(std::move(step));
}

// The operator runs later, so ordinary tensors are copied now. A later run cannot write to them.
void Construction::keep_inputs(const c10::OperatorHandle& op, Stack& arguments) {
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = op.schema().arguments()[i].alias_info();
    const bool written = alias && alias->isWrite();
    arguments[i] = map_tensors(arguments[i], [&](const at::Tensor& tensor) {
      if (Placeholder::find(tensor)) return tensor;
      if (written)
        fail_user("zr::deferred: " + op.schema().name() +
                  " writes a deferred tensor, which has no values yet, into an ordinary tensor; build both within "
                  "zr::deferred, or build the model without it");
      return tensor.clone();
    });
  }
}

// One parameter at a time uses the staging memory. If an operator uses several, the others get separate memory.
class Construction::Replay {
 public:
  Replay(const Storages& param_of, const Model::ConstructMemory& load, bool runs_operators)
      : param_of_(param_of), load_(load), runs_operators_(runs_operators) {}

  void run(Step& step) {
    std::vector<at::Tensor> tensors = step.results;
    for (const c10::IValue& value : step.arguments)
      map_tensors(value, [&](const at::Tensor& tensor) {
        tensors.push_back(tensor);
        return tensor;
      });
    overwritten_ = !step.arguments.empty() && step.arguments[0].isTensor() && overwrites(step.op, step.arguments[0])
                       ? Placeholder::find(step.arguments[0].toTensor())
                       : nullptr;
    std::vector<Placeholder*> params;
    for (const at::Tensor& tensor : tensors) provide_memory(tensor, params);
    if (runs_operators_ && !computes_nothing(step.op)) {
      const at::NoGradGuard no_grad;
      const c10::impl::ExcludeDispatchKeyGuard plain(c10::DispatchKey::DeferredInit);
      if (step.random) set_random_state(*step.random);
      Stack stack = step.arguments;
      step.op.callBoxed(stack);
      // provide_memory() gave the new tensors memory: the results are copied there.
      std::size_t i = 0;
      for (const c10::IValue& value : stack)
        map_tensors(value, [&](const at::Tensor& computed) {
          if (i < step.results.size()) step.results[i++].copy_(computed);
          return computed;
        });
    }
    // The one in the staging memory first: store() may use that memory.
    while (attached_.size() > 1) store_and_detach(attached_.front());
  }
  void finish() {
    while (!attached_.empty()) store_and_detach(attached_.front());
  }

 private:
  void provide_memory(const at::Tensor& tensor, std::vector<Placeholder*>& params) {
    Placeholder* placeholder = Placeholder::find(tensor);
    if (!placeholder || placeholder->memory()) {
      if (placeholder && param_of_.count(&placeholder->storage())) params.push_back(placeholder);
      return;
    }
    const auto at = param_of_.find(&placeholder->storage());
    if (at == param_of_.end()) return placeholder->keep(allocate_memory(placeholder->storage().nbytes()));
    // Uses the staging memory, or separate memory while another parameter of this operator uses it.
    for (Placeholder* other : std::vector<Placeholder*>(attached_))
      if (std::find(params.begin(), params.end(), other) == params.end()) store_and_detach(other);
    params.push_back(placeholder);
    float* memory = load_.staging;
    if (!attached_.empty()) {
      extra_memory_.push_back(std::make_unique<float[]>(placeholder->storage().nbytes() / sizeof(float) + 1));
      memory = extra_memory_.back().get();
      extra_bytes_ += static_cast<int64_t>(placeholder->storage().nbytes());
      load_.account(static_cast<int64_t>(placeholder->storage().nbytes()));
    }
    if (stored_.count(at->second) && placeholder != overwritten_) load_.load(at->second, memory);
    placeholder->attach(memory);
    attached_.push_back(placeholder);
  }
  void store_and_detach(Placeholder* placeholder) {
    const uint32_t param = param_of_.at(&placeholder->storage());
    load_.store(param, static_cast<const float*>(placeholder->memory()));
    stored_.insert(param);
    placeholder->detach();
    attached_.erase(std::find(attached_.begin(), attached_.end(), placeholder));
    if (!attached_.empty() || extra_memory_.empty()) return;
    extra_memory_.clear();
    load_.account(-std::exchange(extra_bytes_, 0));
  }
  static at::DataPtr allocate_memory(std::size_t bytes) { return c10::GetAllocator(c10::kCPU)->allocate(bytes); }

  const Storages& param_of_;
  const Model::ConstructMemory& load_;
  bool runs_operators_;
  const Placeholder* overwritten_ = nullptr;            // by the current operator, completely
  std::vector<Placeholder*> attached_;                  // parameters with memory
  std::vector<std::unique_ptr<float[]>> extra_memory_;  // separate memory of the others
  int64_t extra_bytes_ = 0;
  std::unordered_set<uint32_t> stored_;
};

void Construction::replay(const Storages& param_of, const Model::ConstructMemory& load, bool runs_operators) {
  Replay replay(param_of, load, runs_operators);
  for (Step& step : steps_) {
    replay.run(step);
    step = Step{step.op, {}, {}, {}};  // frees temporaries as soon as possible
  }
  replay.finish();
  PendingConstructions& pending = PendingConstructions::get();
  const MutexLock lock(pending.mutex);
  std::erase_if(pending.constructions, [this](const auto& construction) { return construction.get() == this; });
}

}  // namespace zr::host::model
