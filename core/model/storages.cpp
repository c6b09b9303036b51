#include "model/storages.hpp"

#include <ATen/MemoryOverlap.h>
#include <c10/core/Storage.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <set>
#include <tuple>

#include "base/error.hpp"
#include "model/placeholder.hpp"
#include "zr/mutex.hpp"

namespace zr::host::model {

namespace {
const c10::StorageImpl* storage_of(const torch::Tensor& tensor) { return tensor.storage().unsafeGetStorageImpl(); }

// First byte and end of the range that the tensor spans in its storage.
std::pair<int64_t, int64_t> extent(const torch::Tensor& tensor) {
  int64_t last = tensor.storage_offset();
  for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  const auto size = static_cast<int64_t>(tensor.element_size());
  return {tensor.storage_offset() * size, (last + 1) * size};
}

// Where the tensor's storage begins; 0 if it has no memory of its own.
int64_t address(const torch::Tensor& tensor) {
  c10::StorageImpl& storage = *tensor.storage().unsafeGetStorageImpl();
  if (Placeholder::find(storage)) return 0;
  return static_cast<int64_t>(reinterpret_cast<intptr_t>(storage._mutable_data_ptr_no_checks().get()));
}

// Calls fn with the first byte of each element.
template <class F>
void for_each_element(const torch::Tensor& tensor, F&& fn) {
  std::vector<int64_t> index(static_cast<std::size_t>(tensor.dim()), 0);
  const auto size = static_cast<int64_t>(tensor.element_size());
  int64_t at = tensor.storage_offset();
  for (int64_t remaining = tensor.numel(); remaining > 0; --remaining) {
    fn(at * size);
    for (int64_t d = tensor.dim(); d-- > 0;) {
      auto& i = index[static_cast<std::size_t>(d)];
      at += tensor.stride(d);
      if (++i < tensor.size(d)) break;
      at -= i * tensor.stride(d);
      i = 0;
    }
  }
}

// True if the tensor's elements fill its extent.
bool dense(const torch::Tensor& tensor) {
  const auto [begin, end] = extent(tensor);
  return end - begin == static_cast<int64_t>(tensor.nbytes());
}

void keep_memory(void*) {}

// The range of memory that a registered tensor spans.
struct Span {
  const void* memory;  // null: begin and end are addresses; else a storage without memory, and they are offsets
  int64_t begin, end;
  bool parameter;
  std::size_t order;
  const std::pair<std::string, torch::Tensor>* tensor;
};

// The spans of all tensors that have elements, by address; at one address, parameters first.
std::vector<Span> sorted_spans(const Storages::Tensors& parameters, const Storages::Tensors& buffers) {
  std::vector<Span> spans;
  std::set<const c10::TensorImpl*> seen;  // a buffer may have several names
  for (const auto* list : {&parameters, &buffers})
    for (const auto& item : *list) {
      const torch::Tensor& tensor = item.second;
      if (!tensor.has_storage() || tensor.numel() == 0 || !seen.insert(tensor.unsafeGetTensorImpl()).second) continue;
      const int64_t at = address(tensor);
      const auto [begin, end] = extent(tensor);
      spans.push_back(
          {at == 0 ? storage_of(tensor) : nullptr, at + begin, at + end, list == &parameters, spans.size(), &item});
    }
  std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) {
    return std::tuple(a.memory, a.begin, !a.parameter, a.order) < std::tuple(b.memory, b.begin, !b.parameter, b.order);
  });
  return spans;
}

// Fails for two tensors that share memory, at least one of them a parameter. Names them in their registered order, or
// the buffer before the parameter.
[[noreturn]] void fail_overlap(const Span& span, const Span& other) {
  if (span.parameter && other.parameter) {
    const auto& [first, second] =
        std::minmax(span, other, [](const Span& a, const Span& b) { return a.order < b.order; });
    fail_user("parameters '" + first.tensor->first + "' and '" + second.tensor->first +
              "' are two tensors on the same memory (set_data(), or views of one tensor); the engine moves each "
              "parameter, so they would no longer share memory; to tie weights, register one tensor under both "
              "names, otherwise register a clone()");
  }
  const Span &parameter = span.parameter ? span : other, &buffer = span.parameter ? other : span;
  fail_user("buffer '" + buffer.tensor->first + "' shares memory with parameter '" + parameter.tensor->first +
            "'; the engine moves the parameter, so the buffer would keep the old values; compute it in "
            "forward(), or register a clone()");
}

