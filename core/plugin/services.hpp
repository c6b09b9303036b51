// The tables of the services that every Host offers. Inside core/plugin.
#pragma once

#include <cstdlib>
#include <exception>
#include <map>
#include <mutex>
#include <string>

#include "base/page_memory.hpp"
#include "plugin/host.hpp"

namespace zr::host {

extern const zr_config_service kConfigService;
extern const zr_memory_service kMemoryService;

struct Host::Memory {
  struct Block {
    PageMemory pages;  // null: from the heap
    int64_t bytes = 0;
    Kind kind = Kind::other;
    std::string tag;
    void free(void* memory) {  // the block of this memory
      if (!pages) std::free(memory);
      pages.reset();
    }
  };
  std::mutex mutex;
  std::map<void*, Block> blocks;
  std::exception_ptr failure;  // what an allocation failed with
  /// Frees what is left and says how many bytes that was.
  int64_t clear(Ledger& ledger);
};

}  // namespace zr::host
