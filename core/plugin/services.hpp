// The service tables that every PluginHost offers. Internal to core/plugin.
#pragma once

#include <cstdlib>
#include <exception>
#include <map>
#include <string>

#include "base/device_memory.hpp"
#include "base/draft_abi.hpp"
#include "base/huge_page_memory.hpp"
#include "plugin/plugin_host.hpp"
#include "zr/mutex.hpp"

namespace zr::host::plugin {

extern const zr_config_service kConfigService;
extern const zr_memory_service kMemoryService;
extern const zr_stream_service kStreamService;

struct PluginHost::Memory {
  struct Block {
    HugePageMemory pages;  // null: from the heap
    int64_t bytes = 0;
    MemoryKind kind = MemoryKind::other;
    std::string tag;
    DeviceMemory* device = nullptr;  // null: host memory
    void free(void* memory) {        // `memory` is the address of this block
      if (device) return device->free(memory);
      if (!pages) std::free(memory);
      pages.reset();
    }
  };
  Mutex mutex;
  std::map<void*, Block> blocks ZR_GUARDED_BY(mutex);
  std::exception_ptr failure ZR_GUARDED_BY(mutex);  // of the last failed allocation
  std::exception_ptr excess ZR_GUARDED_BY(mutex);   // of memory that a plug-in counted
  /// Frees all blocks; returns their bytes.
  int64_t clear(Ledger& ledger) ZR_EXCLUDES(mutex);
};

}  // namespace zr::host::plugin
