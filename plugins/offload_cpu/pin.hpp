// Pages locked for a CUDA device, through the runtime that the process has or finds; none is linked.
#pragma once

#include <cstdint>
#include <string>

#include "zr/base.hpp"

namespace cpu {

/// `pin`: "auto", "true", "false". Where there is no /dev/nvidia0, nothing is loaded.
class Pin {
 public:
  /// Throws zr::Error where "true" cannot be had.
  Pin(const zr::Host& host, const std::string& pin);
  /// Locks these bytes, or throws if it must; false: they are not locked.
  bool lock(void* data, uint64_t bytes);
  void unlock(void* data) const;

 private:
  void load();
  std::string text_of(int error) const;
  const zr::Host host_;
  const bool required_;
  bool reported_ = false;
  int (*register_)(void*, size_t, unsigned) = nullptr;  // cudaHostRegister
  int (*unregister_)(void*) = nullptr;                  // cudaHostUnregister
  int (*last_error_)() = nullptr;                       // cudaGetLastError
  const char* (*error_text_)(int) = nullptr;            // cudaGetErrorString
};

}  // namespace cpu
