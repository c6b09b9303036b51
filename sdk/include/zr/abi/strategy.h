/* Strategies, "zr.strategy/1": which rank owns which part of the model's state, and when it is communicated. A strategy
 * issues its collectives itself. */
#ifndef ZR_ABI_STRATEGY_H
#define ZR_ABI_STRATEGY_H
#include "zr/abi/base.h"
#include "zr/abi/communicator.h"

enum {
  /* The host accumulates gradients at their destinations; they are reduced in the last micro-step of a step. */
  ZR_PLAN_HOLD_GRADS = 1u << 0,
  /* All ranks are on one host, and the plan may request buffers with ZR_BUFFER_SHARED. */
  ZR_PLAN_SHARE_WEIGHTS = 1u << 1,
  /* Gathers with ZR_COLL_WEIGHTS may round weights: use the flag only to gather sharded weights for ZR_FORWARD,
   * ZR_BACKWARD and ZR_EVAL, and gather them again, without it, for ZR_EXPORT_PHASE. */
  ZR_PLAN_ROUNDED_WEIGHTS = 1u << 2,
  /* The ranks of the job are on more than one host. */
  ZR_PLAN_SEVERAL_HOSTS = 1u << 3,
  /* With ZR_PLAN_SEVERAL_HOSTS: the plan may request buffers with ZR_BUFFER_SHARED, of which each host has one.
   * updated() gathers with ZR_COLL_SHARED what the ranks of other hosts have written. */
  ZR_PLAN_SHARE_ON_HOSTS = 1u << 4
};
typedef struct zr_plan_in { /* valid during plan(); that of bind(), with its parameters, until destroy() is called */
  uint32_t size;
  int32_t rank, world;
  zr_dtype weight_dtype;
  zr_dtype grad_dtype;         /* of the gradient of one backward, also while it is communicated */
  zr_dtype reduced_grad_dtype; /* of the sum over micro-batches and ranks */
  int32_t accumulation; /* planned micro-steps per step; a step may have another number; 1 with ZR_PLAN_HOLD_GRADS */
  uint32_t n_params;

  /* Cut a parameter only at multiples of this many elements, counted from its start. */
  int64_t norm_block;
  int64_t align;                 /* in every buffer, every parameter starts at a multiple of this many elements */
  const zr_param *const *params; /* in the model's order */
  uint32_t flags, rsv;           /* ZR_PLAN_* */

  /* For messages: why the ranks of a host do not share weights, such as "communicator.share_weights is false". NULL:
   * they do, or the reason is unknown. */
  const char *sharing_obstacle;
} zr_plan_in;

/* Buffer roles: what a buffer or a piece of a plan contains. (The role of a plug-in is its kind.) */
enum {
  ZR_ROLE_WEIGHT = 1,   /* full weights */
  ZR_ROLE_GRAD,         /* the full gradient of one backward */
  ZR_ROLE_REDUCED_GRAD, /* reduced gradients: what this rank updates */
  ZR_ROLE_BUCKET,       /* a gradient bucket */
  ZR_ROLE_ALL_GATHER,   /* weights gathered for their use */
  ZR_ROLE_WEIGHT_SHARD  /* this rank's shard of the weights */
};

/* For full weights: one allocation that all ranks of a host share. Every rank reads all of it and writes what it
 * updates. */
enum { ZR_BUFFER_SHARED = 1u << 0 };
typedef struct zr_buffer { /* memory that the host allocates on this rank, zeroed, readable by peers */
  uint32_t size, role;
  const char *tag; /* name in the memory ledger; copied */
  int64_t elements;
  zr_dtype dtype;
  uint32_t flags; /* ZR_BUFFER_SHARED */
} zr_buffer;

/* Elements [first, first + count) of a parameter are stored at element `offset` of a buffer, a multiple of `align`.
 * count is at least 1: a parameter without elements has no piece. A frozen parameter has weights, and no REDUCED_GRAD
 * piece. A piece of role WEIGHT is a full parameter. Pieces of role WEIGHT_SHARD are, over all ranks, the parts of a
 * parameter that acquire() gathers. Pieces of role REDUCED_GRAD are what this rank updates; their sums are reduced in
 * rank order. A rank holds the weights of its REDUCED_GRAD pieces, in one WEIGHT or WEIGHT_SHARD piece each: the host
 * writes the updated weights there. */
