/* Strategy role, "zr.strategy/1": who owns which part, and when it travels. It issues its collectives itself. */
#ifndef ZR_ABI_STRATEGY_H
#define ZR_ABI_STRATEGY_H
#include "zr/abi/base.h"
#include "zr/abi/communicator.h"

enum { ZR_PARAM_FROZEN = 1u << 0 }; /* no gradient, no state */
typedef struct zr_param {           /* lives as long as the instance */
  uint32_t size, flags;
  const char *name;
  const int64_t *shape;
  int32_t ndim;
  uint32_t group;
  int64_t count; /* elements */
} zr_param;
/* HOLD_GRADS: gradients are added up in their places, and leave in the last micro-step. ALIAS: buffers may be ALIAS. */
enum { ZR_PLAN_HOLD_GRADS = 1u << 0, ZR_PLAN_SHARE_WEIGHTS = 1u << 1 };
typedef struct zr_plan_in { /* lives as long as the instance */
  uint32_t size;
  int32_t rank, world;
  zr_dtype weight_dtype;
  zr_dtype grad_dtype;         /* of one backward's gradient, also on the wire */
  zr_dtype reduced_grad_dtype; /* of the sum over micro-batches and ranks */
  int32_t accumulation;        /* micro-steps a step; 1 where gradients are held */
  uint32_t n_params;
  int64_t norm_block; /* parameters are never cut inside a run of this many elements, counted from their start */
  int64_t align;      /* every parameter starts at a multiple of this many elements in every buffer */
  const zr_param *const *params; /* the model's order */
  uint32_t flags, rsv;           /* ZR_PLAN_*; since 0.2 */
} zr_plan_in;
enum {
  ZR_ROLE_WEIGHT = 1,
  ZR_ROLE_GRAD,
  ZR_ROLE_REDUCED_GRAD,
  ZR_ROLE_BUCKET,
  ZR_ROLE_ALL_GATHER,
  ZR_ROLE_WEIGHT_SHARD
};
enum { ZR_BUFFER_SHARED = 1u << 0 }; /* whole weights: one memory, alike for all ranks, each writes what it updates */
typedef struct zr_buffer {           /* memory that the host shall allocate on this rank, zeroed, where peers read it */
  uint32_t size, role;
  const char *tag; /* for the ledger; copied */
  int64_t elements;
  zr_dtype dtype;
  uint32_t flags;
} zr_buffer;
/* Elements [first, first + count) of a parameter stand at `offset` of a buffer. WEIGHT: whole parameters. SHARD: parts
 * of those that acquire() makes whole, on all ranks. SUM: what this rank updates, in fold order. */
typedef struct zr_piece {
  uint32_t size, role, param, buffer;
  int64_t first, count, offset;
} zr_piece;
typedef struct zr_plan_sink { /* the host's; lives until plan() returns, and is called during it only */
  uint32_t size, rsv;
  void *ctx;                                    /* the host's own, for the two */
  void (*buffer)(void *ctx, const zr_buffer *); /* [control] copied; numbered 0, 1, ... in call order */
  void (*piece)(void *ctx, const zr_piece *);   /* [control] copied */
} zr_plan_sink;
typedef struct zr_bind {
  uint32_t size, n_buffers;
  const zr_view *buffers; /* in plan order; the views are copied, the memory lives as long as the instance */
  zr_comm_ref comm;       /* lives as long as the instance */
} zr_bind;

enum { ZR_STEP_BEGIN = 1, ZR_BACKWARD_END, ZR_STEP_END, ZR_EVAL_BEGIN, ZR_EVAL_END };
enum { ZR_FORWARD = 1, ZR_BACKWARD = 2, ZR_EVAL = 3, ZR_EXPORT_PHASE = 4 };
typedef struct zr_strategy_api {
  uint32_t size, rsv;
  /* [control] Pure, no communication, any rank of any world: buffers first, then pieces by parameter and ascending. */
  zr_code (*plan)(void *self, const zr_plan_in *, const zr_plan_sink *, zr_error *);
  /* [control] after the plan was allocated */
  zr_code (*bind)(void *self, const zr_plan_in *, const zr_bind *, zr_error *);
  /* [use] Which elements of a gradient go where next. *first: in, how many were placed in this micro-step; out, the
   * first of a run of dst->count not placed yet (as it was: they ascend). *dst: of grad_dtype, to be written, not added
   * to, before grad_ready. ZR_AGAIN: no room until buckets ahead have left; the host keeps the gradient. Where
   * gradients are held, all have room, and the answers are the same in every micro-step (micro is 0). */
  zr_code (*grad_destination)(void *self, uint32_t param, int64_t *first, uint32_t micro, zr_view *dst, zr_error *);
  /* [use] Those elements are written, zeros if the parameter was not used. Every element of every trainable parameter
   * is announced once a micro-step, in any order; collectives must leave in an order that does not depend on it. */
  zr_code (*grad_ready)(void *self, uint32_t param, int64_t first, int64_t count, uint32_t micro, zr_error *);
  zr_code (*event)(void *self, uint32_t kind, uint32_t micro, zr_error *); /* [use] ZR_STEP_BEGIN ... ZR_EVAL_END */
  zr_code (*grads_finish)(void *self, zr_error *); /* [step] on return every SUM piece holds its sum over the step */
  zr_code (*updated)(void *self, zr_error *);      /* [step] weights under SUM pieces changed: on return all are new */
  /* [use] Makes parameters whole that are not on this rank: full[n], memory that lives until their release; done NULL:
   * complete on return. NULL slot, as the next: weights always are whole. */
  zr_code (*acquire)(void *self, const uint32_t *params, uint32_t n, uint32_t phase, zr_view *full, zr_done *,
                     zr_error *);
  /* [use] Lets them go, once `after` resolves (retained by the callee); NULL: at once. */
  zr_code (*release)(void *self, const uint32_t *params, uint32_t n, uint32_t phase, zr_done *after, zr_error *);
  void (*abort)(void *self); /* [any] or NULL: the host has aborted the communicator */
} zr_strategy_api;
#endif
