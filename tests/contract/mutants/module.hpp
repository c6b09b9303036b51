// What the plug-ins of tests/contract/mutants have in common. Each is compiled once per defect: ZR_MUTANT is the name
// of an enumerator of `Defect` in its source, `none` for the plug-in without a defect.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <stdexcept>

#include "zr/abi/host.h"
#include "zr/abi/module.h"

namespace mutant {

inline zr_code fill(zr_error* error, zr_code code, const char* text, int64_t native = 0) {
  error->code = code;
  error->native = native;
  std::snprintf(error->msg, sizeof error->msg, "%s", text);
  return code;
}

template <class T>
const T* service(const zr_host* host, const char* id) {
  return static_cast<const T*>(host->service(host, id));
}

/// Reads memory that may not be valid any more.
inline void read(const volatile uint32_t& value) { static_cast<void>(value + 0); }

/// A view of CPU memory.
inline zr_view view_of(void* data, int64_t count, zr_dtype dtype) {
  return {data, count, dtype, 0, {ZR_DEVICE_CPU, 0}};
}

constexpr zr_key key(const char* name, uint32_t type, const char* def, double min, double max, uint32_t flags = 0) {
  return {sizeof(zr_key), type, flags, 0, name, def, min, max, nullptr, "a value"};
}

/// Fills an output struct, at most the `size` bytes that the caller has.
template <class T>
void write_output(T* out, T value) {
  value.size = out->size < sizeof value ? out->size : static_cast<uint32_t>(sizeof value);
  std::memcpy(out, &value, value.size);
}

/// A function of the type of F that throws.
template <class F>
struct Throws;
template <class R, class... Arguments>
struct Throws<R (*)(Arguments...)> {
  static R call(Arguments...) { throw std::runtime_error("thrown by the plug-in"); }
};

/// A component without keys.
constexpr zr_component component(const char* kind, const void* api, decltype(zr_component::create) create,
                                 decltype(zr_component::destroy) destroy,
                                 decltype(zr_component::extension) extension = nullptr) {
  zr_component all{};
  all.size = sizeof all;
  all.id = "mutant";
  all.kind = kind;
  all.version = "1.0.0";
  all.api = api;
  all.create = create;
  all.destroy = destroy;
  all.extension = extension;
  return all;
}

}  // namespace mutant

// The function for a table; for the defect throws_in_FUNCTION, one that throws.
#define MUTANT_SLOT(FUNCTION) (kDefect == throws_in_##FUNCTION ? mutant::Throws<decltype(&FUNCTION)>::call : &FUNCTION)

// Exports the component `kComponent` of ROLE as the only one of this library.
#define MUTANT_MODULE(ROLE, STARTUP, SHUTDOWN)                                                     \
  ZR_TAG(ZR_ABI_TAG);                                                                              \
  ZR_TAG(kind_##ROLE##_1);                                                                         \
  ZR_ID_TAG(ROLE, "mutant");                                                                       \
  namespace {                                                                                      \
  constexpr const zr_component* kComponents[] = {&kComponent};                                     \
  constexpr zr_module kModule{sizeof(zr_module), ZR_ABI_MINOR, ZR_TARGET_MINOR, "mutant", "tests", \
                              "1.0.0",           "",           kComponents,     1,        0,       \
                              STARTUP,           SHUTDOWN};                                        \
  }
