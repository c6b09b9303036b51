#include "model/saved_tensor_offload.hpp"

#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <unordered_map>

#include "base/error.hpp"
#include "model/allocator.hpp"
#include "model/device_copies.hpp"
#include "model/tensor_version.hpp"
#include "zr/mutex.hpp"

namespace zr::host::model {

namespace {
using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

constexpr std::size_t kPrefetched = 32;      // records that are prefetched
constexpr std::size_t kRecent = 4;           // restored storages that are kept for other users
constexpr std::size_t kMaxPersistent = 256;  // entries of `persistent_storages` before freed storages are removed

// A storage without memory, for tensors that only hold sizes and strides.
c10::Storage empty_storage(at::Device device) {
  return {c10::Storage::use_byte_size_t(), 0, at::DataPtr(nullptr, device)};
}

at::Tensor with_storage(const at::Tensor& tensor, const c10::Storage& storage) {
  auto impl = tensor.unsafeGetTensorImpl()->shallow_copy_and_detach(c10::VariableVersion(0), true);
  impl->set_storage_keep_dtype(storage);
  return at::Tensor(std::move(impl));
}

bool alive(const WeakStorage& storage) { return storage.use_count() > 0; }
}  // namespace

// While the mutex is locked, no tensor with a graph may be freed: the hooks of that graph would lock it again.
struct SavedTensorOffload::Shared {
  Mutex mutex;
  Model::OffloadCallbacks callbacks ZR_GUARDED_BY(mutex);  // empty after the engine is destroyed
  std::set<const c10::StorageImpl*> buffers ZR_GUARDED_BY(mutex);
  std::unordered_map<const c10::StorageImpl*, std::weak_ptr<Record>> newest ZR_GUARDED_BY(mutex);  // by storage
  std::unordered_map<const c10::StorageImpl*, WeakStorage> persistent_storages
      ZR_GUARDED_BY(mutex);                                // storages that outlived their records
  std::map<uint64_t, Record*> saved ZR_GUARDED_BY(mutex);  // by time of saving, until dropped
  uint64_t saved_count ZR_GUARDED_BY(mutex) = 0;           // number of saved tensors
  std::deque<Record*> recent ZR_GUARDED_BY(mutex);

  bool stays_on_device(const torch::Tensor& tensor) const ZR_REQUIRES(mutex);
  std::shared_ptr<Record> record_of(const torch::Tensor& tensor, const std::shared_ptr<Shared>& self)
      ZR_REQUIRES(mutex);
  c10::Storage storage_of(Record& record, bool has_other_users) ZR_REQUIRES(mutex);
  void prefetch_before(uint64_t time) ZR_REQUIRES(mutex);
  uint64_t put(const c10::Storage& storage) ZR_REQUIRES(mutex);
  void get(uint64_t record, const c10::Storage& storage) ZR_REQUIRES(mutex);
};

namespace {
at::Tensor staging(const c10::Storage& storage) {
  return at::empty({static_cast<int64_t>(storage.nbytes())}, at::TensorOptions().dtype(at::kByte).pinned_memory(true));
}
}  // namespace

// Records contain host memory.
uint64_t SavedTensorOffload::Shared::put(const c10::Storage& storage) {
  const auto bytes = static_cast<int64_t>(storage.nbytes());
  if (storage.device().is_cpu()) return callbacks.put(storage.data(), bytes);
  const at::Tensor on_host = staging(storage);
  download(storage, on_host.mutable_data_ptr(), bytes);
  return callbacks.put(on_host.data_ptr(), bytes);
}

void SavedTensorOffload::Shared::get(uint64_t record, const c10::Storage& storage) {
  if (storage.device().is_cpu()) return callbacks.get(record, storage.mutable_data());
  const at::Tensor on_host = staging(storage);
  callbacks.get(record, on_host.mutable_data_ptr());
  upload(on_host.data_ptr(), storage, static_cast<int64_t>(storage.nbytes()));
}

// The bytes of one storage at one time. Its last owner drops it with the mutex locked.
struct SavedTensorOffload::Record {
  Record(uint64_t sequence, const c10::Storage& storage, TensorVersion version_at_save)
      : number(sequence),
        bytes(static_cast<int64_t>(storage.nbytes())),
        device(storage.device()),
        original(storage.getWeakStorageImpl()),
        data(storage.data()),
        version(std::move(version_at_save)) {}
  const uint64_t number;
  const int64_t bytes;
  const at::Device device;
  const WeakStorage original;  // also prevents that another storage gets its address
  const void* const data;
  const TensorVersion version;  // tensors on one storage may have different counters (Tensor::data)
  std::optional<WeakStorage> restored;
  std::optional<c10::Stream> restored_on;  // the stream of the device that copies to it
  std::optional<c10::Event> is_restored;
  c10::Storage held;  // the restored storage, while it is in `recent`

