// A loaded library, its components, and instances of them. All calls of the plug-in pass through call().
#pragma once

#include <exception>
#include <filesystem>
#include <string>

#include "conform/case.hpp"
#include "conform/key_values.hpp"
#include "conform/test_host.hpp"
#include "zr/abi/module.h"

namespace zr::conform {

/// What a call of the plug-in returned.
struct Answer {
  zr_code code = ZR_OK;
  int64_t native = 0;
  std::string text{};
  bool ok() const { return code == ZR_OK; }
  /// "returned ZR_IO (4): the text".
  std::string said() const {
    return "returned " + code_text(code) + (code == ZR_OK || text.empty() ? "" : ": " + text);
  }
};

/// Thrown by call(): an exception left a function of the plug-in.
struct EscapedException : Failure {};

/// Calls fn(zr_error*). Throws EscapedException if an exception leaves the function.
template <class F>
Answer call(const std::string& name, F&& fn) {
  zr_error error{};
  try {
    const zr_code code = fn(&error);
    error.msg[sizeof error.msg - 1] = 0;
    return {code, error.native, error.msg};
  } catch (const std::exception& escaped) {
    throw EscapedException{
        {concat(name, " threw an exception (", escaped.what(), "); a function of the ABI returns a code")}};
  } catch (...) {
    throw EscapedException{{concat(name, " threw an exception; a function of the ABI returns a code")}};
  }
}
/// Calls fn(), which returns nothing and takes no zr_error. Throws as call().
template <class F>
void call_void(const std::string& name, F&& fn) {
  call(name, [&](zr_error*) {
    fn();
    return zr_code{ZR_OK};
  });
}
/// Calls and fails unless the function returned ZR_OK.
template <class F>
void must(const std::string& name, F&& fn) {
  const Answer answer = call(name, fn);
  if (!answer.ok()) fail(name, " ", answer.said());
}

class Library {
 public:
  /// Loads the file with RTLD_NOW and RTLD_LOCAL. Throws Failure.
  explicit Library(const std::filesystem::path& file);
  /// The exported function; fails if the library has none.
  const zr_module* module(uint32_t host_minor = ZR_ABI_MINOR) const;
  const zr_component& component(const std::string& role, const std::string& id) const;
  /// True if `address` is in the library's code.
  bool contains(const void* address) const;
  uintptr_t first_address() const { return first_; }
  /// Calls startup() of the module, once.
  void start();

 private:
  void* handle_ = nullptr;
  uintptr_t first_ = 0, last_ = 0;
  bool started_ = false;
};

/// "strategy" of "zr.strategy/1"; "" for an unknown kind.
std::string role_of_kind(const char* kind);
/// A function table's size in ABI 0.9.
std::size_t api_size_of(const std::string& role);

/// An instance of the component of a case.
class Instance {
 public:
  /// Fails unless create() returns ZR_OK.
  Instance(Case& test, TestHost& host) : Instance(test, host, values_for(test)) {}
  Instance(Case& test, TestHost& host, const KeyValues& values);
  ~Instance();
  Instance(const Instance&) = delete;
  void* self() const { return self_; }
  template <class Api>
  const Api& api() const {
    return *static_cast<const Api*>(component_.api);
  }
  const zr_component& component() const { return component_; }
  TestHost& host() const { return host_; }
  /// Fails if the plug-in misused a service of the host.
  void check_host() const {
    if (const std::string problem = host_.problem(); !problem.empty()) fail(problem);
  }
  void destroy();
  static KeyValues values_for(Case& test);

 private:
  const zr_component& component_;
  TestHost& host_;
  ConfigTable& table_;
  void* self_ = nullptr;
};

/// A table of optional functions of the component, or null.
template <class Api>
const Api* extension_of(const Instance& instance, const char* id) {
  const zr_component& component = instance.component();
  const void* table = nullptr;
  if (component.extension) call_void("extension()", [&] { table = component.extension(id); });
  return static_cast<const Api*>(table);
}

/// Calls create(); `self` receives the instance. Reads of the table after the call are reported to the host.
Answer create(const zr_component& component, TestHost& host, ConfigTable& table, void** self);

}  // namespace zr::conform