// Number of unregistered tensors on the storage, without `internal` ones, and except bases that only views in autograd
// refer to.
int64_t count_unregistered(const Storages::Tensors& registered, int64_t internal) {
  std::map<const c10::TensorImpl*, std::size_t> views;  // by base
  int64_t known = 0, held = 0;
  for (const auto& [name, tensor] : registered) {
    ++known;
    if (tensor.is_view()) ++views[tensor._base().unsafeGetTensorImpl()];
  }
  const c10::Storage& storage = registered.front().second.storage();
  for (const auto& [base, count] : views) {
    const bool is_registered = std::any_of(registered.begin(), registered.end(), [base = base](const auto& item) {
      return item.second.unsafeGetTensorImpl() == base;
    });
    if (is_registered) continue;
    for (const auto& [name, tensor] : registered)
      if (tensor.is_view() && tensor._base().unsafeGetTensorImpl() == base) {
        if (tensor._base().use_count() > count) ++held;
        break;
      }
    ++known;
  }
  return std::max<int64_t>(static_cast<int64_t>(storage.use_count()) - internal - known, 0) + held;
}
}  // namespace

bool overlap(const torch::Tensor& a, const torch::Tensor& b) {
  if (a.numel() == 0 || b.numel() == 0) return false;
  const bool same = storage_of(a) == storage_of(b);
  const int64_t at_a = same ? 0 : address(a), at_b = same ? 0 : address(b);
  if (!same && (at_a == 0 || at_b == 0)) return false;
  const auto [begin_a, end_a] = extent(a);
  const auto [begin_b, end_b] = extent(b);
  const int64_t begin = std::max(at_a + begin_a, at_b + begin_b), end = std::min(at_a + end_a, at_b + end_b);
  if (begin >= end) return false;
  if (dense(a) && dense(b)) return true;
  std::vector<bool> covered_by_a(static_cast<std::size_t>(end - begin));
  const auto for_each_byte = [&](const torch::Tensor& tensor, int64_t at, const auto& fn) {
    const auto size = static_cast<int64_t>(tensor.element_size());
    for_each_element(tensor, [&](int64_t offset) {
      const int64_t first = at + offset;
      for (int64_t byte = std::max(first, begin); byte < std::min(first + size, end); ++byte)
        fn(static_cast<std::size_t>(byte - begin));
    });
  };
  for_each_byte(a, at_a, [&](std::size_t byte) { covered_by_a[byte] = true; });
  bool shared = false;
  for_each_byte(b, at_b, [&](std::size_t byte) { shared |= covered_by_a[byte]; });
  return shared;
}

Storages::Storages(const Tensors& parameters, const Tensors& buffers, const Internal& internal) {
  for (const auto& [name, tensor] : parameters) {
    if (at::has_internal_overlap(tensor) == at::MemOverlap::Yes)
      fail_user("parameter '" + name +
                "' has several elements at one address (expand()); register its contiguous() copy, made under "
                "torch::NoGradGuard");
    users_[storage_of(tensor)].parameters.emplace_back(name, tensor);
  }
  std::set<const c10::TensorImpl*> seen;  // a buffer may have several names
  for (const auto& [name, tensor] : buffers)
    if (tensor.has_storage() && seen.insert(tensor.unsafeGetTensorImpl()).second)
      users_[storage_of(tensor)].buffers.emplace_back(name, tensor);
  check_overlaps(parameters, buffers);
  std::erase_if(users_,
                [](const auto& item) { return item.second.parameters.size() + item.second.buffers.size() < 2; });
  for (const auto& [storage, users] : users_) {
    check_unregistered(users, internal ? internal(storage) : 0);
    remaining_tensors_[storage] = users.parameters.size() + users.buffers.size();
  }
}

void Storages::check_overlaps(const Tensors& parameters, const Tensors& buffers) {
  const std::vector<Span> spans = sorted_spans(parameters, buffers);
  // Sorted by address: each tensor is compared only with those that begin before it ends.
  for (auto span = spans.begin(); span != spans.end(); ++span)
    for (auto next = span + 1; next != spans.end() && next->memory == span->memory && next->begin < span->end; ++next)
      if ((span->parameter || next->parameter) && overlap(span->tensor->second, next->tensor->second))
        fail_overlap(*span, *next);
}

void Storages::check_unregistered(const Users& users, int64_t internal) {
  if (users.parameters.empty() || users.buffers.empty()) return;
  Tensors tensors = users.parameters;
  tensors.insert(tensors.end(), users.buffers.begin(), users.buffers.end());
  if (const int64_t others = count_unregistered(tensors, internal); others > 0)
    fail_user("parameter '" + users.parameters.front().first + "' and buffer '" + users.buffers.front().first +
              "' are parts of one storage, which " + std::to_string(others) +
              (others == 1 ? " unregistered tensor also uses" : " unregistered tensors also use") +
              "; the engine moves the parameter, so these tensors would keep its old values; register a clone() "
              "of the parameter");
}

