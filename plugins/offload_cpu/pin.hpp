// Locks memory for a CUDA device, through a CUDA runtime that is already loaded or found at run time; none is linked.
#pragma once

#include <cstdint>
#include <string>

#include "zr/base.hpp"

namespace cpu {

/// Whether `folder` has the file of an NVIDIA device: "nvidia" and a number, which in a container need not be 0.
bool has_nvidia_device(const char* folder = "/dev");

/// `pin`: "auto", "true", "false". Without an NVIDIA device nothing is loaded.
class Pin {
 public:
  /// Throws zr::PluginError if pin is "true" and memory cannot be locked on this machine.
  Pin(const zr::Host& host, const std::string& pin);
  /// Locks memory. If it cannot be locked: throws if pin is "true", else returns false.
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
