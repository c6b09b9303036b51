/* Draft: optimizers that read gradients before they are reduced over ranks (1-bit Adam). No strategy offers local
 * gradients yet, so the host rejects ZR_OPT_NEEDS_COMM and ZR_OPT_NEEDS_LOCAL_GRADS when a job starts. */
#ifndef ZR_ABI_DRAFT_LOCAL_GRADIENTS_H
#define ZR_ABI_DRAFT_LOCAL_GRADIENTS_H
#include "zr/abi/communicator.h"
#include "zr/abi/draft/draft.h"
#include "zr/abi/optimizer.h"

enum {
  ZR_OPT_NEEDS_COMM = 1u << 0,       /* step() issues collectives on the communicator of bind(): it is [step] and gets
                                      * all slices in one call, in the same order on all ranks */
  ZR_OPT_NEEDS_LOCAL_GRADS = 1u << 1 /* steps may need gradients that are not reduced over ranks */
};

enum { ZR_GRADS_REDUCED = 0, ZR_GRADS_LOCAL = 1 };

/* zr_use.flags: the gradients of this step stay on their rank; the strategy does not reduce them. The host passes it
 * from ZR_STEP_BEGIN to ZR_STEP_END. */
enum {
  ZR_USE_LOCAL_GRADS = 1u << 1 /* gradients are not reduced */
};
/* zr_strategy_desc.flags: the strategy accepts ZR_USE_LOCAL_GRADS. */
enum {
  ZR_STRATEGY_LOCAL_GRADS = 1u << 1 /* local gradients are supported */
};

/* Extension "zr.optimizer.local_gradients/1". With local gradients, step() gets one slice per trainable parameter, in
 * the model's order, on every rank: grad_first is 0 and grad_count the count of the parameter; first and count are the
 * range that this rank updates, and count may be 0. */
typedef struct zr_local_gradients_api {
  uint32_t size, rsv;

  /* [step] Reports which gradients a step needs (ZR_GRADS_*), before its first backward. `step`: as in zr_step. */
  zr_code (*gradients)(void *self, int64_t step, uint32_t *grads, zr_error *);

  /* [control] Passes the communicator of all ranks, valid until destroy() is called; before the first step(). Called if
   * describe() reported ZR_OPT_NEEDS_COMM for a parameter; else it may be NULL. */
  zr_code (*bind)(void *self, zr_comm_ref comm, zr_error *);
} zr_local_gradients_api;
#endif
