/* What the host offers to a plug-in: services, found by string id. "zr.host.job/1" and "zr.host.store/1" exist only
 * in a job, not while a job is planned before it starts (`zeroth plan`). A table, and what it contains, is valid as
 * long as the instance that asked for it: ask again in every create(), and keep no table in a static variable. */
#ifndef ZR_ABI_HOST_H
#define ZR_ABI_HOST_H
#include "zr/abi/base.h"

enum { ZR_LOG_DEBUG = 0, ZR_LOG_INFO = 1, ZR_LOG_WARN = 2, ZR_LOG_ERROR = 3 };
typedef struct zr_host {
  uint32_t size, abi_minor;
  void *ctx; /* the host's own; plug-ins do not use it */

  /* [any] Returns the table of a service, or NULL if the host does not offer it. */
  const void *(*service)(const struct zr_host *, const char *id);

  /* [any] Writes a line to the log; msg is copied. */
  void (*log)(const struct zr_host *, int32_t level, const char *msg);
} zr_host;

/* "zr.host.config/1": the values of a component's TOML table. Each function reads keys of the types that its comment
 * names. A key that is not in the schema, or has another type, gives ZR_INVALID. */
typedef struct zr_config_service {
  uint32_t size, rsv;
  zr_code (*get_bool)(const zr_config *, const char *key, int32_t *out); /* [control] */
  zr_code (*get_int)(const zr_config *, const char *key, int64_t *out);  /* [control] integers, and sizes in bytes */
  zr_code (*get_float)(const zr_config *, const char *key,
                       double *out); /* [control] floats, and durations in seconds */

  /* [control] *out is valid as long as the config. */
  zr_code (*get_string)(const zr_config *, const char *key, const char **out);

  /* [control] *out has *n elements and is valid as long as the config. */
  zr_code (*get_floats)(const zr_config *, const char *key, const double **out, uint32_t *n);
} zr_config_service;

/* "zr.host.async/1": reference-counted completions. A completion is resolved exactly once. */
typedef struct zr_async_service {
  uint32_t size, rsv;

  /* [any] Returns a new completion with one reference, or NULL if there is no memory. */
  zr_done *(*done_new)(const zr_host *);

  /* [any] Adds a reference. */
  void (*done_retain)(zr_done *);

  /* [any] Drops a reference. Accepts NULL. */
  void (*done_release)(zr_done *);

  /* [any] Resolves the completion with success or an error. msg is copied; or NULL. */
  void (*done_resolve)(zr_done *, zr_code, int64_t native, const char *msg);

  /* [any] Returns ZR_AGAIN if the completion is not resolved yet, else the code that it was resolved with. Does not
   * advance a collective: the training thread does, in done_wait() or in progress() of zr_collectives_api. */
  zr_code (*done_poll)(zr_done *, zr_error *);

  /* [step] [use] Waits until the completion is resolved. timeout_ns < 0: the host's own limit. Not from a thread of the
   * plug-in: there, use done_poll(). ZR_TIMEOUT: the limit has passed. An error of a collective may fail the job. */
  zr_code (*done_wait)(zr_done *, int64_t timeout_ns, zr_error *);
} zr_async_service;

/* A request for memory. */
typedef struct zr_alloc {
  uint32_t size, flags; /* flags: 0 */
  uint64_t bytes;       /* of the memory */
  uint64_t align;       /* a power of two, or 0; the alignment is at least 64 */
  zr_device device;     /* where the memory is */
  const char *tag;      /* copied */
} zr_alloc;

/* "zr.host.memory/1": every long-lived byte is counted in the host's ledger. A tag names the memory there; it is
 * copied. A tag that begins with a kind of the ledger and a colon ("all_gather: overflow") counts as that kind. */
typedef struct zr_memory_service {
  uint32_t size, rsv;

  /* [io] Allocates zeroed memory; *out is a view of U8. ZR_UNSUPPORTED: the host has no memory on this device. */
  zr_code (*alloc)(const zr_host *, const zr_alloc *, zr_view *out, zr_error *);

  /* [io] Frees memory. The view is the one that alloc returned. */
  void (*free)(const zr_host *, const zr_view *);

  /* [any] Counts bytes that a plug-in had to map itself (negative: unmapped). */
  void (*account)(const zr_host *, const char *tag, int64_t delta_bytes);
} zr_memory_service;

/* "zr.host.tasks/1": the host's thread pool. */
typedef struct zr_task_service {
  uint32_t size, rsv;

  /* [any] Returns the number of threads of this rank. */
  uint32_t (*width)(const zr_host *);

  /* [step] [use] Cuts [0, n) into at most width() ranges of about equal length, calls fn(ctx, begin, end) once per
   * range, also on the calling thread, and returns when all calls have returned. Not for [worker] functions, nor inside
   * fn. `grain` is the smallest number of indices that is worth a thread: every range has at least `grain` indices,
   * unless n is smaller; then there is one range. A grain below 1 counts as 1. If n is 0, fn is not called. fn is
   * called [worker] and must not throw. ctx is passed to fn; or NULL. */
  void (*parallel_for)(const zr_host *, int64_t n, int64_t grain, void (*fn)(void *ctx, int64_t begin, int64_t end),
                       void *ctx);
} zr_task_service;

/* "zr.host.store/1": the job's key-value store, for rendezvous and small values. */
typedef struct zr_store_service {
  uint32_t size, rsv;

  /* [control] [step] Stores a value under a key. If the key has a value already, from any rank, the new value replaces
   * it. key and value are copied. A key has at most 4 KiB, a value at most 1 MiB. */
  zr_code (*put)(const zr_host *, const char *key, const void *value, uint64_t bytes, zr_error *);

  /* [control] [step] Waits until some rank has put the key, and copies the value to out. timeout_ns < 0: the host's
   * own limit. *bytes is the capacity of out on entry, and the length of the value on return. ZR_INVALID if the value
   * is longer than *bytes, or the key than 4 KiB. ZR_COMM if the limit passes or the job fails. The value stays. */
  zr_code (*get)(const zr_host *, const char *key, int64_t timeout_ns, void *out, uint64_t *bytes, zr_error *);
} zr_store_service;

/* "zr.host.job/1": constants of this process. */
typedef struct zr_job_service {
  uint32_t size;
  int32_t rank, world;             /* of the job */
  int32_t local_rank, local_world; /* on this node */
  uint32_t rsv;
  const char *job_id;     /* unique per launch */
  const char *run_folder; /* absolute; "" if the run has no run folder */
} zr_job_service;

/* "zr.host.machine/1": measurements of this node, made once for all jobs. */
typedef struct zr_machine_service {
  uint32_t size, rsv;

  /* [control] The transfer size, and the number of transfers in flight, with the highest measured throughput on the
   * file system of `path`. ZR_UNSUPPORTED: the file system was not measured. */
  zr_code (*disk)(const zr_host *, const char *path, uint64_t *block_bytes, uint32_t *depth);
} zr_machine_service;

/* For ZR_SIZE_0_9. */
enum {
  zr_host_size_0_9 = 32,           /* bytes */
  zr_config_service_size_0_9 = 48, /* bytes */
  zr_async_service_size_0_9 = 56,  /* bytes */
  zr_alloc_size_0_9 = 40,          /* bytes */
  zr_memory_service_size_0_9 = 32, /* bytes */
  zr_task_service_size_0_9 = 24,   /* bytes */
  zr_store_service_size_0_9 = 24,  /* bytes */
  zr_job_service_size_0_9 = 40,    /* bytes */
  zr_machine_service_size_0_9 = 16 /* bytes */
};
#endif
