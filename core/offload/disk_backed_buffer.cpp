#include "offload/disk_backed_buffer.hpp"

#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "base/error.hpp"
#include "base/text.hpp"

namespace zr::host::offload {

namespace {
constexpr const char* kResidentTag = "resident blocks of disk-backed buffers";
}  // namespace

DiskBackedBuffer::DiskBackedBuffer(TierStore& tier, int64_t bytes, TierStore::LedgerEntry entry,
                                   const std::vector<int64_t>& resident_blocks, Ledger& ledger)
    : tier_(tier),
      ledger_(ledger),
      tag_(entry.tag),
      block_(tier.info().align),
      size_(round_up(bytes, tier.info().align)),
      written_(static_cast<std::size_t>(round_up(bytes, tier.info().align) / tier.info().align), false) {
  void* space =
      ::mmap(nullptr, static_cast<std::size_t>(size_), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (space == MAP_FAILED)
    fail_environment(
        fmt::format("cannot reserve {} of address space for '{}'; raise the limit on virtual memory (ulimit -v)",
                    bytes_text(bytes), tag_));
  space_ = {static_cast<char*>(space), Unmap{size_}};
  allocation_ = TierAllocation(tier_, size_, {std::move(entry)});
  for (const int64_t block : resident_blocks) make_resident(block, "");
}

void DiskBackedBuffer::Unmap::operator()(char* space) const { ::munmap(space, static_cast<std::size_t>(bytes)); }

template <class F>
void DiskBackedBuffer::for_each_range(int64_t from, int64_t to, bool by_written, F&& fn) const {
  const int64_t end = block_end(to) / block_;
  auto resident = resident_.lower_bound(from / block_);
  for (int64_t block = from / block_; block < end;) {
    if (resident != resident_.end() && resident->first == block) {
      fn(block, block + 1, resident->second.data(), true);
      ++block;
      ++resident;
      continue;
    }
    const int64_t limit = resident == resident_.end() ? end : std::min(end, resident->first);
    int64_t next = block + 1;
    const bool written = written_[static_cast<std::size_t>(block)];
    while (next < limit && (!by_written || written_[static_cast<std::size_t>(next)] == written)) ++next;
    fn(block, next, static_cast<char*>(nullptr), written);
    block = next;
  }
}

void DiskBackedBuffer::wait_for(int64_t from, int64_t to, bool writes_only) {
  for (PendingTransfer& pending : pending_)
    if (pending.from < to && from < pending.to && (pending.writes || !writes_only)) pending.transfer.wait();
}

uint64_t DiskBackedBuffer::read(int64_t from, int64_t to, char* staging, const std::string& what) {
  wait_for(block_begin(from), block_end(to), true);
  const uint64_t number = ++last_number_;
  for_each_range(from, to, true, [&](int64_t first, int64_t end, const char* resident, bool written) {
    char* const at = staging + first * block_ - block_begin(from);
    const auto bytes = static_cast<std::size_t>((end - first) * block_);
    if (resident)
      std::memcpy(at, resident, bytes);
    else if (!written)
      std::memset(at, 0, bytes);
    else
      pending_.push_back({number, first * block_, end * block_, false,
                          tier_.read(allocation_.id(), first * block_, at, static_cast<int64_t>(bytes), what)});
  });
  return number;
}

void DiskBackedBuffer::prepare_write(int64_t from, int64_t to, const std::string& what) {
  for (const int64_t edge : {from, to})
    if (edge % block_ != 0 && !resident_.count(edge / block_)) {
      ledger_.plan(Tier::host, MemoryKind::staging, block_);
      make_resident(edge / block_, what);
    }
}

uint64_t DiskBackedBuffer::write(int64_t from, int64_t to, const char* staging, const std::string& what) {
  wait_for(block_begin(from), block_end(to), false);
  const uint64_t number = ++last_number_;
  for_each_range(from, to, false, [&](int64_t first, int64_t end, char* resident, bool) {
    const int64_t begin = std::max(from, first * block_), stop = std::min(to, end * block_);
    const char* const at = staging + begin - block_begin(from);
    if (resident) {
      std::memcpy(resident + (begin - first * block_), at, static_cast<std::size_t>(stop - begin));
      return;
    }
    if (begin != first * block_ || stop != end * block_)
      fail_internal(fmt::format("partial write of a block of '{}'", tag_));
    pending_.push_back({number, begin, stop, true, tier_.write(allocation_.id(), begin, at, stop - begin, what)});
    std::fill(written_.begin() + first, written_.begin() + end, true);
  });
  return number;
}

// Reads the block from disk if it was written before; blocks that are resident from the start never were.
void DiskBackedBuffer::make_resident(int64_t block, const std::string& what) {
  TrackedMemory memory(block_, block_, ledger_, Tier::host, MemoryKind::staging, kResidentTag);
  if (written_[static_cast<std::size_t>(block)]) {
    wait_for(block * block_, (block + 1) * block_, true);
    tier_.read(allocation_.id(), block * block_, memory.data(), block_, what).wait();
  }
  resident_.emplace(block, std::move(memory));
}

void DiskBackedBuffer::wait(uint64_t number) {
  for (PendingTransfer& pending : pending_)
    if (pending.number == number) pending.transfer.wait();
  std::erase_if(pending_, [&](const PendingTransfer& pending) { return pending.number == number; });
}

bool DiskBackedBuffer::is_over(uint64_t number) const {
  return std::all_of(pending_.begin(), pending_.end(), [&](const PendingTransfer& pending) {
    return pending.number != number || pending.transfer.is_over();
  });
}

bool DiskBackedBuffer::is_written(int64_t from, int64_t to) const {
  return std::any_of(pending_.begin(), pending_.end(), [&](const PendingTransfer& pending) {
    return pending.writes && pending.from < block_end(to) && block_begin(from) < pending.to &&
           !pending.transfer.is_over();
  });
}

}  // namespace zr::host::offload
