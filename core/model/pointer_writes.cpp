#include "model/pointer_writes.hpp"

#include <algorithm>
#include <cstring>

namespace zr::host::model {

namespace {
constexpr std::size_t kLargestTotal = 16 * PointerWrites::kLargest, kMostTensors = 1024;

bool all_zero(const char* data, std::size_t bytes) {
  return std::all_of(data, data + bytes, [](char byte) { return byte == 0; });
}
}  // namespace

// An outdated one may still be read by the program once more; what it has written since then is found by its use.
bool PointerWrites::Memory::stays_valid() const {
  if (outdated) return !data.used();
  return values ? std::memcmp(values->data(), data.get(), bytes) == 0 : all_zero(data.get(), bytes);
}

// Frees memory that is closed, the oldest first, until `bytes` more fit.
void PointerWrites::forget(std::size_t bytes) {
  for (auto at = memory_.begin();
       at != memory_.end() && (total_ + bytes > kLargestTotal || memory_.size() >= kMostTensors);) {
    const bool dropped = at->storage.use_count() == 0;
    if (at->open && !dropped) {
      ++at;
      continue;
    }
    valid_ &= at->outdated ? at->stays_valid() : dropped || at->stays_valid();
    total_ -= at->bytes;
    at = memory_.erase(at);
  }
}

void PointerWrites::open(Placeholder& placeholder) {
  c10::StorageImpl& storage = placeholder.storage();
  const std::size_t bytes = storage.nbytes();
  if (bytes > kLargest) return;
  forget(bytes);
  if (total_ + bytes > kLargestTotal || memory_.size() >= kMostTensors) return;
  const auto held = c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(&storage);
  memory_.push_back({c10::weak_intrusive_ptr<c10::StorageImpl>(held),
                     WatchedPages(std::max<std::size_t>(bytes, 1)),
                     bytes,
                     true,
                     false,
                     {}});
  total_ += bytes;
  placeholder.attach(memory_.back().data.get());
}

void PointerWrites::close(Memory& memory, const Written& written) {
  memory.open = false;
  const c10::intrusive_ptr<c10::StorageImpl> storage = memory.storage.lock();
  Placeholder* placeholder = storage ? Placeholder::find(*storage) : nullptr;
  if (!placeholder) return;
  placeholder->detach();
  if (all_zero(memory.data.get(), memory.bytes)) return;
  memory.values = std::make_shared<const std::string>(memory.data.get(), memory.bytes);
  written(*storage, memory.values);
}

void PointerWrites::close(c10::StorageImpl& storage, const Written& written) {
  const Placeholder* placeholder = Placeholder::find(storage);
  if (!placeholder || !placeholder->memory()) return;
  for (auto memory = memory_.rbegin(); memory != memory_.rend(); ++memory)
    if (memory->open && memory->storage._unsafe_get_target() == &storage) return close(*memory, written);
}

void PointerWrites::outdate(c10::StorageImpl& storage) {
  for (auto memory = memory_.rbegin(); memory != memory_.rend(); ++memory) {
    if (memory->open || memory->outdated || memory->storage._unsafe_get_target() != &storage) continue;
    valid_ &= memory->stays_valid();
    memory->outdated = memory->data.watch();
  }
}

bool PointerWrites::finish(const Written& written) {
  for (Memory& memory : memory_) {
    if (memory.open)
      close(memory, written);
    else
      valid_ &= memory.outdated ? memory.stays_valid() : memory.storage.use_count() == 0 || memory.stays_valid();
  }
  memory_.clear();
  total_ = 0;
  return valid_;
}

}  // namespace zr::host::model
