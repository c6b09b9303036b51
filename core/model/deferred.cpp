#include "model/deferred.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "zr/mutex.hpp"

namespace zr::host::model {

namespace {
// Owns the constructions whose model has no engine yet.
struct PendingConstructions {
  Mutex mutex;
  std::vector<std::shared_ptr<Construction>> constructions ZR_GUARDED_BY(mutex);
  static PendingConstructions& get() {
    static auto* pending = new PendingConstructions;  // tensors may outlive statics
    return *pending;
  }
};
}  // namespace

Construction::RecordingScope::RecordingScope(Purpose purpose) {
  const auto* outer = dynamic_cast<const RecordingScope*>(this->outer());
  outermost_ = !outer;
  construction_ = outer ? outer->construction_ : std::make_shared<Construction>(purpose);
  if (outer) return;
  pending();
  PendingConstructions& all = PendingConstructions::get();
  const MutexLock lock(all.mutex);
  all.constructions.push_back(construction_);
}

Construction::RecordingScope::~RecordingScope() {
  if (outermost_) construction_->finish_recording();
  construction_.reset();
  if (outermost_) pending();
}

// The thread that records: `recording_` is read under the lock.
void Construction::finish_recording() {
  written_late_ |= !pointers_.finish([this](c10::StorageImpl& storage, std::shared_ptr<const std::string> bytes) {
    record_bytes(storage, std::move(bytes));
  });
  const MutexLock lock(PendingConstructions::get().mutex);
  recording_ = false;
}

std::size_t Construction::pending() {
  std::vector<std::shared_ptr<Construction>> abandoned;  // freed without the lock
  PendingConstructions& all = PendingConstructions::get();
  const MutexLock lock(all.mutex);
  std::erase_if(all.constructions, [&](const auto& construction) {
    if (construction->recording_ || !construction->is_abandoned()) return false;
    abandoned.push_back(construction);
    return true;
  });
  return all.constructions.size();
}

// True if only the record itself uses its tensors: the model was destroyed, or its constructor threw.
bool Construction::is_abandoned() const {
  std::unordered_map<const c10::StorageImpl*, std::size_t> own;
  for (const RecordedOperator& recorded : operators_)
    recorded.for_each([&](const at::Tensor& tensor) { ++own[storage_impl(tensor)]; });
  return std::all_of(storages_.begin(), storages_.end(),
                     [&](const auto& storage) { return storage.use_count() == own[storage._unsafe_get_target()]; });
}

Construction::~Construction() {
  operators_.clear();
  for (const auto& weak : storages_)
    if (const auto storage = weak.lock())
      if (Placeholder* placeholder = Placeholder::find(*storage); placeholder && placeholder->provider() == this)
        placeholder->orphan(placeholder->reason());
}

std::shared_ptr<Construction> Construction::of(const at::Tensor& tensor) {
  const Placeholder* placeholder = placeholder_of(tensor);
  auto* construction = placeholder ? dynamic_cast<Construction*>(placeholder->provider()) : nullptr;
  return construction ? construction->weak_from_this().lock() : nullptr;
}

std::string Construction::remedy() const {
  return "set checkpoint.init to a .safetensors file or a checkpoint, or call engine.load(), or torch::load() within a "
         "zr::gather(model->parameters()) scope once the engine is made";
}

void Construction::enter(const ParamUse* param_uses, std::size_t) { fail_user(param_uses->placeholder->reason()); }

int64_t Construction::references(const c10::StorageImpl* storage) const {
  int64_t count = 0;
  for (const RecordedOperator& recorded : operators_)
    recorded.for_each([&](const at::Tensor& tensor) { count += storage_impl(tensor) == storage; });
  return count;
}

void Construction::replay(const Replay::Registered& registered, const Model::ConstructMemory& memory,
                          bool runs_operators) {
  {
    PendingConstructions& all = PendingConstructions::get();
    const MutexLock lock(all.mutex);
    std::erase_if(all.constructions, [this](const auto& construction) { return construction.get() == this; });
  }
  if (written_late_)
    fail_user(
        "zr::deferred: a tensor of the constructor was written through a pointer (data_ptr(), accessor()) after an "
        "operator had used it, or read through one after an operator had changed it, which the deferred model cannot "
        "repeat; use the pointer before that operator, use operators such as fill_(), copy_() and select() instead, or "
        "build the model without zr::deferred");
  Replay replay(registered, memory, runs_operators);
  replay.prepare(operators_);
  for (std::size_t i = 0; i < operators_.size(); ++i) {
    replay.run(operators_[i], i);
    operators_[i] = {};  // frees temporaries as soon as possible
  }
  replay.finish();
  std::unordered_set<const c10::StorageImpl*> registered_buffers;
  for (const auto& [name, buffer] : registered.buffers) registered_buffers.insert(storage_impl(buffer));
  for (const auto& weak : storages_) {
    const auto storage = weak.lock();
    if (!storage || replay.stores(storage.get())) continue;
    replay.complete(*storage);
    if (!registered_buffers.count(storage.get()) && storage->nbytes() > 0)
      memory.broadcast(storage->_mutable_data_ptr_no_checks().get(), static_cast<int64_t>(storage->nbytes()));
  }
}

}  // namespace zr::host::model
