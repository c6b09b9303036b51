#include "model/kept_tensors.hpp"

#include <algorithm>
#include <array>
#include <map>

#include "model/intercept.hpp"
#include "model/placeholder.hpp"
#include "model/process_setup.hpp"
#include "model/torch_dtype.hpp"
#include "zr/mutex.hpp"

namespace zr::host::model {

namespace {
struct Kept {
  std::string name, type, dtype;  // dtype: of the weights
  bool is_parameter;
};
struct Registry {
  Mutex mutex;
  std::map<const c10::StorageImpl*, Kept> by_storage ZR_GUARDED_BY(mutex);
  static Registry& get() {
    static auto* registry = new Registry;  // engines may outlive statics
    return *registry;
  }
};

// "buffers 'a' (fp32), 'b' (fp32)"
std::string list_of(const std::vector<Kept>& kept, const char* kind) {
  constexpr std::size_t kMaxNames = 3;
  std::string names = std::string(kind) + (kept.size() > 1 ? "s " : " ");
  for (std::size_t i = 0; i < kept.size() && i < kMaxNames; ++i)
    names += (i ? ", '" : "'") + kept[i].name + "' (" + kept[i].type + ")";
  if (kept.size() > kMaxNames) names += " and " + std::to_string(kept.size() - kMaxNames) + " more";
  return names;
}

// As the elements of a TOML array.
std::string quoted_names(const std::vector<Kept>& kept) {
  std::string names;
  for (const Kept& one : kept) names += (names.empty() ? "\"" : ", \"") + one.name + "\"";
  return names;
}

std::string text_of(const std::vector<Kept>& kept) {
  std::vector<Kept> buffers, parameters;
  for (const Kept& one : kept) (one.is_parameter ? parameters : buffers).push_back(one);
  std::string text;
  if (!buffers.empty()) {
    const bool one = buffers.size() == 1;
    const std::string them = one ? "it" : "them";
    text = list_of(buffers, "buffer") + (one ? " keeps its" : " keep their") + " type with train.dtype = \"" +
           buffers[0].dtype + "\"; cast " + them + " where forward() uses " + them + ", or round " + them +
           " with train.cast_buffers = [" + quoted_names(buffers) + "]";
  }
  if (!parameters.empty())
    text += (text.empty() ? "" : "; ") + list_of(parameters, "parameter") + (parameters.size() == 1 ? " is" : " are") +
            " kept in fp32 by train.keep_fp32; list all parameters of the operator there, and cast its input to fp32 "
            "in forward(), or remove " +
            (parameters.size() == 1 ? "it" : "them") + " from train.keep_fp32";
  return text;
}
}  // namespace

void KeptTensors::add(const std::string& name, const at::Tensor& tensor, const std::string& dtype, bool is_parameter) {
  ProcessSetup::intercept_placeholders();
  if (!Placeholder::is_marked(tensor)) {
    Placeholder::mark(tensor, true);
    marked_.push_back(tensor);
  }
  const c10::StorageImpl* const storage = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  storages_.push_back(storage);
  ++storages_added;
  Registry& registry = Registry::get();
  const MutexLock lock(registry.mutex);
  registry.by_storage.insert_or_assign(storage, Kept{name, type_name(tensor.scalar_type()), dtype, is_parameter});
}

void KeptTensors::clear() {
  Registry& registry = Registry::get();
  for (const c10::StorageImpl* storage : storages_) {
    const MutexLock lock(registry.mutex);
    registry.by_storage.erase(storage);
  }
  for (const at::Tensor& tensor : marked_) Placeholder::mark(tensor, false);
  marked_.clear();
  storages_added -= static_cast<int>(storages_.size());
  storages_.clear();
}

KeptTensors::Storages KeptTensors::used(const c10::OperatorHandle& op, const std::vector<c10::IValue>& stack) {
  Storages storages;
  for (std::size_t i = stack.size() - op.schema().arguments().size(); i < stack.size(); ++i)
    for_each_tensor(stack[i], [&](const at::Tensor& tensor) {
      if (Placeholder::is_marked(tensor) && tensor.has_storage())
        storages.push_back(tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
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