bool Storages::replaceable(const torch::Tensor& parameter, at::ScalarType type) const {
  return parameter.scalar_type() == type && parameter.numel() > 0 && parameter.is_contiguous() &&
         parameter.storage_offset() == 0 && parameter.nbytes() == parameter.storage().nbytes() &&
         !users_.count(storage_of(parameter)) && !Placeholder::find(*parameter.storage().unsafeGetStorageImpl());
}

void Storages::replace_data(const std::string& name, const torch::Tensor& parameter, const torch::Tensor& other) {
  replace_and_close("parameter '" + name + "'", parameter, other);
}

void Storages::replace_buffer_data(const std::string& name, const torch::Tensor& buffer, const torch::Tensor& other) {
  if (const auto users = users_.find(storage_of(buffer)); users != users_.end())
    for (const auto& [with, values] : users->second.buffers)
      if (!values.is_same(buffer) && overlap(buffer, values))
        fail_user("buffers '" + name + "' and '" + with +
                  "' share memory, and converting them to train.dtype, to a row-major layout or to job.device would "
                  "separate them; register one tensor under both names, or a clone()");
  replace_and_close("buffer '" + name + "'", buffer, other);
}

void Storages::replace_and_close(const std::string& what, const torch::Tensor& tensor, const torch::Tensor& other) {
  const c10::Storage before = tensor.storage();  // NOLINT: a copy, because set_data() replaces the tensor's storage
  c10::StorageImpl& storage = *before.unsafeGetStorageImpl();
  set_data(tensor, other);
  const auto remaining = remaining_tensors_.find(&storage);
  if (remaining != remaining_tensors_.end() && --remaining->second > 0) return;
  if (remaining != remaining_tensors_.end()) remaining_tensors_.erase(remaining);
  if (const auto users = users_.find(&storage); users != users_.end()) users_.erase(users);
  if (before.use_count() == 1 || Placeholder::find(storage)) return;
  storage.set_resizable(false);
  storage.set_data_ptr_noswap(at::DataPtr(nullptr, storage.device()));
  storage.release_data_and_set_meta_custom_data_ptr_error_msg_(
      "this tensor was created from " + what +
      " before the zr::Engine moved the data, so its values would be stale (a view, t() or detach() that a constructor "
      "or a class member keeps); create it in forward(), or after the engine is made");
}

// libtorch's own set_data() rejects devices that it does not name, although it does the same for them.
void Storages::set_data(const torch::Tensor& tensor, const torch::Tensor& other) {
  if (tensor.device() == other.device()) return tensor.set_data(other);
  auto* const meta = torch::autograd::impl::get_autograd_meta(tensor);
  if (meta) torch::autograd::impl::set_grad_accumulator(tensor, {});  // it has the device of the old data
  tensor.unsafeGetTensorImpl()->shallow_copy_from(other.getIntrusivePtr());
}

at::DataPtr Storages::engine_memory(void* memory, at::Device device) { return {memory, memory, &keep_memory, device}; }

namespace {
// Storages with a DeviceBinding.
struct DeviceStorages {
  Mutex mutex;
  std::set<const c10::StorageImpl*> storages ZR_GUARDED_BY(mutex);
  static DeviceStorages& get() {
    static auto* storages = new DeviceStorages;  // tensors may be freed after static destructors ran
    return *storages;
  }
};
}  // namespace

Storages::DeviceBinding::DeviceBinding(const c10::Storage& storage) : storage_(storage.unsafeGetStorageImpl()) {
  DeviceStorages& bound = DeviceStorages::get();
  const MutexLock lock(bound.mutex);
  bound.storages.insert(storage_);
}

Storages::DeviceBinding::~DeviceBinding() {
  DeviceStorages& bound = DeviceStorages::get();
  const MutexLock lock(bound.mutex);
  bound.storages.erase(storage_);
}

bool Storages::has_engine_memory(const at::TensorBase& tensor) {
  if (!tensor.has_storage()) return false;
  c10::StorageImpl* const storage = tensor.storage().unsafeGetStorageImpl();
  if (storage->_mutable_data_ptr_no_checks().get_deleter() == &keep_memory) return true;
  if (storage->device().is_cpu()) return false;
  DeviceStorages& bound = DeviceStorages::get();
  const MutexLock lock(bound.mutex);
  return bound.storages.count(storage) > 0;
}

}  // namespace zr::host::model
