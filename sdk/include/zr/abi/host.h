/* What the host offers a plug-in: services by string id. Tables live as long as the process. */
#ifndef ZR_ABI_HOST_H
#define ZR_ABI_HOST_H
#include "zr/abi/base.h"

enum { ZR_LOG_DEBUG = 0, ZR_LOG_INFO = 1, ZR_LOG_WARN = 2, ZR_LOG_ERROR = 3 };
typedef struct zr_host {
  uint32_t size, abi_minor;
  void *ctx;                                                           /* the host's own */
  const void *(*service)(const struct zr_host *, const char *id);      /* [any] NULL: not offered */
  void (*log)(const struct zr_host *, int32_t level, const char *msg); /* [any] msg is copied */
} zr_host;

typedef struct zr_config_service { /* "zr.host.config/1": keys are as the schema says; another key: ZR_INVALID */
  uint32_t size, rsv;
  zr_code (*get_bool)(const zr_config *, const char *key, int32_t *out);       /* [control] */
  zr_code (*get_int)(const zr_config *, const char *key, int64_t *out);        /* [control] also bytes */
  zr_code (*get_float)(const zr_config *, const char *key, double *out);       /* [control] also durations, seconds */
  zr_code (*get_string)(const zr_config *, const char *key, const char **out); /* [control] *out lives as the config */
  zr_code (*get_floats)(const zr_config *, const char *key, const double **out, uint32_t *n); /* [control] likewise */
} zr_config_service;

typedef struct zr_async_service { /* "zr.host.async/1": reference-counted completions, resolved exactly once */
  uint32_t size, rsv;
  zr_done *(*done_new)(const zr_host *);                                     /* [any] one reference; NULL: no memory */
  void (*done_retain)(zr_done *);                                            /* [any] */
  void (*done_release)(zr_done *);                                           /* [any] accepts NULL */
  void (*done_resolve)(zr_done *, zr_code, int64_t native, const char *msg); /* [any] msg copied, or NULL */
  zr_code (*done_poll)(zr_done *, zr_error *);                               /* [any] ZR_AGAIN: not yet */
  zr_code (*done_wait)(zr_done *, int64_t timeout_ns, zr_error *);           /* [use] < 0: the host's own limit */
} zr_async_service;

typedef struct zr_memory_service { /* "zr.host.memory/1": every long-lived byte stands in the host's ledger */
  uint32_t size, rsv;
  /* [any] U8, zeroed */
  zr_code (*alloc)(const zr_host *, uint64_t bytes, uint64_t align, const char *tag, zr_view *out, zr_error *);
  void (*free)(const zr_host *, const zr_view *);                         /* [any] as returned by alloc */
  void (*account)(const zr_host *, const char *tag, int64_t delta_bytes); /* [any] bytes a plug-in had to map itself */
} zr_memory_service;

typedef struct zr_task_service { /* "zr.host.tasks/1" */
  uint32_t size, rsv;
  uint32_t (*width)(const zr_host *); /* [any] threads of this rank */
  /* [step] [use] fn over [0, n) cut in runs of at least grain; returns when all ran. fn [worker] must not throw; ctx
   * is handed to it and may be NULL. */
  void (*parallel_for)(const zr_host *, int64_t n, int64_t grain, void (*fn)(void *ctx, int64_t begin, int64_t end),
                       void *ctx);
} zr_task_service;

typedef struct zr_store_service { /* "zr.host.store/1": the job's rendezvous, small values */
  uint32_t size, rsv;
  /* [control] [step] */
  zr_code (*put)(const zr_host *, const char *key, const void *value, uint64_t bytes, zr_error *);
  /* [control] [step] Waits until some rank has put the key; timeout_ns < 0: the host's own limit. *bytes: in, the room
   * at out; out, the value's length. */
  zr_code (*get)(const zr_host *, const char *key, int64_t timeout_ns, void *out, uint64_t *bytes, zr_error *);
} zr_store_service;

typedef struct zr_job_service { /* "zr.host.job/1": constants of this process */
  uint32_t size;
  int32_t rank, world, local_rank, local_world; /* local: of this host */
  uint32_t rsv;
  const char *job_id;     /* unique per launch */
  const char *run_folder; /* absolute; "" if the run keeps none */
} zr_job_service;

typedef struct zr_machine_service { /* "zr.host.machine/1": what was measured on this machine, once for all jobs */
  uint32_t size, rsv;
  /* [control] Transfers with which the file system of `path` moved most; ZR_UNSUPPORTED: nobody has measured it. */
  zr_code (*disk)(const zr_host *, const char *path, uint64_t *block_bytes, uint32_t *depth);
} zr_machine_service;
#endif