typedef struct zr_piece {
  uint32_t size, role, param, buffer;
  int64_t first, count, offset;
} zr_piece;
typedef struct zr_plan_sink { /* the host's; valid and called only during plan() */
  uint32_t size, rsv;
  void *ctx;                                    /* the host's own; passed to both functions */
  void (*buffer)(void *ctx, const zr_buffer *); /* [control] copied; buffers are numbered 0, 1, ... in call order */
  void (*piece)(void *ctx, const zr_piece *);   /* [control] copied */
} zr_plan_sink;
typedef struct zr_bind {
  uint32_t size, n_buffers;
  const zr_view *buffers; /* in plan order; the list is valid during bind(), the memory until destroy() is called */
  zr_comm_ref comm;       /* valid until destroy() is called */
} zr_bind;

enum { ZR_STEP_BEGIN = 1, ZR_BACKWARD_END, ZR_STEP_END, ZR_EVAL_BEGIN, ZR_EVAL_END };
/* What a call belongs to. */
enum {
  ZR_FORWARD = 1,      /* forward of a micro-batch */
  ZR_BACKWARD = 2,     /* backward of a micro-batch */
  ZR_EVAL = 3,         /* an evaluation */
  ZR_EXPORT_PHASE = 4, /* the program reads or writes weights (zr::gather) */
  ZR_UPDATE_PHASE = 5  /* the end of a step, and events between steps */
};

enum {
  ZR_USE_LAST_MICRO = 1u << 0, /* grad_destination, grad_ready, ZR_BACKWARD_END: of the last micro-step of a step */

  /* From ZR_STEP_BEGIN to ZR_STEP_END, only with ZR_STRATEGY_LOCAL_GRADS: the gradients of this step stay on their
   * rank. The host accumulates them in memory of its own: it does not call grad_destination() and grad_ready(), and the
   * strategy reduces nothing. When updated() is called, every rank has updated all weights that it does not share with
   * other ranks. */
  ZR_USE_LOCAL_GRADS = 1u << 1
};
/* The circumstances of a call. See "Streams" in zr/abi/base.h for stream and done. */
typedef struct zr_use {
  uint32_t size;
  uint32_t phase;    /* ZR_FORWARD ... ZR_UPDATE_PHASE */
  uint32_t micro;    /* micro-step within the step, from 0; 0 with ZR_PLAN_HOLD_GRADS, outside of micro-steps (as in
                      * grads_finish, updated and ZR_STEP_END) and outside of steps */
  uint32_t flags;    /* ZR_USE_* */
  zr_stream *stream; /* or NULL */
  zr_done *done;     /* or NULL */
} zr_use;

enum {
  ZR_STRATEGY_STREAMS = 1u << 0,    /* the functions that get a zr_use accept streams */
  ZR_STRATEGY_LOCAL_GRADS = 1u << 1 /* accepts ZR_USE_LOCAL_GRADS; every rank holds all weights */
};
/* What a strategy supports. An output: the callee writes at most `size` bytes. */
typedef struct zr_strategy_desc {
  uint32_t size, flags;  /* flags: ZR_STRATEGY_* */
  uint64_t device_types; /* bit i: buffers may be on DLPack device type i; bit 1 (CPU) is required in this version */
} zr_strategy_desc;

