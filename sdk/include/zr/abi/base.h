/* Zeroth plug-in ABI 0.3: types and conventions that every other header uses. Valid C11 and C++17. All structs have
 * natural alignment and no hidden padding.
 *
 * Thread tags. The comment of every function in every table has one or more of these tags:
 *
 *   [control] load, create, plan: one call at a time in the process.
 *   [step]    the training thread of this instance, one call at a time.
 *   [use]     any thread, one call at a time for this instance (the host serialises); collectives are allowed.
 *   [worker]  host pool threads, several at once, on disjoint data; no collectives.
 *   [any]     any thread, any time; must not block.
 *
 * The tag of a function that the host offers (zr/abi/host.h) says from which plug-in functions it may be called.
 *
 * Lifetime. Arguments are valid until the call returns, unless the function's comment says otherwise.
 *
 * Null. Pointers are never null, unless the comment says "or NULL". The same holds for the functions of a table.
 *
 * Errors. A function that fails fills *error, leaves its outputs unchanged, and returns the code.
 *
 * Terms. The host is the program that loads a plug-in: Zeroth's engine, or zeroth itself. Host memory is memory that
 * the CPU addresses. A node is a computer that runs one or more ranks.
 *
 * Reserved members. The side that fills a struct sets members named `rsv` to 0; the side that reads it ignores
 * them. The same holds for bits of `flags` that this version does not define. A later version may give them a meaning.
 *
 * Versions. Sized structs (their first member is `size`) may get new members at the end in a later version; they are
 * always passed by pointer, and the receiver uses at most `size` bytes. Frozen structs never change. */
#ifndef ZR_ABI_BASE_H
#define ZR_ABI_BASE_H
#include <stddef.h>
#include <stdint.h>

#define ZR_ABI_MAJOR 0u
#define ZR_ABI_MINOR 3u
#define ZR_EXPORT __attribute__((visibility("default")))

/* True if the other side's table is long enough to contain `field`, and the field is not null. */
#define ZR_HAS(p, type, field) ((p)->size >= offsetof(type, field) + sizeof((p)->field) && (p)->field)

typedef int32_t zr_code;
enum {
  ZR_OK = 0,
  ZR_INVALID = 1,     /* an argument, or the value of a key that the user set, is invalid */
  ZR_UNSUPPORTED = 2, /* the request is valid, but this implementation does not offer it */
  ZR_NOMEM = 3,
  ZR_IO = 4,
  ZR_COMM = 5, /* a peer has ended or cannot be reached */
  ZR_TIMEOUT = 6,
  ZR_CANCELLED = 7, /* abort() was called */
  ZR_MISMATCH = 8,  /* ranks disagree about the operation */
  ZR_STATE = 9,     /* the function was called out of order */
  ZR_INTERNAL = 10,
  ZR_AGAIN = 11 /* not possible now; the caller tries again later */
};

typedef struct zr_error { /* owned by the caller */
  uint32_t size;
  zr_code code;
  int64_t native; /* errno, a library's own code, or what the function defines; 0: none */
  char msg[496];  /* zero-terminated UTF-8 */
} zr_error;

/* Element types. */
typedef int32_t zr_dtype;
enum { ZR_NONE = 0, ZR_F32 = 1, ZR_BF16 = 2, ZR_F16 = 3, ZR_F64 = 4, ZR_I8 = 5, ZR_U8 = 6, ZR_I32 = 7, ZR_I64 = 8 };

typedef struct zr_device { /* frozen */
  int32_t type, id;        /* type: DLPack's device codes: 1 = CPU, 2 = CUDA */
} zr_device;

/* Contiguous elements in memory that the view does not own. */
typedef struct zr_view { /* frozen */
  void *data;            /* may be null only if count is 0 */
  int64_t count;         /* elements */
  zr_dtype dtype;
  uint32_t flags; /* reserved: 0 */
  zr_device device;
} zr_view;

/* A device stream. NULL means the CPU, where the work is complete when the call returns. */
typedef struct zr_stream_s zr_stream;
/* A completion; see zr_async_service in zr/abi/host.h. */
typedef struct zr_done_s zr_done;
/* One TOML table of typed, validated values; see zr_config_service in zr/abi/host.h. */
typedef struct zr_config_s zr_config;

/* A key of a component's TOML table. The host validates type, range and choices before it calls create(). The struct
 * is sized and static. */
enum { ZR_KEY_BOOL = 1, ZR_KEY_INT, ZR_KEY_FLOAT, ZR_KEY_STRING, ZR_KEY_BYTES, ZR_KEY_DURATION, ZR_KEY_FLOATS };
enum { ZR_KEY_PER_GROUP = 1u << 0 }; /* optimizers: a parameter group may override the key */
typedef struct zr_key {
  uint32_t size, type, flags, rsv; /* type: ZR_KEY_BOOL ... ZR_KEY_FLOATS; flags: ZR_KEY_PER_GROUP */
  const char *name;
  const char *def;     /* default as TOML text ("0.9", "\"32MiB\"", "[0.9, 0.999]"); NULL: the user must set the key */
  double min, max;     /* inclusive; sizes in bytes, durations in seconds; -INFINITY and INFINITY: no bound */
  const char *choices; /* "a|b|c" for strings, or NULL */
  const char *meaning; /* one line, no full stop */
} zr_key;
#endif
