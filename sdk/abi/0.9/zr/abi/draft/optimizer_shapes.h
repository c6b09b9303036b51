/* Draft: optimizers whose update or states are not elementwise. The host reports the parts that an optimizer needs
 * complete to strategies as zr_param.cut_block, and rejects plans that cut them. */
#ifndef ZR_ABI_DRAFT_OPTIMIZER_SHAPES_H
#define ZR_ABI_DRAFT_OPTIMIZER_SHAPES_H
#include "zr/abi/draft/draft.h"
#include "zr/abi/optimizer.h"

/* Granularities: complete rows (the first dimension), or the complete tensor. */
enum { ZR_ROWWISE = 2, ZR_TENSORWISE = 3 };

/* Shapes of states by block. A block is zr_slot.block consecutive elements of the parameter, counted from its start;
 * the last one may be shorter. Every slice has complete blocks, also of several states with different blocks. */
enum {
  ZR_SLOT_PER_BLOCK = 2, /* one element per block */

  /* One element per column for every block. A column has one element in each row (the first dimension). `block` is a
   * multiple of the elements of a row. Optimizers that need a value per column of the full parameter write the same
   * values for every block, so that every slice has them. */
  ZR_SLOT_PER_COLUMN = 3
};

/* Flags of states, for optimizers with local gradients (zr/abi/draft/local_gradients.h); the host rejects them
 * otherwise. Such a state has the shape of the parameter and is fp32. */
enum {
  ZR_SLOT_RANK_PRIVATE = 1u << 0, /* for exchange() only: each rank has values of its own, with ZR_SLOT_UNSHARDED for
                                   * all elements, else for those that it serves. These states follow all others in the
                                   * list. New after a load at another number of ranks */
  ZR_SLOT_TRANSIENT = 1u << 1,    /* not saved in checkpoints; not supported */
  ZR_SLOT_UNSHARDED = 1u << 2     /* without ZR_SLOT_RANK_PRIVATE: step() reads it also for elements that another rank
                                   * owns */
};
#endif
