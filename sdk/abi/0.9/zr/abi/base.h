/* Zeroth plug-in ABI 0.9: types and conventions that every other header uses. Valid C11 and C++17, for 64-bit machines
 * (LP64). All structs have natural alignment and no hidden padding.
 *
 * Thread tags. The comment of every function in every table has one or more of these tags:
 *
 *   [control] load, create, plan: one call at a time in the process.
 *   [step]    the training thread of this instance, one call at a time.
 *   [use]     any thread, one call at a time for this instance (the host serialises), and not during a [step] call of
 *             this instance; collectives are allowed.
 *   [worker]  host pool threads, several at once, on disjoint data; no collectives.
 *   [io]      any thread, any time; may wait for a disk or for memory, but not for a peer.
 *   [any]     any thread, any time; must not block.
 *
 * The tag of a function that the host offers (zr/abi/host.h) names the plug-in functions that may call it: a function
 * tagged [step] may be called from [step] functions only; [io] and [any], from all functions and from own threads.
 *
 * Lifetime. Arguments are valid until the call returns, unless the function's comment says otherwise.
 *
 * Null. Pointers are never null, unless the comment says "or NULL". The same holds for the functions of a table.
 *
 * Errors. A function that fails fills *error, leaves its outputs unchanged, and returns the code. A code that the
 * receiver does not know counts as ZR_INTERNAL.
 *
 * Streams. A function that takes a zr_stream and a zr_done follows one rule.
 *   stream NULL: all memory is host memory. Inputs are complete when the call begins. With done NULL, the work is
 *     complete when the call returns.
 *   stream not NULL: inputs are complete in the order of the stream, and so are outputs. With done NULL, the call
 *     returns once the work is enqueued; it does not wait for the device.
 *   done not NULL: the function may return early. If it returns ZR_OK, the plug-in resolves the completion exactly
 *     once, when the work is complete (on the stream: when the stream has reached it). If it returns an error, it has
 *     not resolved the completion and never does. The memory of the views stays valid until the completion is resolved;
 *     counts, labels and lists are valid only until the call returns.
 * A plug-in gets a stream only if its capabilities or its description say that it accepts streams.
 *
 * Terms. The host is the program that loads a plug-in: Zeroth's engine, or zeroth itself. Host memory is memory that
 * the CPU addresses. A node is a computer that runs one or more ranks.
 *
 * Versions. Sized structs (their first member is `size`) get new members at the end in later versions; they are always
 * passed by pointer, and the side that fills a struct sets `size` to the sizeof of its own header. The receiver accepts
 * every size from the one in 0.9 on: it copies the struct with ZR_TAKE, or reads newer members through ZR_HAS and
 * ZR_FITS. A member that is not there counts as 0. Frozen structs never change.
 *
 * Minor numbers never restart: the minor number of 1.0 is greater than that of the last 0.x version.
 *
 * Unknown bits. What a plug-in passes to the host must be understood: the host rejects, by name, bits of `flags` and
 * `needs`, values of enumerations, and non-zero `rsv` members that it does not know. What the host passes to a plug-in
 * may be ignored: a plug-in ignores unknown bits, events and phases. The `flags` and bit sets of structs named
 * zr_*_caps and zr_*_desc are hints: the host ignores bits of them that it does not know. Values of draft headers need
 * the tag of these headers.
 *
 * Process. Threads of a plug-in block all signals. A plug-in installs no signal handler, opens file descriptors with
 * O_CLOEXEC, and does not fork, except to call exec at once. It has no static object with a destructor, and no thread
 * after its last destroy(). Loading it and its calls leave the floating-point environment of threads of the host as it
 * is: rounding, traps, denormal numbers (gcc and clang change them in what they link with -ffast-math). A library is
 * loaded with RTLD_NOW and RTLD_LOCAL and is never unloaded. */
#ifndef ZR_ABI_BASE_H
#define ZR_ABI_BASE_H
#include <stddef.h>
#include <stdint.h>

#define ZR_ABI_MAJOR 0u
#define ZR_ABI_MINOR 9u

/* The version of the host that a plug-in needs: 0.ZR_TARGET_MINOR. Define it before the first include to build for an
 * older host; members and functions that are newer are then not declared. */
#ifndef ZR_TARGET_MINOR
#define ZR_TARGET_MINOR 9
#endif

