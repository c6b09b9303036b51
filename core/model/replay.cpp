#include "model/replay.hpp"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <cstring>

#include "base/error.hpp"
#include "model/pointer_writes.hpp"

namespace zr::host::model {

namespace {
// Memory that a constructor could write through a pointer begins as zeros (PointerWrites).
void clear_if_small(void* memory, std::size_t bytes) {
  if (bytes <= PointerWrites::kLargest) std::memset(memory, 0, bytes);
}

at::DataPtr allocate(std::size_t bytes) {
  at::DataPtr memory = c10::GetAllocator(c10::kCPU)->allocate(bytes);
  clear_if_small(memory.get(), bytes);
  return memory;
}

bool fills_storage(const at::Tensor& tensor) {
  return tensor.storage_offset() == 0 && tensor.nbytes() == tensor.storage().nbytes() &&
         tensor.is_non_overlapping_and_dense();
}

// The placeholder whose previous values the operator does not use, because it overwrites all of them; null if there is
// none.
const Placeholder* overwritten_by(const RecordedOperator& recorded) {
  static const auto& names = *new std::unordered_set<std::string>{"aten::normal_", "aten::uniform_", "aten::zero_",
                                                                  "aten::fill_", "aten::copy_"};
  if (!recorded.op || !names.count(recorded.name()) || !recorded.arguments[0].isTensor()) return nullptr;
  const at::Tensor& self = recorded.arguments[0].toTensor();
  if (!fills_storage(self)) return nullptr;
  bool also_read = false;
  for_each_tensor(recorded.arguments, recorded.arguments.size() - 1, [&](const at::Tensor& tensor, std::size_t) {
    also_read |= storage_impl(tensor) == storage_impl(self);
  });
  return also_read ? nullptr : placeholder_of(self);
}

// The settings of libtorch at the time of the call, while the object exists.
class Settings {
 public:
  explicit Settings(const RecordedOperator& recorded)
      : dtype_(c10::get_default_dtype()), threads_(at::get_num_threads()) {
    use(c10::scalarTypeToTypeMeta(recorded.default_dtype), recorded.threads);
  }
  ~Settings() { use(dtype_, threads_); }
  Settings(const Settings&) = delete;

