// All-gather of one value per rank, as control traffic.
#pragma once

#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "comm/comm_runtime.hpp"

namespace zr::host::job {

/// Returns every rank's value, in rank order. Collective; control traffic.
template <class T>
std::vector<T> all_gather(comm::CommRuntime& comm, const T& own, const char* label) {
  static_assert(std::is_trivially_copyable_v<T>);
  std::vector<T> values;
  for (const std::string& bytes :
       comm.all_gather_bytes(std::string(reinterpret_cast<const char*>(&own), sizeof own), label)) {
    T value;
    std::memcpy(&value, bytes.data(), sizeof value);
    values.push_back(value);
  }
  return values;
}

}  // namespace zr::host::job
