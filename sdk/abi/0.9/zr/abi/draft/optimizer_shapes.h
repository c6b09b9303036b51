/* Draft: optimizers whose update or states are not elementwise. The host reports the parts that an optimizer needs
 * complete to strategies as zr_param.cut_block, and rejects plans that cut them. It rejects all flags of states. */
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

enum {
  ZR_SLOT_RANK_PRIVATE = 1u << 0, /* each rank has values of its own, of its own range; not resharded: zero after a load
                                   * at another number of ranks */
  ZR_SLOT_TRANSIENT = 1u << 1,    /* not saved in checkpoints: zero after a load */
  ZR_SLOT_UNSHARDED = 1u << 2     /* every rank has all elements of the state */
};
#endif
