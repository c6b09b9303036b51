// The tables of the services that every Host offers. Inside core/plugin.
#pragma once

#include <exception>
#include <map>
#include <mutex>
#include <string>

#include "plugin/host.hpp"

namespace zr::host {

extern const zr_config_service kConfigService;
extern const zr_memory_service kMemoryService;

struct Host::Memory {
  struct Block {
    std::size_t mapped;  // bytes to unmap from the block's start; 0: from the heap
    int64_t bytes;
    Kind kind;
    std::string tag;
  };
  std::mutex mutex;
  std::map<void*, Block> blocks;
  std::exception_ptr failure;  // what an allocation failed with
  /// Frees what is left and says how many bytes that was.
  int64_t clear(Ledger& ledger);
};

}  // namespace zr::host
