/* Optimizer role, "zr.optimizer/1": the arithmetic of an update, nothing else. Slots, cadence, clipping: the host. */
#ifndef ZR_ABI_OPTIMIZER_H
#define ZR_ABI_OPTIMIZER_H
#include "zr/abi/base.h"

/* The smallest part of a parameter that may be updated alone. */
enum { ZR_ELEMENTWISE = 1, ZR_ROWWISE = 2, ZR_TENSORWISE = 3 };
enum { ZR_SLOT_LIKE_PARAM = 1, ZR_SLOT_PER_BLOCK = 2 }; /* per block: `block` consecutive elements share one */
enum { ZR_SLOT_RANK_PRIVATE = 1u << 0, ZR_SLOT_TRANSIENT = 1u << 1, ZR_SLOT_UNSHARDED = 1u << 2 };
typedef struct zr_slot { /* frozen: one optimizer state; the host allocates it, zeroed */
  const char *name;
  zr_dtype dtype;
  uint32_t shape, flags, block;
} zr_slot;

enum { ZR_OPT_NEEDS_COMM = 1u << 0, ZR_OPT_NEEDS_LOCAL_GRADS = 1u << 1 };
typedef struct zr_optimizer_desc { /* out: callee writes at most `size` bytes */
  uint32_t size, granularity, needs, n_slots;
  const zr_slot *slots; /* static */
} zr_optimizer_desc;

enum {
  ZR_SLICE_WEIGHT_COPY = 1u << 0
}; /* `weight` is a copy that the host takes on at once: better left in the cache */
/* a run of one parameter that this rank updates; views lent for the call, disjoint */
typedef struct zr_update_slice {
  uint32_t size, group;
  const char *name;
  const int64_t *shape; /* logical, `ndim` long */
  int32_t ndim;
  uint32_t param;                 /* index in the model's order */
  int64_t first, count;           /* the run, in the parameter's flat index */
  int64_t grad_first, grad_count; /* the run `grad` holds: the same, or the whole parameter with local gradients */
  int64_t step;                   /* of this parameter: 1 at its first update */
  double lr;                      /* scheduled, group's scale applied */
  zr_view weight;                 /* in/out: fp32 is its own master; else out alone, undefined before: the master
                                   * rounded to nearest even, once */
  zr_view master;                 /* in/out fp32; count 0 where weight is its own master */
  zr_view grad;                   /* in: the fp32 sum over micro-batches and ranks; multiply by zr_step.grad_mul */
  const zr_view *slots;           /* in/out, as many as described */
  uint32_t flags, rsv;            /* ZR_SLICE_* */
} zr_update_slice;

typedef struct zr_step {
  uint32_t size;
  float grad_mul; /* unscale, mean and clip in one factor */
  int64_t step;   /* of the job: 1 at the first update */
  double grad_norm;
} zr_step;

enum { ZR_GRADS_REDUCED = 0, ZR_GRADS_LOCAL = 1 };
/* [step] The host's, called during save_globals only; copies key and value (NULL only where bytes is 0). */
typedef void (*zr_global_sink)(void *ctx, const char *key, const void *value, uint64_t bytes);
typedef struct zr_optimizer_api {
  uint32_t size, rsv;
  zr_code (*describe)(void *self, zr_optimizer_desc *, zr_error *); /* [control] */
  /* [control] Group 0 is create()'s config; the host adds 1, 2, ... with its own table of the same keys. */
  zr_code (*add_group)(void *self, uint32_t group, const zr_config *, zr_error *);
  /* [step] Which gradients the coming step wants (ZR_GRADS_*); NULL slot: always reduced. */
  zr_code (*phase)(void *self, int64_t step, uint32_t *grads, zr_error *);
  /* [worker] Updates n slices; must not allocate, block or communicate unless NEEDS_COMM, which makes it [step]. The
   * result must not depend on how a parameter was cut into slices (elementwise), nor on vector width. */
  zr_code (*step)(void *self, const zr_step *, const zr_update_slice *const *slices, uint32_t n, zr_stream *, zr_done *,
                  zr_error *);
  /* [step] State that is not per parameter, for checkpoints; ctx goes to the sink. NULL slot, as the next: none. */
  zr_code (*save_globals)(void *self, zr_global_sink, void *ctx, zr_error *);
  /* [step] One value as it was saved, before the first step; copied. Another key: ZR_INVALID. */
  zr_code (*load_global)(void *self, const char *key, const void *value, uint64_t bytes, zr_error *);
} zr_optimizer_api;
#endif
