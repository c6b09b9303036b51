#include "model/data_views.hpp"

#include <ATen/core/VariableHooksInterface.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "model/storages.hpp"

namespace zr::host::model {

struct DataViews::Counters {
  struct Counter {
    c10::VariableVersion version;
    uint32_t seen;
  };
  std::mutex mutex;
  std::vector<Counter> all;
  bool uncounted = false;  // a tensor without a counter was made
  bool moved = false;      // a removed counter had changed
  std::size_t most = 64;   // counters before the next prune()

  // Removes the counters that no tensor uses any more.
  void prune() {
    std::erase_if(all, [this](const Counter& counter) {
      if (!counter.version.unique()) return false;
      moved |= counter.version.current_version() != counter.seen;
      return true;
    });
    most = std::max<std::size_t>(64, 2 * all.size());
  }

  // By storage. The next engine on a storage takes over the counters of the previous one (engine.refresh()).
  static std::mutex map_mutex;
  static std::unordered_map<const c10::StorageImpl*, std::shared_ptr<Counters>>& map() {
    static std::unordered_map<const c10::StorageImpl*, std::shared_ptr<Counters>> all;
    return all;
  }
  static std::shared_ptr<Counters> of(const c10::StorageImpl* storage) {
    const std::lock_guard lock(map_mutex);
    const auto found = map().find(storage);
    return found == map().end() ? nullptr : found->second;
  }
};
std::mutex DataViews::Counters::map_mutex;

namespace {
// Forwards to libtorch's own hooks, and calls `made` when data() makes a tensor.
class Hooks final : public at::impl::VariableHooksInterface {
 public:
  using Made = void (*)(const at::TensorBase& made);
  Hooks(VariableHooksInterface* own, Made made) : own_(*own), made_(made) {}

  at::TensorBase variable_data(const at::TensorBase& self) const override {
    at::TensorBase made = own_.variable_data(self);
    made_(made);
    return made;
  }
  at::TensorBase data(const at::TensorBase& self) const override { return variable_data(self); }

  at::TensorBase tensor_data(const at::TensorBase& self) const override { return own_.tensor_data(self); }
  const std::shared_ptr<torch::autograd::Node>& grad_fn(const at::TensorBase& self) const override {
    return own_.grad_fn(self);
  }
  unsigned _register_hook(const at::TensorBase& self,
                          std::function<at::TensorBase(const at::TensorBase&)> hook) const override {
    return own_._register_hook(self, std::move(hook));
  }
  void remove_hook(const at::TensorBase& self, unsigned at) const override { own_.remove_hook(self, at); }
  bool is_view(const at::TensorBase& self) const override { return own_.is_view(self); }
  const at::TensorBase& base(const at::TensorBase& self) const override { return own_.base(self); }
  const std::string& name(const at::TensorBase& self) const override { return own_.name(self); }
  bool is_leaf(const at::TensorBase& self) const override { return own_.is_leaf(self); }
  int64_t output_nr(const at::TensorBase& self) const override { return own_.output_nr(self); }
  void set_data(const at::TensorBase& self, const at::TensorBase& other) const override { own_.set_data(self, other); }
  int64_t _version(const at::TensorBase& self) const override { return own_._version(self); }
  void retain_grad(const at::TensorBase& self) const override { own_.retain_grad(self); }
  bool retains_grad(const at::TensorBase& self) const override { return own_.retains_grad(self); }
  void _backward(const at::Tensor& self, at::TensorList inputs, const std::optional<at::Tensor>& gradient,
                 std::optional<bool> keep_graph, bool create_graph) const override {
    own_._backward(self, inputs, gradient, keep_graph, create_graph);
  }
  void requires_grad_(const at::TensorBase& self, bool requires_grad) const override {
    own_.requires_grad_(self, requires_grad);
  }
  void basic_autograd_not_implemented_fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                                               torch::jit::Stack* stack) const override {
    own_.basic_autograd_not_implemented_fallback(op, keys, stack);
  }
  std::optional<c10::ScalarType> grad_dtype(const at::TensorBase& self) const override { return own_.grad_dtype(self); }
  void set_grad_dtype(const at::TensorBase& self, const std::optional<c10::ScalarType>& type) const override {
    own_.set_grad_dtype(self, type);
  }

 private:
  const VariableHooksInterface& own_;
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
    const std::lock_guard lock(counters->mutex);
    if (!version.enabled()) {
      counters->uncounted = true;
      return;
    }
    if (counters->all.size() >= counters->most) counters->prune();
    counters->all.push_back({version, version.current_version()});
  });
  const std::lock_guard lock(Counters::map_mutex);
  std::shared_ptr<Counters>& counters = Counters::map()[storage_];
  if (!counters) counters = std::make_shared<Counters>();
  counters_ = counters;
}

DataViews::~DataViews() {
  const std::lock_guard lock(Counters::map_mutex);
  const std::lock_guard counters(counters_->mutex);
  counters_->prune();
  if (counters_->all.empty() && !counters_->uncounted && !counters_->moved) Counters::map().erase(storage_);
}

bool DataViews::written() {
  const std::lock_guard lock(counters_->mutex);
  bool any = counters_->uncounted || std::exchange(counters_->moved, false);
  for (auto& counter : counters_->all) {
    const uint32_t now = counter.version.current_version();
    any |= now != counter.seen;
    counter.seen = now;
  }
  counters_->prune();
  return any;
}

}  // namespace zr::host::model
