#include "model/data_views.hpp"

#include <algorithm>
#include <unordered_map>
#include <utility>
#include <vector>

#include "model/process_setup.hpp"
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

DataViews::DataViews(const c10::Storage& storage) : storage_(storage.unsafeGetStorageImpl()) {
  ProcessSetup::watch_tensor_data([](const at::TensorBase& made) {
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