  bool is_as_saved(const c10::StorageImpl& storage) const {
    return storage.data() == data && static_cast<int64_t>(storage.nbytes()) == bytes && version.is_current();
  }
  /// The current stream of this thread has begun to copy to the storage.
  void set_restored(const c10::Storage& storage) {
    restored.emplace(storage.getWeakStorageImpl());
    if (device.is_cpu()) return;
    restored_on = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
    is_restored.emplace(device.type());
    is_restored->record(*restored_on);
  }
  /// Operators of backward run on the streams of those of forward: the current one waits for the copy, and the memory
  /// is not used again before it has read it. The program has ordered streams for the original storage itself.
  void order_stream(const c10::Storage& storage) {
    if (!restored_on || restored->_unsafe_get_target() != storage.unsafeGetStorageImpl()) return;
    const c10::impl::VirtualGuardImpl guard(device.type());
    const c10::Stream stream = guard.getStream(device);
    if (stream == *restored_on) return;
    is_restored->block(stream);
    guard.recordDataPtrOnStream(storage.data_ptr(), stream);
  }
  /// The restored or the original storage if it is in memory; otherwise empty.
  c10::Storage present() const {
    if (restored)
      if (auto storage = restored->lock()) return storage;
    if (auto storage = original.lock())
      if (is_as_saved(*storage)) return storage;
    return {};
  }
};

bool SavedTensorOffload::Shared::stays_on_device(const torch::Tensor& tensor) const {
  if (!callbacks.put || is_free_to_save(tensor) || !tensor.has_storage()) return true;
  if (FillingOperators::running()) return true;  // the values to store are not there yet
  const c10::Storage& storage = tensor.storage();
  if (static_cast<int64_t>(storage.nbytes()) < std::max<int64_t>(callbacks.min_bytes, 1)) return true;
  // Memory that libtorch did not allocate.
  if (tensor.device().is_cpu() ? !TorchMemory::counts(storage.data_ptr()) : !storage.resizable()) return true;
  if (buffers.count(storage.unsafeGetStorageImpl())) return true;
  const auto persistent = persistent_storages.find(storage.unsafeGetStorageImpl());
  return persistent != persistent_storages.end() && alive(persistent->second);
}

std::shared_ptr<SavedTensorOffload::Record> SavedTensorOffload::Shared::record_of(const torch::Tensor& tensor,
                                                                                  const std::shared_ptr<Shared>& self) {
  const c10::Storage& storage = tensor.storage();
  const c10::StorageImpl* impl = storage.unsafeGetStorageImpl();
  const TensorVersion version(tensor);
  if (const auto at = newest.find(impl); at != newest.end())
    if (auto record = at->second.lock();
        record && record->version.counter() == version.counter() && record->is_as_saved(*impl))
      return record;
  const uint64_t number = put(storage);
  std::shared_ptr<Record> record(
      new Record(number, storage, version), [self](Record* dropped) ZR_REQUIRES(self->mutex) {
        // The last hooks that own the record have locked the mutex.
        const c10::StorageImpl* original = dropped->original._unsafe_get_target();
        if (const auto at = self->newest.find(original); at != self->newest.end() && at->second.expired())
          self->newest.erase(at);
        std::erase(self->recent, dropped);
        if (alive(dropped->original)) {
          if (self->persistent_storages.size() >= kMaxPersistent)
            std::erase_if(self->persistent_storages, [](const auto& item) { return !alive(item.second); });
          self->persistent_storages.insert_or_assign(original, dropped->original);
        }
        if (self->callbacks.drop) self->callbacks.drop(dropped->number);
        delete dropped;
      });
  newest[impl] = record;
  return record;
}

c10::Storage SavedTensorOffload::Shared::storage_of(Record& record, bool has_other_users) {
  if (c10::Storage present = record.present()) {
    record.order_stream(present);
    return present;
  }
  const c10::DeviceGuard guard(record.device);
  c10::Storage storage(c10::Storage::use_byte_size_t(), static_cast<std::size_t>(record.bytes),
                       c10::GetAllocator(record.device.type())->allocate(static_cast<std::size_t>(record.bytes)),
                       c10::GetAllocator(record.device.type()), true);
  get(record.number, storage);
  record.set_restored(storage);
  if (has_other_users) {
    record.held = storage;
    recent.push_back(&record);
    if (recent.size() > kRecent) {
      recent.front()->held = {};
      recent.pop_front();
    }
  }
  return storage;
}

// Prefetches records. Backward needs them in the reverse order of saving.
void SavedTensorOffload::Shared::prefetch_before(uint64_t time) {
  std::vector<uint64_t> records;
  std::size_t examined = 0;
  for (auto at = saved.lower_bound(time);
       at != saved.begin() && records.size() < kPrefetched && examined < 4 * kPrefetched;) {
    --at;
    ++examined;
    const Record& record = *at->second;
    if (!record.present() && std::find(records.begin(), records.end(), record.number) == records.end())
      records.push_back(record.number);
  }
  if (!records.empty()) callbacks.prefetch(records);
}

// The hooks of one tensor that one operator saves.
class SavedTensorOffload::Hooks final : public SavedHooks {
 public:
  explicit Hooks(std::shared_ptr<Shared> shared) : shared_(std::move(shared)) {}
  ~Hooks() override {
    if (!record_) return;
    const MutexLock lock(shared_->mutex);
    shared_->saved.erase(time_);
    record_.reset();
  }

