// "zr.host.memory/1": zeroed, aligned memory, every byte in the ledger.
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <utility>

#include "plugin/services.hpp"

namespace zr::host {

namespace {

constexpr uint64_t kHugePage = uint64_t{2} << 20, kHugeFrom = uint64_t{4} << 20, kLeastAlign = 64;

zr_code refuse(zr_error* error, zr_code code, const std::string& text) {
  error->code = code;
  std::snprintf(error->msg, sizeof error->msg, "%s", text.c_str());
  return code;
}

// A tag may begin with the ledger's kind: "window: double buffer". Others count as `fallback`.
Kind kind_of_tag(const std::string& tag, Kind fallback) {
  const std::string start = tag.substr(0, tag.find(':'));
  for (std::size_t i = 0; i < kKindNames.size(); ++i)
    if (start == kKindNames[i]) return static_cast<Kind>(i);
  return fallback;
}

// What grows with the model stands where its weights do; the rest is the host's.
Tier tier_of(Kind kind) {
  return kind == Kind::other || kind == Kind::communicator || kind == Kind::snapshot || kind == Kind::staging
             ? Tier::host
             : Tier::device;
}

// Large blocks come as huge pages straight from the kernel, which zeroes them at first touch.
void* map_huge(uint64_t bytes, uint64_t align, std::size_t& mapped) {
  const uint64_t step = std::max(align, kHugePage), whole = (bytes + kHugePage - 1) / kHugePage * kHugePage;
  void* all = ::mmap(nullptr, whole + step, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (all == MAP_FAILED) return nullptr;
  char* start = static_cast<char*>(all);
  char* aligned = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(all) + step - 1) / step * step);
  if (aligned > start) ::munmap(start, static_cast<std::size_t>(aligned - start));
  if (const auto tail = static_cast<std::size_t>(start + whole + step - (aligned + whole)); tail > 0)
    ::munmap(aligned + whole, tail);
  ::madvise(aligned, whole, MADV_HUGEPAGE);
  mapped = whole;
  return aligned;
}

void release(void* memory, std::size_t mapped) {
  if (mapped) {
    ::munmap(memory, mapped);
  } else {
    std::free(memory);
  }
}

void free_view(const zr_host* abi, const zr_view* view) {
  if (!abi->ctx || !view->data) return;  // gone with its host, or empty
  Host& host = Host::from_abi(abi);
  Host::Memory::Block block;
  {
    const std::lock_guard lock(host.memory().mutex);
    const auto at = host.memory().blocks.find(view->data);
    if (at == host.memory().blocks.end()) {
      abi->log(abi, ZR_LOG_ERROR, "a plug-in freed memory that the host did not lend it");
      return;
    }
    block = at->second;
    host.memory().blocks.erase(at);
  }
  release(view->data, block.mapped);
  host.ledger().add(tier_of(block.kind), block.kind, block.tag, -block.bytes);
}

zr_code alloc(const zr_host* abi, uint64_t bytes, uint64_t align, const char* tag, zr_view* out, zr_error* error) {
  if (!abi->ctx) return refuse(error, ZR_STATE, "the host of this instance is gone");
  if (align & (align - 1))
    return refuse(error, ZR_INVALID, "alignment " + std::to_string(align) + " is no power of two");
  if (bytes > uint64_t{1} << 47)
    return refuse(error, ZR_NOMEM, std::to_string(bytes) + " bytes for '" + tag + "' are not to be had");
  Host& host = Host::from_abi(abi);
  zr_view view{nullptr, static_cast<int64_t>(bytes), ZR_U8, 0, {1, 0}};
  if (bytes > 0) {
    align = std::max(align, kLeastAlign);
    std::size_t mapped = 0;
    if (bytes >= kHugeFrom) {
      view.data = map_huge(bytes, align, mapped);
    } else if ((view.data = std::aligned_alloc(align, (bytes + align - 1) / align * align))) {
      std::memset(view.data, 0, bytes);
    }
    if (!view.data)
      return refuse(error, ZR_NOMEM, std::to_string(bytes) + " bytes for '" + tag + "' are not to be had");
    const Kind kind = kind_of_tag(tag, Kind::other);
    {
      const std::lock_guard lock(host.memory().mutex);
      host.memory().blocks[view.data] = {mapped, static_cast<int64_t>(bytes), kind, tag};
    }
    try {
      host.ledger().add(tier_of(kind), kind, tag, static_cast<int64_t>(bytes));
    } catch (const std::exception& over) {  // its budget
      free_view(abi, &view);
      const std::lock_guard lock(host.memory().mutex);
      host.memory().failure = std::current_exception();
      return refuse(error, ZR_NOMEM, over.what());
    }
  }
  *out = view;
  return ZR_OK;
}

void account(const zr_host* abi, const char* tag, int64_t delta_bytes) {
  if (!abi->ctx) return;
  try {
    Host::from_abi(abi).ledger().add(Tier::host, kind_of_tag(tag, Kind::communicator), tag, delta_bytes);
  } catch (const std::exception& over) {  // its budget: the bytes are taken already
    abi->log(abi, ZR_LOG_ERROR, over.what());
  }
}

}  // namespace

std::exception_ptr Host::take_failure() {
  const std::lock_guard lock(memory().mutex);
  return std::exchange(memory().failure, nullptr);
}

const zr_memory_service kMemoryService{sizeof(zr_memory_service), 0, alloc, free_view, account};

int64_t Host::Memory::clear(Ledger& ledger) {
  const std::lock_guard lock(mutex);
  int64_t bytes = 0;
  for (const auto& [memory, block] : blocks) {
    release(memory, block.mapped);
    ledger.add(tier_of(block.kind), block.kind, block.tag, -block.bytes);
    bytes += block.bytes;
  }
  blocks.clear();
  return bytes;
}

}  // namespace zr::host
