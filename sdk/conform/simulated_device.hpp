// A device that only exists in the checks: its memory has addresses that the CPU cannot access, and one stream per
// rank, whose work is done as late as possible.
#pragma once

#include <cstdint>
#include <map>
#include <memory>

#include "conform/memory.hpp"
#include "zr/abi/base.h"
#include "zr/mutex.hpp"

struct zr_stream_service;  // zr/abi/draft/device.h

namespace zr::conform {

/// Any thread.
class SimulatedDevice {
 public:
  /// The device has this type of DLPack.
  explicit SimulatedDevice(int32_t type) : device_{type, 0} {}
  ~SimulatedDevice();
  SimulatedDevice(const SimulatedDevice&) = delete;
  zr_device device() const { return device_; }
  bool is(const zr_device& other) const { return other.type == device_.type && other.id == device_.id; }
  /// The address of zeroed memory.
  char* allocate(std::size_t bytes);
  /// The address may still be used by work that is enqueued. False if it is not the address of an allocation.
  bool free(const void* address);
  /// The memory behind an address, for work on a stream; null if the address is not in an allocation.
  char* backing(const void* address) const;
  /// The stream of a rank.
  zr_stream* stream(int rank) const;
  /// "zr.host.stream/1": handles and devices of the streams; it makes none.
  static const zr_stream_service& service();

 private:
  struct Stream {
    SimulatedDevice* device;
  };
  struct Block {
    std::unique_ptr<Array> backing;
    std::size_t reserved;  // bytes of addresses
    bool freed = false;
  };
  const zr_device device_;
  mutable Mutex mutex_;
  std::map<char*, Block> blocks_ ZR_GUARDED_BY(mutex_);
  mutable std::map<int, Stream> streams_ ZR_GUARDED_BY(mutex_);
};

/// The type of the device on which a component with these `device_types` can be checked; -1: it names none.
int32_t simulated_type(uint64_t device_types);
/// "a device of type 2 or a device of type 12", of those other than CPU memory; "a device" if there are none.
std::string text_of_device_types(uint64_t device_types);

}  // namespace zr::conform
