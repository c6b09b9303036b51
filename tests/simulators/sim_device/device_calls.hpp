// For plug-ins on the simulated device: tasks on its streams, through the functions of its library, which
// job.device_library loads.
#pragma once

#include <dlfcn.h>

#include <string>
#include <utility>

#include "zr/base.hpp"

namespace sim {

template <class Function>
Function* function_of_device(const char* name) {
  void* const symbol = ::dlsym(RTLD_DEFAULT, name);
  if (!symbol) throw zr::PluginError(ZR_STATE, std::string("the simulated device is not loaded: no ") + name);
  return reinterpret_cast<Function*>(symbol);
}

/// The memory behind an address of the device, which only tasks may use.
template <class T>
T* backing(T* address) {
  static auto* const of = function_of_device<void*(const void*)>("zr_sim_backing");
  return static_cast<T*>(of(address));
}

/// Runs `task`, a copy of which the stream keeps until then.
template <class Task>
void enqueue(void* native_stream, const char* name, Task task) {
  static auto* const enqueue_on =
      function_of_device<void(void*, const char*, void (*)(void*), void*)>("zr_sim_enqueue");
  enqueue_on(
      native_stream, name,
      [](void* context) {
        auto* const kept = static_cast<Task*>(context);
        (*kept)();
        delete kept;
      },
      new Task(std::move(task)));
}

}  // namespace sim
