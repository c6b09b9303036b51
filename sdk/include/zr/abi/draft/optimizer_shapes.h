/* Draft: optimizers whose update or states are not elementwise. The host checks granularities against the plan of the
 * strategy; it rejects states that are not ZR_SLOT_LIKE_PARAM, and all flags. */
#ifndef ZR_ABI_DRAFT_OPTIMIZER_SHAPES_H
#define ZR_ABI_DRAFT_OPTIMIZER_SHAPES_H
#include "zr/abi/draft/draft.h"
#include "zr/abi/optimizer.h"

/* Granularities: complete rows (the first dimension), or the complete tensor. */
enum { ZR_ROWWISE = 2, ZR_TENSORWISE = 3 };

/* A state with one element per `block` consecutive elements of the parameter, counted from its start. `block` divides
 * the norm block (zr_plan_in.norm_block). */
enum {
  ZR_SLOT_PER_BLOCK = 2 /* one element per block */
};

enum {
  ZR_SLOT_RANK_PRIVATE = 1u << 0, /* each rank has values of its own, of its own range; not resharded: zero after a load
                                   * at another number of ranks */
  ZR_SLOT_TRANSIENT = 1u << 1,    /* not saved in checkpoints: zero after a load */
  ZR_SLOT_UNSHARDED = 1u << 2     /* every rank has all elements of the state */
};
#endif
