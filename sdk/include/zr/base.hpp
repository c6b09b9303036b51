// The C++17 layer over zr/abi: errors, the host's services, configuration, threads, completions.
// It is compiled into each plug-in (hidden, inline) and is not part of the ABI.
#pragma once

#include <atomic>
#include <cstdio>
#include <cstring>
#include <exception>
#include <new>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#if !defined(__cpp_exceptions)
#error "the C++ layer needs exceptions; without them, write the plug-in in C (zr/c.h)"
#endif

#include "zr/abi/base.h"
#include "zr/abi/host.h"
#include "zr/abi/module.h"

#pragma GCC visibility push(hidden)
namespace zr {
inline namespace sdk {

/// The exception that a plug-in throws. At the ABI boundary it becomes a zr_code and a message; any other exception
/// becomes ZR_INTERNAL.
class PluginError : public std::runtime_error {
 public:
  /// `message`: what failed, why, and what to do. `native`: errno or a library's own code; 0: none.
  PluginError(zr_code code, const std::string& message, int64_t native = 0)
      : std::runtime_error(message), code_(code), native_(native) {}
  zr_code code() const { return code_; }      // never ZR_OK
  int64_t native() const { return native_; }  // errno or a library's own code; 0: none

 private:
  zr_code code_;
  int64_t native_;
};

/// Writes a failure into the caller's error, if there is one, and returns the code.
inline zr_code fill(zr_error* error, zr_code code, int64_t native, const char* message) noexcept {
  if (error) {
    error->code = code;
    error->native = native;
    std::snprintf(error->msg, sizeof error->msg, "%s", message);
  }
  return code;
}

/// Runs fn, which returns nothing or a zr_code, and converts exceptions into an error.
template <class F>
zr_code guard(zr_error* error, F&& fn) noexcept {
  try {
    if constexpr (std::is_void_v<decltype(fn())>) {
      fn();
      return ZR_OK;
    } else {
      return fn();
    }
  } catch (const PluginError& e) {
    return fill(error, e.code(), e.native(), e.what());
  } catch (const std::bad_alloc&) {
    return fill(error, ZR_NOMEM, 0, "out of memory");
  } catch (const std::exception& e) {
    return fill(error, ZR_INTERNAL, 0, e.what());
  } catch (...) {
    return fill(error, ZR_INTERNAL, 0, "an exception of unknown type (not a std::exception)");
  }
}

/// Throws the error that a call through the ABI reported, if any.
inline void check(zr_code code, const zr_error& error) {
  if (code != ZR_OK) throw PluginError(code, error.msg[0] ? error.msg : "no message", error.native);
}
/// An empty error, for a call through the ABI.
inline zr_error no_error() { return zr_error{}; }

/// A copy of a sized struct that the host filled, for code that keeps it: members that the host does not have are 0.
template <class T>
T taken(const T& given) {
  T copy;
  ZR_TAKE(&copy, &given);
  return copy;
}

/// Copies `value` to an output struct, at most the `size` bytes that the caller has, and sets `size` to what was
/// written.
template <class T>
void write_output(T* out, T value) {
  value.size = out->size < sizeof(T) ? out->size : static_cast<uint32_t>(sizeof(T));
  std::memcpy(out, &value, value.size);
}

// ---- the host ----

/// The id of a service of the host, by the type of its table.
template <class Service>
inline constexpr const char* service_id = nullptr;
template <>
inline constexpr const char* service_id<zr_config_service> = "zr.host.config/1";  // values of the TOML table
template <>
inline constexpr const char* service_id<zr_async_service> = "zr.host.async/1";  // completions
template <>
inline constexpr const char* service_id<zr_memory_service> = "zr.host.memory/1";  // counted memory
template <>
inline constexpr const char* service_id<zr_task_service> = "zr.host.tasks/1";  // the thread pool
template <>
inline constexpr const char* service_id<zr_store_service> = "zr.host.store/1";  // the key-value store
template <>
inline constexpr const char* service_id<zr_job_service> = "zr.host.job/1";  // rank, world, run folder
template <>
inline constexpr const char* service_id<zr_machine_service> = "zr.host.machine/1";  // measurements of the machine

/// The host of the plug-in. Copyable; the host lives as long as the process. [any]
class Host {
 public:
  /// `host`: as create() received it.
  explicit Host(const zr_host* host) : host_(host) {}
  const zr_host* abi() const { return host_; }  // for calls through the ABI
  /// A service; null if the host does not offer it.
  template <class Service>
  const Service* find(const char* id = service_id<Service>) const {
    return static_cast<const Service*>(host_->service(host_, id));
  }
  /// A service; throws ZR_UNSUPPORTED with its id if the host does not offer it.
  template <class Service>
  const Service& need(const char* id = service_id<Service>) const {
    const Service* service = find<Service>(id);
    if (!service)
      throw PluginError(ZR_UNSUPPORTED,
                        std::string("needs the service \"") + id + "\", which this engine does not offer");
    return *service;
  }
  /// Writes a line to the host's log. `level`: ZR_LOG_DEBUG to ZR_LOG_ERROR.
  void log(int32_t level, const std::string& text) const { host_->log(host_, level, text.c_str()); }

 private:
  const zr_host* host_;
};

/// The values of one TOML table, validated by the host against the component's keys. Valid until the call that received
/// it returns. Reading a name that is not among the keys, or a key of another type, throws. [control]
class Config {
 public:
  /// Reads `config` through the service of `host`.
  Config(const Host& host, const zr_config* config) : service_(host.need<zr_config_service>()), config_(config) {}

  /// The value of a boolean key.
  bool boolean(const char* key) const { return read<int32_t>(service_.get_bool, key) != 0; }
  /// The value of an integer key, or of a size, in bytes.
  int64_t integer(const char* key) const { return read<int64_t>(service_.get_int, key); }
  /// The value of a floating-point key, or of a duration, in seconds.
  double number(const char* key) const { return read<double>(service_.get_float, key); }
  /// The value of a string key.
  std::string text(const char* key) const { return read<const char*>(service_.get_string, key); }
  /// The value of a key that is an array of numbers.
  std::vector<double> numbers(const char* key) const {
    const double* values = nullptr;
    uint32_t n = 0;
    if (zr_code code = service_.get_floats(config_, key, &values, &n)) reject(code, key);
    return std::vector<double>(values, values + n);
  }

 private:
  template <class T, class Get>
  T read(Get get, const char* key) const {
    T value{};
    if (zr_code code = get(config_, key, &value)) reject(code, key);
    return value;
  }
  [[noreturn]] static void reject(zr_code code, const char* key) {
    throw PluginError(code,
                      std::string("key \"") + key + "\" was read, but this component has no such key of that type");
  }
  const zr_config_service& service_;
  const zr_config* config_;
};

/// Runs loops on the host's threads. [step] [use]
class Tasks {
 public:
  /// Throws ZR_UNSUPPORTED if the host has no thread pool.
  explicit Tasks(const Host& host) : host_(host.abi()), service_(&host.need<zr_task_service>()) {}
  uint32_t width() const { return service_->width(host_); }  // threads of this rank, the caller included
  /// Calls fn(begin, end) for all of [0, n), in ranges of at least `grain`. Returns when all calls have returned, and
  /// rethrows the first exception.
  template <class F>
  void parallel_for(int64_t n, int64_t grain, F&& fn) const {
    struct Call {
      std::remove_reference_t<F>& fn;
      std::atomic_flag failed = ATOMIC_FLAG_INIT;
      std::exception_ptr error;
    } call{fn, {}, {}};
    const auto run = [](void* ctx, int64_t begin, int64_t end) {
      Call& same = *static_cast<Call*>(ctx);
      try {
        same.fn(begin, end);
      } catch (...) {
        if (!same.failed.test_and_set()) same.error = std::current_exception();
      }
    };
    service_->parallel_for(host_, n, grain, run, &call);
    if (call.error) std::rethrow_exception(call.error);
  }

 private:
  const zr_host* host_;
  const zr_task_service* service_;
};

/// One reference to a host completion; movable. Destroying it does not cancel the operation: the code that resolves the
/// completion later holds its own reference (retained()). [any], but wait: [use]
class Done {
 public:
  Done() = default;  // empty: nothing to wait for
  /// A new completion, for a call that takes a zr_done*.
  explicit Done(const Host& host) : service_(&host.need<zr_async_service>()), done_(service_->done_new(host.abi())) {
    if (!done_) throw std::bad_alloc();
  }
  /// Another reference to a completion that a call received, to resolve it after the call has returned. If done is
  /// null, the result is an empty Done.
  static Done retained(const Host& host, zr_done* done) {
    Done kept;
    if (!done) return kept;
    kept.service_ = &host.need<zr_async_service>();
    kept.service_->done_retain(done);
    kept.done_ = done;
    return kept;
  }
  /// Moves the reference; `other` becomes empty.
  Done(Done&& other) noexcept { swap(other); }
  /// Drops the reference and moves the other one; `other` becomes empty.
  Done& operator=(Done&& other) noexcept {
    Done(std::move(other)).swap(*this);
    return *this;
  }
  ~Done() {
    if (done_) service_->done_release(done_);
  }
  explicit operator bool() const { return done_ != nullptr; }  // false: empty
  zr_done* abi() const { return done_; }                       // for calls through the ABI; null if empty
  /// Resolves the completion. Called exactly once, by the code that accepted the call.
  void resolve(zr_code code = ZR_OK, int64_t native = 0, const char* message = nullptr) const {
    service_->done_resolve(done_, code, native, message);
  }
  /// True if the completion is resolved. Throws if it was resolved with an error. An empty Done is ready.
  bool ready() const {
    if (!done_) return true;
    zr_error error = no_error();
    const zr_code code = service_->done_poll(done_, &error);
    if (code == ZR_AGAIN) return false;
    check(code, error);
    return true;
  }
  /// Waits, at most for the host's own limit. Throws if the completion was resolved with an error, or on timeout.
  void wait() const {
    if (!done_) return;
    zr_error error = no_error();
    check(service_->done_wait(done_, -1, &error), error);
  }

 private:
  void swap(Done& other) noexcept {
    std::swap(service_, other.service_);
    std::swap(done_, other.done_);
  }
  const zr_async_service* service_ = nullptr;
  zr_done* done_ = nullptr;
};

/// The elements of a view as T; sizeof(T) must be the size of the view's dtype.
template <class T>
T* data(const zr_view& view) {
  return static_cast<T*>(view.data);
}
/// Elements [first, first + elements) of a view whose elements have `size` bytes each.
inline zr_view part(const zr_view& view, int64_t first, int64_t elements, int64_t size) {
  zr_view range = view;
  range.data = static_cast<char*>(view.data) + first * size;
  range.count = elements;
  return range;
}
/// Allocates memory that is counted in the host's ledger; see zr_memory_service. Throws if the allocation fails. Free
/// it with zr_memory_service::free.
inline zr_view allocate(const Host& host, uint64_t bytes, const char* tag, uint64_t align = 0,
                        zr_device device = {ZR_DEVICE_CPU, 0}) {
  zr_alloc request{};
  request.size = sizeof request;
  request.bytes = bytes;
  request.align = align;
  request.device = device;
  request.tag = tag;
  zr_view memory{};
  zr_error error = no_error();
  check(host.need<zr_memory_service>().alloc(host.abi(), &request, &memory, &error), error);
  return memory;
}
/// The set of device types that has only host memory, for descriptions and capabilities.
inline constexpr uint64_t kCpuOnly = uint64_t{1} << ZR_DEVICE_CPU;
/// The set of all device types, for plug-ins that only compute addresses.
inline constexpr uint64_t kAnyDevice = ~uint64_t{0};

}  // namespace sdk
}  // namespace zr
#pragma GCC visibility pop
