// "zr.host.memory/1": zeroed, aligned memory, every byte in the ledger.
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <map>
#include <new>
#include <utility>

#include "base/error.hpp"
#include "base/round_up.hpp"
#include "base/text.hpp"
#include "base/unknown_bits.hpp"
#include "plugin/services.hpp"

namespace zr::host::plugin {

namespace {

using BlockNodes = std::map<void*, PluginHost::Memory::Block>;
using BlockNode = BlockNodes::node_type;

constexpr uint64_t kMinPageMemory = uint64_t{4} << 20, kMinAlign = 64;  // from kMinPageMemory on: huge pages
static_assert(kMinPageMemory >= kHugePageBytes, "only mapped memory is zeroed");

// A tag may begin with a ledger kind: "all_gather: double buffer". Other tags count as `fallback`.
MemoryKind kind_of_tag(const std::string& tag, MemoryKind fallback) {
  const std::string start = tag.substr(0, tag.find(':'));
  for (std::size_t i = 0; i < kMemoryKindNames.size(); ++i)
    if (start == kMemoryKindNames[i]) return static_cast<MemoryKind>(i);
  return fallback;
}

// Kinds that grow with the model count for the tier of the weights, the other kinds for host memory.
Tier tier_of(MemoryKind kind) {
  return kind == MemoryKind::other || kind == MemoryKind::communicator || kind == MemoryKind::snapshot ||
                 kind == MemoryKind::staging
             ? Tier::host
             : Tier::device;
}

void free_view(const zr_host* abi, const zr_view* view) {
  if (!abi->ctx || !view->data) return;  // freed with its host, or empty
  PluginHost& host = PluginHost::from_abi(abi);
  PluginHost::Memory::Block block;
  {
    PluginHost::Memory& memory = host.memory();
    const MutexLock lock(memory.mutex);
    const auto at = memory.blocks.find(view->data);
    if (at == memory.blocks.end()) {
      abi->log(abi, ZR_LOG_ERROR, "a plug-in freed memory that the engine did not allocate");
      return;
    }
    block = std::move(at->second);
    memory.blocks.erase(at);
  }
  block.free(view->data);
  host.ledger().add(tier_of(block.kind), block.kind, block.tag, -block.bytes);
}

// The errors that do not depend on how much memory is free. device: null for host memory.
zr_code check_request(const zr_alloc& request, const DeviceMemory* device, zr_error* error) {
  const char* tag = request.tag;
  const uint64_t align = request.align;
  if (const std::string problem = unknown_bits_problem("flags", request.flags, 0); !problem.empty())
    return fill_error(error, ZR_UNSUPPORTED, fmt::format("'{}': {}", tag, problem));
  if (request.device.type != ZR_DEVICE_CPU && !device)
    return fill_error(error, ZR_UNSUPPORTED,
                      fmt::format("'{}': the engine has no memory on devices of type {}", tag, request.device.type));
  if (align & (align - 1))
    return fill_error(error, ZR_INVALID, fmt::format("alignment {} is not a power of two", align));
  if (align > uint64_t{1} << 47)
    return fill_error(error, ZR_NOMEM, fmt::format("cannot allocate memory for '{}' at a multiple of {}", tag, align));
  if (request.bytes > uint64_t{1} << 47)
    return fill_error(error, ZR_NOMEM, fmt::format("cannot allocate {} bytes for '{}'", request.bytes, tag));
  if (device && request.bytes > 0 && align > kMinAlign)
    return fill_error(error, ZR_UNSUPPORTED,
                      fmt::format("'{}': memory of a device is aligned to {} bytes, not to {}", tag, kMinAlign, align));
  return ZR_OK;
}

// Zeroed memory in `memory` and, for huge pages, in `pages`. device: null for host memory.
zr_code allocate_zeroed(const zr_alloc& request, DeviceMemory* device, void*& memory, HugePageMemory& pages,
                        zr_error* error) {
  const uint64_t bytes = request.bytes, align = std::max(request.align, kMinAlign);
  if (device) {
    try {
      memory = device->allocate(static_cast<int64_t>(bytes));
    } catch (const std::exception& failure) {
      return fill_error(error, ZR_NOMEM, fmt::format("'{}': {}", request.tag, failure.what()));
    }
  } else if (bytes >= kMinPageMemory) {
    pages = allocate_huge_pages(static_cast<int64_t>(bytes), static_cast<int64_t>(align));
    memory = pages.get();
  } else {
    memory = std::aligned_alloc(align, round_up(bytes, align));
    if (memory) std::memset(memory, 0, bytes);
  }
  if (memory) return ZR_OK;
  return fill_error(error, ZR_NOMEM, fmt::format("cannot allocate {} bytes for '{}'", bytes, request.tag));
}

// Adds the block to those of the host, and its bytes to the ledger. Frees it if they exceed the budget.
zr_code add_block(const zr_host* abi, const zr_view& view, const char* tag, BlockNode node, zr_error* error) {
  PluginHost& host = PluginHost::from_abi(abi);
  PluginHost::Memory& memory = host.memory();
  const MemoryKind kind = node.mapped().kind;
  node.key() = view.data;
  {
    const MutexLock lock(memory.mutex);
    memory.blocks.insert(std::move(node));
  }
  try {
    host.ledger().add(tier_of(kind), kind, tag, view.count);
  } catch (const std::bad_alloc&) {  // of the ledger's own objects
    const MutexLock lock(memory.mutex);
    memory.blocks.extract(view.data).mapped().free(view.data);
    throw;
  } catch (const std::exception& over) {  // exceeds the budget
    free_view(abi, &view);
    const MutexLock lock(memory.mutex);
    memory.failure = std::current_exception();
    return fill_error(error, ZR_NOMEM, over.what());
  }
  return ZR_OK;
}

// The entry of a block in PluginHost::Memory::blocks, still without its address.
BlockNode new_node(const zr_alloc& request, DeviceMemory* device) {
  BlockNodes node;
  node[nullptr] = {
      {}, static_cast<int64_t>(request.bytes), kind_of_tag(request.tag, MemoryKind::other), request.tag, device};
  return node.extract(nullptr);
}

zr_code alloc_block(const zr_host* abi, const zr_alloc* given, zr_view* out, zr_error* error) {
  if (!abi->ctx) return fill_error(error, ZR_STATE, "the engine of this instance no longer exists");
  if (given->size < ZR_SIZE_0_9(zr_alloc))
    return fill_error(error, ZR_INVALID, fmt::format("the zr_alloc has {} bytes, fewer than in ABI 0.9", given->size));
  zr_alloc request;
  ZR_TAKE(&request, given);
  DeviceMemory* device = PluginHost::from_abi(abi).context<DeviceMemory>();
  if (device && (request.device.type != device->device().type || request.device.id != device->device().id))
    device = nullptr;
  if (const zr_code code = check_request(request, device, error); code != ZR_OK) return code;
  zr_view view{nullptr, static_cast<int64_t>(request.bytes), ZR_U8, 0, request.device};
  if (request.bytes > 0) {
    BlockNode node = new_node(request, device);  // before the memory, which would be lost if this threw
    if (const zr_code code = allocate_zeroed(request, device, view.data, node.mapped().pages, error); code != ZR_OK)
      return code;
    if (const zr_code code = add_block(abi, view, request.tag, std::move(node), error); code != ZR_OK) return code;
  }
  *out = view;
  return ZR_OK;
}

zr_code alloc(const zr_host* abi, const zr_alloc* request, zr_view* out, zr_error* error) {
  try {
    return alloc_block(abi, request, out, error);
  } catch (const std::bad_alloc&) {  // of the engine's own objects
    return fill_error(error, ZR_NOMEM, "cannot allocate memory: the process is out of memory");
  } catch (const std::exception& failure) {
    return fill_error(error, ZR_INTERNAL, failure.what());
  }
}

void account(const zr_host* abi, const char* tag, int64_t delta_bytes) {
  if (!abi->ctx) return;
  PluginHost& host = PluginHost::from_abi(abi);
  try {
    host.ledger().add(Tier::host, kind_of_tag(tag, MemoryKind::communicator), tag, delta_bytes);
  } catch (const std::bad_alloc&) {  // of the engine's own objects
    PluginHost::Memory& memory = host.memory();
    const MutexLock lock(memory.mutex);
    memory.excess = std::current_exception();
  } catch (const std::exception& over) {  // exceeds the budget
    PluginHost::Memory& memory = host.memory();
    const MutexLock lock(memory.mutex);
    memory.excess = std::current_exception();
    try {
      memory.excess = std::make_exception_ptr(UserError(
          fmt::format("{}; {} of it are '{}', which a plug-in allocates while it works: the plan does not include them",
                      over.what(), bytes_text(delta_bytes), tag)));
    } catch (const std::bad_alloc&) {  // the shorter text remains
    }
  }
}

}  // namespace

std::exception_ptr PluginHost::take_failure() {
  Memory& state = memory();
  const MutexLock lock(state.mutex);
  return std::exchange(state.failure, nullptr);
}

std::exception_ptr PluginHost::take_excess() {
  Memory& state = memory();
  const MutexLock lock(state.mutex);
  return std::exchange(state.excess, nullptr);
}

const zr_memory_service kMemoryService{sizeof(zr_memory_service), 0, alloc, free_view, account};

int64_t PluginHost::Memory::clear(Ledger& ledger) {
  const MutexLock lock(mutex);
  int64_t bytes = 0;
  for (auto& [memory, block] : blocks) {
    block.free(memory);
    ledger.add(tier_of(block.kind), block.kind, block.tag, -block.bytes);
    bytes += block.bytes;
  }
  blocks.clear();
  return bytes;
}

}  // namespace zr::host::plugin