 private:
  static void use(caffe2::TypeMeta dtype, int threads) {
    if (c10::get_default_dtype() != dtype) c10::set_default_dtype(dtype);
    if (threads > 0 && at::get_num_threads() != threads) at::set_num_threads(threads);
  }
  const caffe2::TypeMeta dtype_;
  const int threads_;
};
}  // namespace

Replay::Replay(const Registered& registered, const Model::ConstructMemory& memory, bool runs_operators)
    : registered_(registered), memory_(memory), runs_operators_(runs_operators) {
  std::unordered_set<const c10::StorageImpl*> of_buffers;
  for (const auto& [name, tensor] : registered_.buffers) of_buffers.insert(storage_impl(tensor));
  for (uint32_t param = 0; param < registered_.parameters.size(); ++param) {
    const at::Tensor& tensor = registered_.parameters[param].second;
    // A storage that a buffer uses too stays an ordinary one, as do tensors without elements.
    if (placeholder_of(tensor) && tensor.numel() > 0 && !of_buffers.count(storage_impl(tensor)))
      parts_[storage_impl(tensor)].params.push_back(param);
  }
  std::erase_if(parts_, [&](const auto& item) {
    const uint32_t param = item.second.params.front();
    const at::Tensor& tensor = registered_.parameters[param].second;
    if (item.second.params.size() > 1 || tensor.scalar_type() != at::kFloat || !tensor.is_contiguous() ||
        !fills_storage(tensor))
      return false;
    staged_.emplace(item.first, param);
    return true;
  });
}

void Replay::prepare(const std::vector<RecordedOperator>& operators) {
  std::unordered_map<const c10::StorageImpl*, std::size_t> last;
  for (std::size_t i = 0; i < operators.size() && !parts_.empty(); ++i)
    operators[i].for_each([&](const at::Tensor& tensor) {
      if (parts_.count(storage_impl(tensor))) last[storage_impl(tensor)] = i;
    });
  for (const auto& [name, tensor] : registered_.parameters)
    if (const auto found = last.find(storage_impl(tensor)); found != last.end()) {
      last_uses_[found->second].push_back(&parts_.at(found->first));
      last.erase(found);
    }
}

void Replay::run(RecordedOperator& recorded, std::size_t index) {
  provide(recorded);
  if (runs_operators_ && recorded.op) execute(recorded);
  if (recorded.bytes && runs_operators_)
    std::memcpy(recorded.results[0].storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get(),
                recorded.bytes->data(), recorded.bytes->size());
  // The one in the staging memory first: store() may use that memory.
  while (attached_.size() > 1) store_and_detach(attached_.front());
  if (const auto ended = last_uses_.find(index); ended != last_uses_.end())
    for (Parts* parts : ended->second) store_parts(*parts);
}

void Replay::detach_all() {
  while (!attached_.empty()) store_and_detach(attached_.front());
}

void Replay::finish() {
  detach_all();
  for (uint32_t param = 0; param < registered_.parameters.size(); ++param) {
    const at::Tensor& tensor = registered_.parameters[param].second;
    const auto parts = parts_.find(storage_impl(tensor));
    const bool unused =
        parts != parts_.end() ? !parts->second.stored : staged_.count(storage_impl(tensor)) && !stored_.count(param);
    if (!unused) continue;
    std::fill_n(memory_.staging, tensor.numel(), 0.0f);
    memory_.store(param, memory_.staging);
  }
}

void Replay::complete(c10::StorageImpl& storage) {
  if (Placeholder* placeholder = Placeholder::find(storage)) placeholder->keep(allocate(storage.nbytes()));
}

void Replay::provide(const RecordedOperator& recorded) {
  overwritten_ = overwritten_by(recorded);
  std::vector<Placeholder*> in_use;  // staged parameters of this operator
  recorded.for_each([&](const at::Tensor& tensor) {
    Placeholder* placeholder = placeholder_of(tensor);
    if (!placeholder) return;
    if (const auto staged = staged_.find(&placeholder->storage()); staged != staged_.end())
      return provide_staged(*placeholder, staged->second, in_use);
    if (placeholder->memory()) return;
    if (const auto parts = parts_.find(&placeholder->storage()); parts != parts_.end())
      return provide_parts(*placeholder, parts->second);
    const bool is_result = runs_operators_ && recorded.op &&
                           std::any_of(recorded.results.begin(), recorded.results.end(), [&](const at::Tensor& result) {
                             return result.defined() && result.is_same(tensor);
                           });
    if (!is_result) placeholder->keep(allocate(placeholder->storage().nbytes()));
  });
}

// Uses the staging memory, or separate memory while another parameter of this operator uses it.
void Replay::provide_staged(Placeholder& placeholder, uint32_t param, std::vector<Placeholder*>& in_use) {
  if (placeholder.memory()) return in_use.push_back(&placeholder);
  for (Placeholder* other : std::vector<Placeholder*>(attached_))
    if (std::find(in_use.begin(), in_use.end(), other) == in_use.end()) store_and_detach(other);
  in_use.push_back(&placeholder);
  const std::size_t bytes = placeholder.storage().nbytes();
  float* memory = memory_.staging;
  if (!attached_.empty()) {
    extra_memory_.push_back(allocate(bytes));  // aligned as libtorch's, for the same bits
    memory = static_cast<float*>(extra_memory_.back().get());
    extra_bytes_ += static_cast<int64_t>(bytes);
    memory_.account(static_cast<int64_t>(bytes));
  }
  if (!stored_.count(param))
    clear_if_small(memory, bytes);
  else if (&placeholder != overwritten_)
    memory_.load(param, memory);
  placeholder.attach(memory);
  attached_.push_back(&placeholder);
}

void Replay::provide_parts(Placeholder& placeholder, Parts& parts) {
  parts.memory = allocate(placeholder.storage().nbytes());
  memory_.account(static_cast<int64_t>(placeholder.storage().nbytes()));
  placeholder.attach(parts.memory.get());
}

void Replay::execute(const RecordedOperator& recorded) {
  const c10::impl::ExcludeDispatchKeyGuard plain(c10::DispatchKey::DeferredInit);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Settings settings(recorded);
  Stack stack = recorded.arguments;
  if (recorded.random) random_.begin(*recorded.random, stack);
  try {
    recorded.op->callBoxed(stack);
  } catch (const c10::Error& error) {
    fail(recorded, error.what_without_backtrace());
  }
  if (!random_.end(recorded.random ? &*recorded.random : nullptr))
    fail(recorded,
         "it does not draw the random numbers that it drew in the constructor, or another thread drew from the "
         "same generator meanwhile (give threads, such as data loaders, generators of their own: "
         "at::make_generator<at::CPUGeneratorImpl>(seed))");
  std::size_t i = 0;
  for_each_tensor(stack, stack.size(), [&](const at::Tensor& computed, std::size_t) {
    if (i < recorded.results.size() && recorded.results[i].defined()) {
      if (computed.sizes() != recorded.results[i].sizes())
        fail(recorded, "the shape of its result depends on values, which the constructor does not have");
      take_result(recorded.results[i], computed);
    }
    ++i;
  });
}

// Gives the result the memory of the computed tensor if nothing else uses that memory, or a copy.
void Replay::take_result(const at::Tensor& result, const at::Tensor& computed) {
  if (Placeholder* placeholder = placeholder_of(result); placeholder && !placeholder->memory()) {
    const c10::Storage& storage = computed.storage();
    const std::size_t bytes = placeholder->storage().nbytes();
    if (computed.strides() == result.strides() && computed.storage_offset() == 0 && storage.nbytes() == bytes &&
        computed.scalar_type() == result.scalar_type() && storage.use_count() == 1 && storage.resizable())
      return placeholder->keep(storage.unsafeGetStorageImpl()->set_data_ptr(at::DataPtr(nullptr, at::kCPU)));
    placeholder->keep(allocate(bytes));
  }
  result.copy_(computed);
}

void Replay::store_and_detach(Placeholder* placeholder) {
  const uint32_t param = staged_.at(&placeholder->storage());
  memory_.store(param, static_cast<const float*>(placeholder->memory()));
  stored_.insert(param);
  placeholder->detach();
  attached_.erase(std::find(attached_.begin(), attached_.end(), placeholder));
  if (!attached_.empty() || extra_memory_.empty()) return;
  extra_memory_.clear();
  memory_.account(-std::exchange(extra_bytes_, 0));
}

void Replay::store_parts(Parts& parts) {
  detach_all();  // frees the staging memory
  for (const uint32_t param : parts.params) {
    const at::Tensor& tensor = registered_.parameters[param].second;
    const c10::impl::ExcludeDispatchKeyGuard plain(c10::DispatchKey::DeferredInit);
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    if (runs_operators_) at::from_blob(memory_.staging, tensor.sizes(), at::kFloat).copy_(tensor);
    memory_.store(param, memory_.staging);
  }
  parts.stored = true;
  Placeholder* placeholder = placeholder_of(registered_.parameters[parts.params.front()].second);
  placeholder->detach();
  parts.memory.clear();
  memory_.account(-static_cast<int64_t>(placeholder->storage().nbytes()));
}

void Replay::fail(const RecordedOperator& recorded, const std::string& reason) const {
  std::string what;
  recorded.for_each([&](const at::Tensor& tensor) {
    for (const auto& [name, parameter] : registered_.parameters)
      if (what.empty() && storage_impl(parameter) == storage_impl(tensor)) what = "parameter '" + name + "'";
    for (const auto& [name, buffer] : registered_.buffers)
      if (what.empty() && storage_impl(buffer) == storage_impl(tensor)) what = "buffer '" + name + "'";
  });
  if (what.empty()) what = "a tensor that the model's parameters are computed from";
  fail_user("zr::deferred: " + recorded.name() + " failed when the engine constructed " + what + ": " + reason +
            "; build the model without zr::deferred to see where the constructor calls it");
}

}  // namespace zr::host::model
