#include "pin.hpp"

#include <dlfcn.h>
#include <glob.h>

namespace cpu {

namespace {
constexpr const char* kNames[] = {"libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0", "libcudart.so"};
constexpr unsigned kPortable = 1;  // cudaHostRegisterPortable: for every device's context

// Prefers the runtime that libtorch has loaded: a second one would work, but needs its own memory.
void* runtime() {
  for (const int load_flag : {RTLD_NOLOAD, 0})
    for (const char* name : kNames)
      if (void* library = ::dlopen(name, RTLD_NOW | RTLD_LOCAL | load_flag)) return library;
  return nullptr;
}

template <class F>
bool find(void* library, const char* name, F& function) {
  function = reinterpret_cast<F>(::dlsym(library, name));
  return function != nullptr;
}
}  // namespace

bool has_nvidia_device(const char* folder) {
  glob_t found{};  // not nvidiactl, nvidia-uvm
  const int result = ::glob((std::string(folder) + "/nvidia[0-9]*").c_str(), GLOB_NOSORT, nullptr, &found);
  ::globfree(&found);
  return result == 0;
}

Pin::Pin(const zr::Host& host, const std::string& pin) : host_(host), required_(pin == "true") {
  if (pin == "false") return;
  if (has_nvidia_device()) {
    load();
  } else if (required_) {
    throw zr::PluginError(ZR_UNSUPPORTED,
                          "offload.cpu.pin = \"true\", but this machine has no CUDA device (no /dev/nvidia<number> "
                          "exists); set \"auto\" or \"false\"");
  }
}

void Pin::load() {
  void* library = runtime();
  if (library && find(library, "cudaHostRegister", register_) && find(library, "cudaHostUnregister", unregister_) &&
      find(library, "cudaGetLastError", last_error_) && find(library, "cudaGetErrorString", error_text_))
    return;
  register_ = nullptr;
  const std::string text = "there is a CUDA device, but no CUDA runtime (libcudart.so.12) to lock memory for it";
  if (required_)
    throw zr::PluginError(ZR_UNSUPPORTED, "offload.cpu.pin = \"true\": " + text +
                                              "; add its folder to LD_LIBRARY_PATH, or set \"auto\" or \"false\"");
  host_.log(ZR_LOG_WARN, "tier cpu: " + text + "; copies to the device are slower");
}

std::string Pin::text_of(int error) const {
  const char* text = error_text_(error);
  last_error_();  // clears the error, which libtorch would otherwise report as its own
  return text ? text : "error " + std::to_string(error);
}

bool Pin::lock(void* data, uint64_t bytes) {
  if (!register_) return false;
  const int error = register_(data, bytes, kPortable);
  if (error == 0) return true;
  const std::string text = "cannot lock " + std::to_string(bytes) + " bytes for the CUDA device: " + text_of(error);
  if (required_)
    throw zr::PluginError(ZR_NOMEM, "tier cpu: " + text + "; offload less, or set offload.cpu.pin = \"auto\"", error);
  if (!reported_) host_.log(ZR_LOG_WARN, "tier cpu: " + text + "; copies to the device are slower");
  reported_ = true;
  return false;
}

void Pin::unlock(void* data) const {
  if (const int error = unregister_(data)) host_.log(ZR_LOG_WARN, "tier cpu: cannot unlock memory: " + text_of(error));
}

}  // namespace cpu
