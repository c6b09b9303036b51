#include <dlfcn.h>

#include <chrono>
#include <new>
#include <thread>

#include "base/error.hpp"
#include "base/log.hpp"
#include "comm/comm_runtime.hpp"
#include "comm/done.hpp"

namespace zr::host::comm {

zr_done* done_new(const zr_host* host) {
  auto* done = new (std::nothrow) zr_done_s;
  if (done) done->host = host;
  return done;
}

void done_release(zr_done* done) {
  if (done && done->references.fetch_sub(1, std::memory_order_acq_rel) == 1) delete done;
}

namespace {
// The plug-in library that contains the code at `address`, or "". (A tail call leaves the return address in the caller
// of the plug-in, such as the C++ library.)
std::string plugin_library_at(const void* address) {
  Dl_info info{};
  if (!address || !::dladdr(address, &info) || !info.dli_fname) return "";
  void* const library = ::dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  if (!library) return "";
  const bool is_plugin = ::dlsym(library, "zr_module_v1") != nullptr;
  ::dlclose(library);
  return is_plugin ? info.dli_fname : "";
}
}  // namespace

void done_resolve(zr_done* done, zr_code code, int64_t native, const char* message, const void* caller) {
  if (done->resolved.test_and_set(std::memory_order_relaxed)) {
    const std::string library = plugin_library_at(caller);
    return log(ZR_LOG_ERROR, (library.empty() ? "a plug-in resolved a completion twice"
                                              : "a completion was resolved twice, the second time by " + library) +
                                 (done->what.empty() ? "" : ": " + done->what));
  }
  done->native = native;
  if (message) done->message = message;
  if (done->on_resolved) done->on_resolved(code);
  done->code.store(code == ZR_AGAIN ? zr_code{ZR_INTERNAL} : code, std::memory_order_release);
  done->code.notify_all();
}

zr_code done_poll(zr_done* done, zr_error* error) {
  const zr_code code = done->code.load(std::memory_order_acquire);
  return code == ZR_OK || code == ZR_AGAIN ? code : fill_error(error, code, done->message, done->native);
}

namespace {

constexpr std::chrono::seconds kPlanLimit{30};

void retain(zr_done* done) { done->references.fetch_add(1, std::memory_order_relaxed); }

// Called by plug-ins only, so the return address is in the plug-in.
void resolve(zr_done* done, zr_code code, int64_t native, const char* message) {
  done_resolve(done, code, native, message, __builtin_return_address(0));
}

zr_code wait(zr_done* done, int64_t timeout_ns, zr_error* error) {
  auto* communicator = done->host->ctx ? plugin::PluginHost::from_abi(done->host).context<CommRuntime>() : nullptr;
  // Goes through the communicator even if `done` is resolved, so that the communicator also records a failure.
  if (communicator) return communicator->wait(done, timeout_ns, error);
  // In a plan no communicator is open: collectives complete at once, and a plug-in's own threads resolve its other
  // completions.
  const std::chrono::nanoseconds limit =
      timeout_ns < 0 ? std::chrono::nanoseconds(kPlanLimit) : std::chrono::nanoseconds(timeout_ns);
  const auto begin = std::chrono::steady_clock::now();
  zr_code code = ZR_OK;
  while ((code = done_poll(done, error)) == ZR_AGAIN) {
    if (std::chrono::steady_clock::now() - begin > limit)
      return fill_error(error, ZR_TIMEOUT, "a completion was not resolved in time");
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  return code;
}

const zr_async_service kService{sizeof(zr_async_service), 0, done_new, retain, done_release, resolve, done_poll, wait};

}  // namespace

void offer_async(plugin::PluginHost& host) { host.offer("zr.host.async/1", &kService); }

}  // namespace zr::host::comm