  void call_pack_hook(const torch::Tensor& tensor) override {
    if (!tensor.defined()) return;
    const MutexLock lock(shared_->mutex);
    version_ = TensorVersion(tensor);
    if (shared_->stays_on_device(tensor)) {
      // Not the tensor itself: an output that its own operator saves would never be freed.
      tensor_ = is_free_to_save(tensor) ? tensor : tensor.detach();
      return;
    }
    record_ = shared_->record_of(tensor, shared_);
    tensor_ = with_storage(tensor, empty_storage(tensor.device()));
    time_ = ++shared_->saved_count;
    shared_->saved[time_] = record_.get();
  }

  torch::Tensor call_unpack_hook() override {
    if (!tensor_.defined()) return {};
    version_.check_saved();
    if (!record_) return tensor_;
    const MutexLock lock(shared_->mutex);
    if (!shared_->callbacks.get)
      fail_user(
          "backward needs activations that an engine offloaded (offload.activations), and that engine was released or "
          "destroyed; call backward before that");
    const c10::Storage storage = shared_->storage_of(*record_, record_.use_count() > 1);
    shared_->prefetch_before(time_);
    return with_storage(tensor_, storage);
  }

 private:
  const std::shared_ptr<Shared> shared_;
  torch::Tensor tensor_;  // with a record, only its sizes and strides
  std::shared_ptr<Record> record_;
  TensorVersion version_;
  uint64_t time_ = 0;
};

SavedTensorOffload::SavedTensorOffload(Model::OffloadCallbacks callbacks, const Buffers& buffers)
    : shared_(std::make_shared<Shared>()),
      scope_([shared = shared_] { return std::make_unique<Hooks>(shared); }, true) {
  const MutexLock lock(shared_->mutex);
  shared_->callbacks = std::move(callbacks);
  for (const auto& [name, buffer] : buffers)
    if (buffer.has_storage()) shared_->buffers.insert(buffer.storage().unsafeGetStorageImpl());
}

SavedTensorOffload::~SavedTensorOffload() {
  const MutexLock lock(shared_->mutex);
  shared_->callbacks = {};
}

}  // namespace zr::host::model