#ifdef __cplusplus
/* A static assertion in C and C++. */
#define ZR_STATIC_ASSERT(condition, text) static_assert(condition, text)
#else
/* A static assertion in C and C++. */
#define ZR_STATIC_ASSERT(condition, text) _Static_assert(condition, text)
#endif
/* Other machines are not supported. */
ZR_STATIC_ASSERT(sizeof(void *) == 8 && sizeof(long) == 8, "plug-ins are built for 64-bit machines (LP64)");
/* Other values are not supported. */
ZR_STATIC_ASSERT(ZR_TARGET_MINOR >= 9 && ZR_TARGET_MINOR <= ZR_ABI_MINOR,
                 "ZR_TARGET_MINOR is from 9 to the minor version of these headers");

#define ZR_EXPORT __attribute__((visibility("default")))

/* True if the other side's struct is long enough to contain `field`. */
#define ZR_FITS(p, type, field) ((p)->size >= offsetof(type, field) + sizeof((p)->field))
/* True if the field is present and not null: for functions and other pointers. */
#define ZR_HAS(p, type, field) (ZR_FITS(p, type, field) && (p)->field)
/* The bytes that a sized struct had in version 0.9: the smallest size that any side may pass. */
#define ZR_SIZE_0_9(type) (type##_size_0_9)

/* Copies the sized struct *src, which the other side filled, to *dst: the members that both sides have; the others
 * become 0. dst->size becomes the number of bytes copied. Use ZR_TAKE. */
static inline void zr_take(void *dst, uint32_t dst_size, const void *src) {
  uint32_t size;
  __builtin_memcpy(&size, src, sizeof size);
  if (size > dst_size) size = dst_size;
  __builtin_memset(dst, 0, dst_size);
  __builtin_memcpy(dst, src, size);
  __builtin_memcpy(dst, &size, sizeof size);
}
/* zr_take() for a variable. */
#define ZR_TAKE(dst, src) zr_take((dst), sizeof *(dst), (src))

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

typedef struct zr_error { /* frozen: 512 bytes, owned by the caller */
  zr_code code;
  uint32_t rsv;
  int64_t native; /* errno, a library's own code, or what the function defines; 0: none */
  char msg[496];  /* zero-terminated UTF-8 */
} zr_error;

/* Element types. */
typedef int32_t zr_dtype;
enum { ZR_NONE = 0, ZR_F32 = 1, ZR_BF16 = 2, ZR_F16 = 3, ZR_F64 = 4, ZR_I8 = 5, ZR_U8 = 6, ZR_I32 = 7, ZR_I64 = 8 };

/* DLPack's device types. A set of device types has bit i for type i. */
enum {
  ZR_DEVICE_CPU = 1, /* memory that the CPU addresses */
  ZR_DEVICE_CUDA = 2 /* memory of a CUDA device */
};
typedef struct zr_device { /* frozen */
  int32_t type, id;        /* type: ZR_DEVICE_CPU, ... */
} zr_device;

/* Contiguous elements in memory that the view does not own. */
typedef struct zr_view { /* frozen */
  void *data;            /* may be null only if count is 0 */
  int64_t count;         /* elements */
  zr_dtype dtype;
  uint32_t flags; /* reserved: 0 */
  zr_device device;
} zr_view;

/* A device stream; see "Streams" above. */
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

/* A parameter of the model. The struct is sized. */
enum { ZR_PARAM_FROZEN = 1u << 0 }; /* the parameter has no gradient and no optimizer state */
typedef struct zr_param {
  uint32_t size, flags; /* flags: ZR_PARAM_* */
  const char *name;
  const int64_t *shape; /* ndim long */
  int32_t ndim;
  uint32_t group; /* parameter group of the optimizer */
  int64_t count;  /* elements */

  /* The optimizer updates complete blocks of this many elements, counted from the start of the parameter: strategies
   * cut it only at multiples of cut_block, which is a multiple of zr_plan_in.norm_block, or at least `count`. 0 before
   * the optimizer has described the parameter. */
  int64_t cut_block;

  /* The cost of an update, for strategies that balance ranks; in units that are the same for all parameters. 0 for
   * frozen parameters, and before the optimizer has described the parameter. */
  double update_cost;
} zr_param;

/* For ZR_SIZE_0_9. */
enum {
  zr_key_size_0_9 = 64,  /* bytes */
  zr_param_size_0_9 = 56 /* bytes */
};
#endif