typedef struct zr_strategy_api {
  uint32_t size, rsv;

  /* [control] Describes what the strategy supports, before the first plan(). */
  zr_code (*describe)(void *self, zr_strategy_desc *, zr_error *);

  /* [control] Describes the memory of one rank of a world of any size: first all buffers, then the pieces of each role
   * in ascending order of parameter and element. Pure, without communication. */
  zr_code (*plan)(void *self, const zr_plan_in *, const zr_plan_sink *, zr_error *);

  /* [control] Called once the host has allocated the plan. */
  zr_code (*bind)(void *self, const zr_plan_in *, const zr_bind *, zr_error *);

  /* [use] Returns the destination of the next elements of a gradient. *first on entry: how many elements of the
   * gradient already have a destination in this micro-step. *first on return: the first of dst->count consecutive
   * elements that have no destination yet; leave it unchanged if destinations are assigned in ascending order. *dst
   * has grad_dtype; the host writes the gradient there before it calls grad_ready(). ZR_AGAIN: no buffer is free until
   * earlier buckets have been reduced; the host keeps the gradient meanwhile. With ZR_PLAN_HOLD_GRADS every element
   * has a destination, which is the same in every micro-step (micro is 0): the host writes it in the first micro-step
   * and adds to it in later ones, so the strategy must not modify the memory between micro-steps. done is NULL. */
  zr_code (*grad_destination)(void *self, uint32_t param, int64_t *first, const zr_use *, zr_view *dst, zr_error *);

  /* [use] These elements have been written to their destination; zeros if the parameter was not used. The host
   * announces every element of every trainable parameter once per micro-step, in any order; with ZR_PLAN_HOLD_GRADS,
   * once per step, in the last micro-step. The order in which the strategy issues collectives must not depend on the
   * order of these calls. done is NULL. */
  zr_code (*grad_ready)(void *self, uint32_t param, int64_t first, int64_t count, const zr_use *, zr_error *);

  /* [use] ZR_STEP_BEGIN: before the first backward of a step. ZR_BACKWARD_END: after each backward, with
   * ZR_PLAN_HOLD_GRADS only after the last one of the step. ZR_STEP_END: after the update and updated(), or when the
   * step is skipped or abandoned. ZR_EVAL_BEGIN and ZR_EVAL_END: an evaluation begins or ends. done is NULL. */
  zr_code (*event)(void *self, uint32_t kind, const zr_use *, zr_error *);

  /* [step] Called once per step, after the last backward and before the host decides whether to skip the step. When the
   * call is complete, every REDUCED_GRAD piece holds the sum over the step. In the last micro-step and in this call,
   * change the elements of these pieces only through collectives: after the last collective of the step that reads or
   * writes an element, the host may use the element, and write to it, until ZR_STEP_END. */
  zr_code (*grads_finish)(void *self, const zr_use *, zr_error *);

  /* [step] The weights of this rank's REDUCED_GRAD pieces have new values. When the call is complete, all weights are
   * up to date. Called after each update, before ZR_STEP_END; also, outside of steps, after a checkpoint was loaded and
   * after the program set weights. Not called in a skipped or abandoned step: such a step changes no weight. All ranks
   * make the same calls, so it may issue collectives. */
  zr_code (*updated)(void *self, const zr_use *, zr_error *);

  /* [use] Gathers parameters that this rank does not hold in full. full[i] is the full parameter, at a multiple of 64
   * bytes, valid until its release. acquire and release are NULL if every rank always holds all weights. */
  zr_code (*acquire)(void *self, const uint32_t *params, uint32_t n, const zr_use *, zr_view *full, zr_error *);

  /* [use] Releases acquired parameters: their memory may be reused, with a stream once the stream has reached this
   * point. done is NULL. */
  zr_code (*release)(void *self, const uint32_t *params, uint32_t n, const zr_use *, zr_error *);
} zr_strategy_api;

/* For ZR_SIZE_0_9. */
enum {
  zr_plan_in_size_0_9 = 72,       /* bytes */
  zr_buffer_size_0_9 = 32,        /* bytes */
  zr_piece_size_0_9 = 40,         /* bytes */
  zr_plan_sink_size_0_9 = 32,     /* bytes */
  zr_bind_size_0_9 = 40,          /* bytes */
  zr_use_size_0_9 = 32,           /* bytes */
  zr_strategy_desc_size_0_9 = 16, /* bytes */
  zr_strategy_api_size_0_9 = 88   /* bytes */
};
#endif
