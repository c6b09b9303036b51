#include "model/data_views.hpp"

#include <ATen/core/VariableHooksInterface.h>

#include <algorithm>
#include <unordered_map>
#include <utility>
#include <vector>

#include "model/storages.hpp"
#include "zr/mutex.hpp"

namespace zr::host::model {

struct DataViews::Counters {
  struct Counter {
    c10::VariableVersion version;
    uint32_t seen;
  };
  Mutex mutex;
  std::vector<Counter> versions ZR_GUARDED_BY(mutex);
  bool uncounted ZR_GUARDED_BY(mutex) = false;        // a tensor without a counter was made
  bool removed_changed ZR_GUARDED_BY(mutex) = false;  // a removed counter had changed
  std::size_t prune_at ZR_GUARDED_BY(mutex) = 64;     // number of counters at which prune() runs next

  // Removes the counters that no tensor uses any more.
  void prune() ZR_REQUIRES(mutex) {
    std::erase_if(versions, [this](const Counter& counter) ZR_REQUIRES(mutex) {
      if (!counter.version.unique()) return false;
      removed_changed |= counter.version.current_version() != counter.seen;
      return true;
    });
    prune_at = std::max<std::size_t>(64, 2 * versions.size());
  }

  // By storage. The next engine on a storage takes over the counters of the previous one (engine.refresh()).
  static Mutex map_mutex;
  static std::unordered_map<const c10::StorageImpl*, std::shared_ptr<Counters>>& map() ZR_REQUIRES(map_mutex) {
    static auto* by_storage = new std::unordered_map<const c10::StorageImpl*, std::shared_ptr<Counters>>;
    return *by_storage;  // never destroyed: engines may be destroyed after statics
  }
  static std::shared_ptr<Counters> of(const c10::StorageImpl* storage) {
    const MutexLock lock(map_mutex);
    const auto found = map().find(storage);
    return found == map().end() ? nullptr : found->second;
  }
};
Mutex DataViews::Counters::map_mutex;

namespace {
// Forwards to libtorch's own hooks, and calls `made` when data() makes a tensor.
class Hooks final : public at::impl::VariableHooksInterface {
 public:
  using Made = void (*)(const at::TensorBase& made);
  Hooks(VariableHooksInterface* original, Made made) : original_(*original), made_(made) {}

  at::TensorBase variable_data(const at::TensorBase& self) const override {
    at::TensorBase made = original_.variable_data(self);
    made_(made);
    return made;
  }
  at::TensorBase data(const at::TensorBase& self) const override { return variable_data(self); }

  at::TensorBase tensor_data(const at::TensorBase& self) const override { return original_.tensor_data(self); }
  const std::shared_ptr<torch::autograd::Node>& grad_fn(const at::TensorBase& self) const override {
    return original_.grad_fn(self);
  }
  unsigned _register_hook(const at::TensorBase& self,
                          std::function<at::TensorBase(const at::TensorBase&)> hook) const override {
    return original_._register_hook(self, std::move(hook));
  }
  void remove_hook(const at::TensorBase& self, unsigned at) const override { original_.remove_hook(self, at); }
  bool is_view(const at::TensorBase& self) const override { return original_.is_view(self); }
  const at::TensorBase& base(const at::TensorBase& self) const override { return original_.base(self); }
  const std::string& name(const at::TensorBase& self) const override { return original_.name(self); }
  bool is_leaf(const at::TensorBase& self) const override { return original_.is_leaf(self); }
  int64_t output_nr(const at::TensorBase& self) const override { return original_.output_nr(self); }
  void set_data(const at::TensorBase& self, const at::TensorBase& other) const override {
    original_.set_data(self, other);
  }
  int64_t _version(const at::TensorBase& self) const override { return original_._version(self); }
  void retain_grad(const at::TensorBase& self) const override { original_.retain_grad(self); }
  bool retains_grad(const at::TensorBase& self) const override { return original_.retains_grad(self); }
  void _backward(const at::Tensor& self, at::TensorList inputs, const std::optional<at::Tensor>& gradient,
                 std::optional<bool> keep_graph, bool create_graph) const override {
    original_._backward(self, inputs, gradient, keep_graph, create_graph);
  }
  void requires_grad_(const at::TensorBase& self, bool requires_grad) const override {
    original_.requires_grad_(self, requires_grad);
  }
  void basic_autograd_not_implemented_fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                                               torch::jit::Stack* stack) const override {
    original_.basic_autograd_not_implemented_fallback(op, keys, stack);
  }
  std::optional<c10::ScalarType> grad_dtype(const at::TensorBase& self) const override {
    return original_.grad_dtype(self);
  }
  void set_grad_dtype(const at::TensorBase& self, const std::optional<c10::ScalarType>& type) const override {
    original_.set_grad_dtype(self, type);
  }

 private:
  const VariableHooksInterface& original_;
  const Made made_;
};

// Installed until the process ends, because libtorch keeps the address.
void install(Hooks::Made made) {
  static const bool once =
      (at::impl::SetVariableHooks(new Hooks(at::impl::GetVariableHooks(), made)), true);  // NOLINT: never freed
  (void)once;
}
}  // namespace

DataViews::DataViews(const c10::Storage& storage) : storage_(storage.unsafeGetStorageImpl()) {
  install([](const at::TensorBase& made) {
    if (!made.defined() || !Storages::has_engine_memory(made)) return;
    const std::shared_ptr<Counters> counters = Counters::of(made.storage().unsafeGetStorageImpl());
    if (!counters) return;
    const c10::VariableVersion& version = made.unsafeGetTensorImpl()->version_counter();
    const MutexLock lock(counters->mutex);
    if (!version.enabled()) {
      counters->uncounted = true;
      return;
    }
    if (counters->versions.size() >= counters->prune_at) counters->prune();
    counters->versions.push_back({version, version.current_version()});
  });
  const MutexLock lock(Counters::map_mutex);
  std::shared_ptr<Counters>& counters = Counters::map()[storage_];
  if (!counters) counters = std::make_shared<Counters>();
  counters_ = counters;
}

DataViews::~DataViews() {
  const MutexLock lock(Counters::map_mutex);
  const MutexLock counters_lock(counters_->mutex);
  counters_->prune();
  if (counters_->versions.empty() && !counters_->uncounted && !counters_->removed_changed)
    Counters::map().erase(storage_);
}

bool DataViews::written() {
  const MutexLock lock(counters_->mutex);
  bool any = counters_->uncounted || std::exchange(counters_->removed_changed, false);
  for (auto& counter : counters_->versions) {
    const uint32_t version = counter.version.current_version();
    any |= version != counter.seen;
    counter.seen = version;
  }
  counters_->prune();
  return any;
}

}  // namespace zr::host::model
