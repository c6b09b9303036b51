/* Draft: optimizers that read gradients before they are reduced over ranks (1-bit Adam). */
#ifndef ZR_ABI_DRAFT_LOCAL_GRADIENTS_H
#define ZR_ABI_DRAFT_LOCAL_GRADIENTS_H
#include "zr/abi/communicator.h"
#include "zr/abi/draft/draft.h"
#include "zr/abi/draft/optimizer_shapes.h"
#include "zr/abi/optimizer.h"

enum {
  ZR_OPT_NEEDS_COMM = 1u << 0,       /* exchange() issues collectives on the communicator of bind() */
  ZR_OPT_NEEDS_LOCAL_GRADS = 1u << 1 /* steps may need gradients that are not reduced over ranks; the optimizer is
                                      * elementwise and has the extension below for all parameters */
};

enum { ZR_GRADS_REDUCED = 0, ZR_GRADS_LOCAL = 1 };

/* Flags of a local gradient. */
enum {
  /* The private states are new. Those of all elements have the values of the optimizer's first state, the others are
   * zero. */
  ZR_LOCAL_BEGINS = 1u << 0
};

/* Elements [first, first + count) of a parameter, which one rank serves: it has their private states that are not
 * unsharded. Ranges begin at multiples of zr_plan_in.norm_block (1024). Frozen. */
typedef struct zr_served_range {
  int64_t first, count; /* elements of the parameter */
  int32_t rank, rsv;    /* the rank that serves them */
} zr_served_range;

/* A parameter in exchange(). The views are valid during the call and do not overlap. */
typedef struct zr_local_gradient {
  uint32_t size, group;  /* group: of the parameter */
  const char *name;      /* of the parameter */
  uint32_t param, flags; /* index in the model's order; ZR_LOCAL_* */
  int64_t count;         /* elements of the parameter, at least 1 */
  zr_view grad;          /* in: this rank's gradient, fp32, the sum over its micro-batches. out: zr_update_slice.grad
                          * of the step() calls that follow, the same on all ranks */
  const zr_view *slots;  /* in/out: the states with ZR_SLOT_RANK_PRIVATE, in the order of describe(). With
                          * ZR_SLOT_UNSHARDED: all elements; else those that this rank serves, range after range */
  const zr_served_range *ranges; /* ascending, of all elements; the same on all ranks */
  uint32_t n_ranges, rsv;        /* at least 1; 0 */
} zr_local_gradient;

/* The updates that the states of the parameters have had, by parameter in the model's order, the same on all ranks.
 * They count from the states' zeros: of a new parameter, or after a load that has reset the states. */
typedef struct zr_param_updates {
  uint32_t size, n;     /* n: number of parameters, frozen ones included */
  const int64_t *all;   /* number of updates */
  const int64_t *local; /* those of them with local gradients */
} zr_param_updates;

/* The memory and communication of exchange() on one rank. */
typedef struct zr_exchange_plan {
  uint32_t size;               /* of the struct; out: the callee writes at most `size` bytes */
  int32_t world;               /* in: number of ranks */
  const int64_t *counts;       /* in: elements of each trainable parameter */
  const int64_t *served;       /* in: elements of each range that this rank serves */
  uint32_t n_counts, n_served; /* in: lengths of the two lists */
  uint64_t scratch;            /* out: bytes of `scratch` in exchange() */
  uint64_t received;           /* out: bytes received by all ranks together if all parameters are exchanged */
} zr_exchange_plan;

/* Extension "zr.optimizer.local_gradients/1". In a step with local gradients, the host calls exchange() once on every
 * rank, then step() for the elements that this rank updates, in any slices: those that it owns, and if ranks do not
 * share weights, those of all other ranks, or its part of them if the ranks of its host share masters. For elements of
 * other ranks, step() gets the states with ZR_SLOT_UNSHARDED, which it cannot change if their memory is read-only and
 * must not change otherwise, and no memory for the others (count is 0). zr_step.grad_mul is then 1. A step that is
 * skipped because a gradient is not finite has neither call. */
typedef struct zr_local_gradients_api {
  uint32_t size, rsv;

  /* [step] Reports which gradients a step needs (ZR_GRADS_*), before its first backward. `step`: as in zr_step. The
   * updates before the step are valid during the call. NULL: the host asks about a later step, and an optimizer that
   * does not know yet reports ZR_GRADS_LOCAL. An error rejects the step and changes nothing. Local gradients are
   * followed by reduced ones only after a load, or if the job was resumed with other keys. */
  zr_code (*gradients)(void *self, int64_t step, const zr_param_updates *, uint32_t *grads, zr_error *);

  /* [control] Passes the communicator of all ranks, valid until destroy() is called; before the first exchange().
   * Called if describe() reported ZR_OPT_NEEDS_COMM for a parameter; else it may be NULL. */
  zr_code (*bind)(void *self, zr_comm_ref comm, zr_error *);

  /* [control] Fills in the sizes of exchange(). Pure. */
  zr_code (*plan)(void *self, zr_exchange_plan *, zr_error *);

  /* [step] Replaces every local gradient by what step() gets. The mean over ranks of grad x zr_step.grad_mul is the
   * mean gradient; zr_step.grad_norm is NaN. `gradients`: all parameters that had a gradient on any rank, in the
   * model's order, the same on all ranks. scratch: a U8 view that peers can read, whose content the host keeps between
   * calls. For a plan, the host calls it with memory that keeps nothing, and collectives that move nothing. */
  zr_code (*exchange)(void *self, const zr_step *, const zr_local_gradient *const *gradients, uint32_t n,
                      const zr_view *scratch, zr_error *);

  /* [step] Called after each update with reduced gradients, or NULL: reports a state whose sum the optimizer needs, by
   * its index in describe()'s list, or -1. The state is fp32, has the shape of the parameter, and is not private to a
   * rank; all parameters have it. The same on all ranks. */
  zr_code (*summed_state)(void *self, int64_t step, int32_t *slot, zr_error *);

  /* [step] Passes that sum over all elements of all parameters, before the next gradients(). It is added in double, in
   * an order that depends neither on the strategy nor on the number of ranks. NULL without summed_state(). */
  zr_code (*state_sum)(void *self, int64_t step, double sum, zr_error *);
} zr_local_gradients_api;
#endif
