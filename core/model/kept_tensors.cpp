#include "model/kept_tensors.hpp"

#include <algorithm>
#include <array>
#include <map>

#include "model/intercept.hpp"
#include "model/placeholder.hpp"
#include "model/torch_dtype.hpp"
#include "zr/mutex.hpp"

namespace zr::host::model {

namespace {
struct Kept {
  std::string name, type, dtype;  // dtype: of the weights
};
struct Registry {
  Mutex mutex;
  std::map<const c10::StorageImpl*, Kept> by_storage ZR_GUARDED_BY(mutex);
  static Registry& get() {
    static auto* registry = new Registry;  // engines may outlive statics
    return *registry;
  }
};

std::string text_of(const std::vector<Kept>& kept) {
  constexpr std::size_t kMaxNames = 3;
  if (kept.empty()) return "";
  std::string names;
  for (std::size_t i = 0; i < kept.size() && i < kMaxNames; ++i)
    names += (i ? ", '" : "'") + kept[i].name + "' (" + kept[i].type + ")";
  if (kept.size() > kMaxNames) names += " and " + std::to_string(kept.size() - kMaxNames) + " more";
  const bool one = kept.size() == 1;
  return (one ? "buffer " : "buffers ") + names + (one ? " keeps its" : " keep their") + " type with train.dtype = \"" +
         kept[0].dtype + "\"; cast " + (one ? "it" : "them") + " where forward() uses " + (one ? "it" : "them") +
         ", or round " + (one ? "it" : "them") + " with train.cast_buffers = [\"" + kept[0].name + "\"]";
}
}  // namespace

void KeptTensors::add(const std::string& name, const at::Tensor& buffer, const std::string& dtype) {
  intercept();
  Placeholder::mark(buffer, true);
  tensors_.push_back(buffer);
  ++count_;
  Registry& registry = Registry::get();
  const MutexLock lock(registry.mutex);
  registry.by_storage.insert_or_assign(buffer.storage().unsafeGetStorageImpl(),
                                       Kept{name, type_name(buffer.scalar_type()), dtype});
}

void KeptTensors::clear() {
  Registry& registry = Registry::get();
  for (const at::Tensor& tensor : tensors_) {
    Placeholder::mark(tensor, false);
    const MutexLock lock(registry.mutex);
    registry.by_storage.erase(tensor.storage().unsafeGetStorageImpl());
  }
  count_ -= static_cast<int>(tensors_.size());
  tensors_.clear();
}

KeptTensors::Storages KeptTensors::used(const c10::OperatorHandle& op, const std::vector<c10::IValue>& stack) {
  Storages storages;
  for (std::size_t i = stack.size() - op.schema().arguments().size(); i < stack.size(); ++i)
    for_each_tensor(stack[i], [&](const at::Tensor& tensor) {
      if (Placeholder::is_marked(tensor) && tensor.has_storage())
        storages.push_back(tensor.storage().unsafeGetStorageImpl());
    });
  return storages;
}

std::string KeptTensors::describe(const Storages& storages) {
  std::vector<Kept> kept;
  Registry& registry = Registry::get();
  const MutexLock lock(registry.mutex);
  for (const c10::StorageImpl* storage : storages)
    if (const auto found = registry.by_storage.find(storage); found != registry.by_storage.end())
      kept.push_back(found->second);
  return text_of(kept);
}

std::string KeptTensors::describe_all() {
  std::vector<Kept> kept;
  Registry& registry = Registry::get();
  const MutexLock lock(registry.mutex);
  for (const auto& [storage, one] : registry.by_storage) kept.push_back(one);
  std::ranges::sort(kept, {}, &Kept::name);
  return text_of(kept);
}

bool KeptTensors::is_type_error(const std::string& message) {
  constexpr std::array kWords{"same dtype", "scalar type", "should be the same", "Found dtype", "mixed dtype", "dtype"};
  return std::ranges::any_of(kWords, [&](const char* words) { return message.find(words) != message.npos; });
}

}  // namespace zr::host::model
