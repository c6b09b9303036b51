/* Zeroth plug-in ABI 0.2: the words every other header uses. C11, C++17. Layout: natural alignment, no hidden padding.
 *
 * Thread tags, written at every slot of every table:
 *   [control] load, create, plan: one call at a time in the process.
 *   [step]    the training thread of this instance, one call at a time.
 *   [use]     any thread, one call at a time for this instance (the host serialises); collectives are allowed.
 *   [worker]  host pool threads, several at once, on disjoint data; no collectives.
 *   [any]     any thread, any time; must not block.
 * Lifetime: unless a slot says otherwise, arguments live until the call returns. Null: unless a slot says "or NULL",
 * pointers are never null. Errors: a slot that fails fills *error, leaves its outputs untouched, returns the code.
 * Sized structs (first field `size`) may grow at the end and travel by pointer; frozen structs never change. */
#ifndef ZR_ABI_BASE_H
#define ZR_ABI_BASE_H
#include <stddef.h>
#include <stdint.h>

#define ZR_ABI_MAJOR 0u
#define ZR_ABI_MINOR 3u
#define ZR_EXPORT __attribute__((visibility("default")))
/* The peer's table is long enough for `field`, and the field is not null. */
#define ZR_HAS(p, type, field) ((p)->size >= offsetof(type, field) + sizeof((p)->field) && (p)->field)

typedef int32_t zr_code;
enum {
  ZR_OK = 0,
  ZR_INVALID = 1,     /* an argument or a key the user set */
  ZR_UNSUPPORTED = 2, /* valid, but not offered here */
  ZR_NOMEM = 3,
  ZR_IO = 4,
  ZR_COMM = 5, /* a peer is gone */
  ZR_TIMEOUT = 6,
  ZR_CANCELLED = 7, /* abort() was called */
  ZR_MISMATCH = 8,  /* ranks disagree about the operation */
  ZR_STATE = 9,     /* called out of order */
  ZR_INTERNAL = 10,
  ZR_AGAIN = 11 /* not now: the caller tries again later */
};

typedef struct zr_error { /* caller-owned */
  uint32_t size;
  zr_code code;
  int64_t native; /* errno or a library's own code, 0 if none */
  char msg[496];  /* zero-terminated UTF-8 */
} zr_error;

typedef int32_t zr_dtype;
enum { ZR_NONE = 0, ZR_F32 = 1, ZR_BF16 = 2, ZR_F16 = 3, ZR_F64 = 4, ZR_I8 = 5, ZR_U8 = 6, ZR_I32 = 7, ZR_I64 = 8 };

typedef struct zr_device { /* frozen; DLPack's device codes: 1 = CPU, 2 = CUDA */
  int32_t type, id;
} zr_device;

typedef struct zr_view { /* frozen: `count` contiguous elements; data may be null only where count is 0 */
  void *data;
  int64_t count;
  zr_dtype dtype;
  uint32_t flags; /* 0 */
  zr_device device;
} zr_view;

typedef struct zr_stream_s zr_stream; /* NULL: the CPU, where work is done when the call returns */
typedef struct zr_done_s zr_done;     /* a completion, zr/abi/host.h */
typedef struct zr_config_s zr_config; /* one table of typed, checked values, zr/abi/host.h */

/* A key of a component's TOML table. The host checks type, range and choice before create(). Sized, static. */
enum { ZR_KEY_BOOL = 1, ZR_KEY_INT, ZR_KEY_FLOAT, ZR_KEY_STRING, ZR_KEY_BYTES, ZR_KEY_DURATION, ZR_KEY_FLOATS };
enum { ZR_KEY_PER_GROUP = 1u << 0 }; /* optimizers: a parameter group may override it */
typedef struct zr_key {
  uint32_t size, type, flags, rsv;
  const char *name;
  const char *def;     /* default as TOML text ("0.9", "\"32MiB\"", "[0.9, 0.999]"); NULL: the key must be given */
  double min, max;     /* inclusive; bytes in bytes, durations in seconds; -INFINITY and INFINITY: no bound */
  const char *choices; /* "a|b|c" for strings, or NULL */
  const char *meaning; /* one line, no full stop */
} zr_key;
#endif
