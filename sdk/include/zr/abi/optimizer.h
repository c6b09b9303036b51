/* Optimizers, "zr.optimizer/1": the arithmetic of an update and nothing else. The host owns optimizer states, the
 * learning-rate schedule, gradient clipping, and the decision when to update. */
#ifndef ZR_ABI_OPTIMIZER_H
#define ZR_ABI_OPTIMIZER_H
#include "zr/abi/base.h"

/* Granularity: the smallest part of a parameter that can be updated on its own. */
enum { ZR_ELEMENTWISE = 1, ZR_ROWWISE = 2, ZR_TENSORWISE = 3 };

/* The shape of an optimizer state. */
enum {
  ZR_SLOT_LIKE_PARAM = 1, /* one element per element of the parameter */
  ZR_SLOT_PER_BLOCK = 2   /* one element per `block` consecutive elements of the parameter */
};
/* Flags of a state. This version of the host rejects optimizers with RANK_PRIVATE or UNSHARDED states. */
enum { ZR_SLOT_RANK_PRIVATE = 1u << 0, ZR_SLOT_TRANSIENT = 1u << 1, ZR_SLOT_UNSHARDED = 1u << 2 };
typedef struct zr_slot { /* frozen: describes one optimizer state; the host allocates it, zeroed */
  const char *name;
  zr_dtype dtype;
  uint32_t shape, flags, block;
} zr_slot;

enum {
  ZR_OPT_NEEDS_COMM = 1u << 0,       /* step() issues collectives */
  ZR_OPT_NEEDS_LOCAL_GRADS = 1u << 1 /* phase() may ask for gradients that are not reduced over ranks */
};
typedef struct zr_optimizer_desc {            /* output: the callee writes at most `size` bytes */
  uint32_t size, granularity, needs, n_slots; /* granularity: ZR_ELEMENTWISE ...; needs: ZR_OPT_* */
  const zr_slot *slots;                       /* n_slots long, static */
} zr_optimizer_desc;

/* Flags of a slice. */
enum {
  /* `weight` is a copy that the host reads right after the call, so it should stay in the cache. */
  ZR_SLICE_WEIGHT_COPY = 1u << 0
};

/* A range of consecutive elements of one parameter that this rank updates. The views are valid during the call and do
 * not overlap. */
typedef struct zr_update_slice {
  uint32_t size, group;
  const char *name;
  const int64_t *shape; /* logical shape of the parameter, `ndim` long */
  int32_t ndim;
  uint32_t param;       /* index in the model's order */
  int64_t first, count; /* the range, as indices into the flattened parameter */

  /* The range that `grad` contains: the same range, or the full parameter with local gradients. */
  int64_t grad_first, grad_count;
  int64_t step; /* step count of this parameter: 1 at its first update */
  double lr;    /* from the schedule, with the scale of the group applied */

  /* fp32 weights are their own master weights: in/out. Otherwise output only, undefined on entry: the master weight
   * rounded once, to nearest even. */
  zr_view weight;
  zr_view master;       /* in/out, fp32; count is 0 if weight is its own master */
  zr_view grad;         /* in, fp32: the sum over micro-batches and ranks; multiply it by zr_step.grad_mul */
  const zr_view *slots; /* in/out: the optimizer states, as many as describe() reported */
  uint32_t flags, rsv;  /* ZR_SLICE_* */
} zr_update_slice;

typedef struct zr_step {
  uint32_t size;
  float grad_mul;   /* loss unscaling, mean and clipping in one factor */
  int64_t step;     /* step count of the job: 1 at the first update */
  double grad_norm; /* global norm of the mean gradient, unscaled, before clipping */
} zr_step;

enum { ZR_GRADS_REDUCED = 0, ZR_GRADS_LOCAL = 1 };

/* [step] A function of the host, called during save_globals() only. It copies key and value; value is NULL only if
 * bytes is 0. */
typedef void (*zr_global_sink)(void *ctx, const char *key, const void *value, uint64_t bytes);

typedef struct zr_optimizer_api {
  uint32_t size, rsv;

  /* [control] Describes granularity, needs and optimizer states. */
  zr_code (*describe)(void *self, zr_optimizer_desc *, zr_error *);

  /* [control] Adds a parameter group. Group 0 has the config of create(); the host adds 1, 2, ... in order, each with
   * its own table of the same keys. */
  zr_code (*add_group)(void *self, uint32_t group, const zr_config *, zr_error *);

  /* [step] Reports which gradients the coming step needs (ZR_GRADS_*). Or NULL: always reduced gradients. */
  zr_code (*phase)(void *self, int64_t step, uint32_t *grads, zr_error *);

  /* [worker] Updates n slices. Must not allocate, block or communicate unless ZR_OPT_NEEDS_COMM, which makes it [step].
   * For an elementwise optimizer the result must not depend on how a parameter is cut into slices. It must never depend
   * on the vector width. zr_stream and zr_done: or NULL. */
  zr_code (*step)(void *self, const zr_step *, const zr_update_slice *const *slices, uint32_t n, zr_stream *, zr_done *,
                  zr_error *);

  /* [step] Passes state that is not per parameter to the sink, for checkpoints. ctx is passed to the sink.
   * save_globals and load_global are NULL if there is no such state. */
  zr_code (*save_globals)(void *self, zr_global_sink, void *ctx, zr_error *);

  /* [step] Restores one saved value, before the first step; the value is copied. ZR_INVALID if the key is unknown. */
  zr_code (*load_global)(void *self, const char *key, const void *value, uint64_t bytes, zr_error *);
} zr_optimizer_api;
#endif
