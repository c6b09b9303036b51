/* Optional help for plug-ins in C11: the module and its tags, errors, output structs, element sizes, rounding to bf16
 * and fp16. It is compiled into each plug-in and is not part of the ABI. Plug-ins in C++ use zr/optimizer.hpp and the
 * headers of the other roles. */
#ifndef ZR_C_H
#define ZR_C_H
#include <stdarg.h>
#include <stdio.h>

#include "zr/abi/module.h"
#include "zr/multiply_add.h"

/* Defines what the library exports: the entry and the tags of its only component, the zr_component COMPONENT. ROLE:
 * strategy, communicator, optimizer or offload; ID: as in COMPONENT, a string literal. Once per library, at file scope.
 */
#define ZR_MODULE_C(ROLE, ID, VENDOR, VERSION, COMPONENT)                                                              \
  ZR_TAG(ZR_ABI_TAG);                                                                                                  \
  ZR_TAG(kind_##ROLE##_1);                                                                                             \
  ZR_ID_TAG(ROLE, ID);                                                                                                 \
  ZR_MULTIPLY_ADD_TAG;                                                                                                 \
  const zr_module* zr_module_v1(uint32_t host_minor) {                                                                 \
    static const zr_component* const components[] = {&(COMPONENT)};                                                    \
    static const zr_module module = {                                                                                  \
        sizeof module, ZR_ABI_MINOR, ZR_TARGET_MINOR, ID, VENDOR, VERSION, __VERSION__, components, 1, 0, NULL, NULL}; \
    (void)host_minor;                                                                                                  \
    return &module;                                                                                                    \
  }                                                                                                                    \
  ZR_STATIC_ASSERT(sizeof(ID) > 1, "a component has an id")

/* Writes a failure to *error and returns its code. native: errno, a library's own code, or 0. */
static inline zr_code zr_fail(zr_error* error, zr_code code, int64_t native, const char* format, ...)
    __attribute__((format(printf, 4, 5)));
static inline zr_code zr_fail(zr_error* error, zr_code code, int64_t native, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(error->msg, sizeof error->msg, format, arguments);
  va_end(arguments);
  error->code = code;
  error->native = native;
  return code;
}

/* Resolves the completion `done` with success, unless it is NULL, and returns ZR_OK: for functions that have done all
 * of their work when they return. */
static inline zr_code zr_complete(const zr_host* host, zr_done* done) {
  if (done) ((const zr_async_service*)host->service(host, "zr.host.async/1"))->done_resolve(done, ZR_OK, 0, NULL);
  return ZR_OK;
}

/* Copies the sized struct `value` to the output *out: at most the out->size bytes that the caller has. */
#define ZR_WRITE_OUTPUT(out, value)                                                     \
  do {                                                                                  \
    (value).size = (out)->size < sizeof(value) ? (out)->size : (uint32_t)sizeof(value); \
    __builtin_memcpy((out), &(value), (value).size);                                    \
  } while (0)

/* Bytes of one element; 0 for ZR_NONE and unknown dtypes. */
static inline int64_t zr_bytes_of(zr_dtype dtype) {
  static const int64_t bytes[] = {0, 4, 2, 2, 8, 1, 1, 4, 8};
  return dtype > ZR_NONE && dtype <= ZR_I64 ? bytes[dtype] : 0;
}
/* The smallest multiple of `multiple` that is at least n; n >= 0, multiple > 0. */
static inline int64_t zr_round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }
/* Elements [first, first + count) of a view. */
static inline zr_view zr_part(zr_view view, int64_t first, int64_t count) {
  view.data = (char*)view.data + first * zr_bytes_of(view.dtype);
  view.count = count;
  return view;
}

/* Rounds to nearest, ties to even; a NaN becomes 0x7fc0. As zr::to_bf16() of zr/float_cast.hpp. */
static inline uint16_t zr_to_bf16(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0u;
  return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
/* Rounds to nearest, ties to even; 65520 and more becomes infinity, a NaN 0x7e00 with its sign. As zr::to_f16(). */
static inline uint16_t zr_to_f16(float value) {
  uint32_t bits, small;
  __builtin_memcpy(&bits, &value, sizeof bits);
  const uint32_t sign = (bits >> 16) & 0x8000u, size = bits & 0x7fffffffu;
  if (size > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);
  if (size >= 0x47800000u) return (uint16_t)(sign | 0x7c00u);
  if (size >= 0x38800000u) return (uint16_t)(sign | (size - 0x38000000u + 0x0fffu + ((size >> 13) & 1u)) >> 13);
  /* Below 2^-14 the spacing of fp16 is 2^-24, which is the spacing of fp32 in [0.5, 1): the addition rounds. */
  __builtin_memcpy(&value, &size, sizeof value);
  value += 0.5f;
  __builtin_memcpy(&small, &value, sizeof small);
  return (uint16_t)(sign | (small - 0x3f000000u));
}
#endif
