/* Optimizers, "zr.optimizer/1": the arithmetic of an update and nothing else. The host owns optimizer states, the
 * learning-rate schedule, gradient clipping, and the decision when to update. */
#ifndef ZR_ABI_OPTIMIZER_H
#define ZR_ABI_OPTIMIZER_H
#include "zr/abi/base.h"

/* Granularity: the smallest part of a parameter that can be updated on its own. zr/abi/draft/optimizer_shapes.h has
 * more values. */
enum { ZR_ELEMENTWISE = 1 };

/* The shape of an optimizer state. */
enum {
  ZR_SLOT_LIKE_PARAM = 1 /* one element per element of the parameter */
};
typedef struct zr_slot { /* frozen: describes one optimizer state; the host allocates it, zeroed */
  const char *name;
  zr_dtype dtype;
  uint32_t shape, flags, block; /* shape: ZR_SLOT_LIKE_PARAM; flags and block: 0. More in draft/optimizer_shapes.h */
} zr_slot;

enum {
  ZR_OPT_STREAMS = 1u << 0, /* step() accepts streams */
  /* step() does not read zr_step.grad_norm. The host may then call it before all gradients are known. If the step is
   * clipped or skipped, it restores weights and states, and calls step() again with another grad_mul, or not at all. */
  ZR_OPT_IGNORES_NORM = 1u << 1
};
typedef struct zr_optimizer_desc {            /* output: the callee writes at most `size` bytes */
  uint32_t size, granularity, needs, n_slots; /* granularity: ZR_ELEMENTWISE ...; needs: 0 */
  const zr_slot *slots;                       /* n_slots long, valid as long as the instance */
  uint64_t device_types; /* bit i: step() accepts memory of DLPack device type i; bit 1 (CPU) is required in this
                          * version */
  uint32_t flags, rsv;   /* flags: ZR_OPT_* */

  /* The cost of an update of this parameter, in units of the optimizer that are the same for all its parameters; 0: the
   * number of elements. Strategies balance ranks by it. */
  double cost;
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

  /* The range that `grad` contains. */
  int64_t grad_first, grad_count;
  int64_t step; /* step count of this parameter: 1 at its first update */
  double lr;    /* from the schedule, with the scale of the group applied */

  /* fp32, bf16 or fp16: every optimizer supports all three. fp32 weights are their own master weights: in/out.
   * Otherwise output only, undefined on entry: the master weight rounded once, to nearest even. */
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

typedef struct zr_optimizer_api {
  uint32_t size, rsv;

  /* [control] Adds a parameter group. Group 0 has the config of create(); the host adds 1, 2, ... in order, each with
   * its own table of the same keys. The config is valid until the call returns. */
  zr_code (*add_group)(void *self, uint32_t group, const zr_config *, zr_error *);

  /* [control] Describes the update of one parameter: granularity, needs and optimizer states. Called for every
   * parameter, in any order and any number of times, after all groups have been added; the result does not change.
   * States of the same name have the same meaning for all parameters. */
  zr_code (*describe)(void *self, const zr_param *, zr_optimizer_desc *, zr_error *);

  /* [worker] Updates n slices; see "Streams" in zr/abi/base.h: every optimizer accepts a completion. Must not allocate,
   * block or communicate. For an elementwise optimizer the result must not depend on how a parameter is cut into
   * slices. It must never depend on the vector width. */
  zr_code (*step)(void *self, const zr_step *, const zr_update_slice *const *slices, uint32_t n, zr_stream *, zr_done *,
                  zr_error *);
} zr_optimizer_api;

/* For ZR_SIZE_0_9. */
enum {
  zr_optimizer_desc_size_0_9 = 48, /* bytes */
  zr_update_slice_size_0_9 = 192,  /* bytes */
  zr_step_size_0_9 = 24,           /* bytes */
  zr_optimizer_api_size_0_9 = 32   /* bytes */
};
#endif
