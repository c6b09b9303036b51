/* Draft: optimizers that need sums over a full parameter, such as its norm, although ranks and threads update parts of
 * it. Before the update the host makes passes over the parameter. In each pass the optimizer adds up its values per
 * block; the host adds the sums of all blocks, on all ranks, in ascending order of the blocks. The totals therefore do
 * not depend on the strategy or the number of ranks, and no rank gathers the parameter. */
#ifndef ZR_ABI_DRAFT_PARTIAL_SUMS_H
#define ZR_ABI_DRAFT_PARTIAL_SUMS_H
#include "zr/abi/draft/draft.h"
#include "zr/abi/optimizer.h"

/* Limits. */
enum {
  ZR_MAX_PASSES = 4 /* passes over a parameter before its update */
};

/* The sums of one call. */
typedef struct zr_sums {
  uint32_t size;
  uint32_t pass; /* from 0; in update(): the number of passes */

  /* Elements per block: zr_param.cut_block. A slice begins at a multiple of it and ends at one or at the end of the
   * parameter. */
  int64_t block;
  const double *totals; /* in: those of pass 0, then of pass 1 and so on, of all earlier passes */

  /* Out, in add_up(): for every block of the slice, as many sums as passes() reports for this pass; zero on entry. NULL
   * in update(). */
  double *partial;
} zr_sums;

/* Extension "zr.optimizer.partial_sums/1". */
typedef struct zr_partial_sums_api {
  uint32_t size, rsv;

  /* [control] Reports the number of passes over a parameter, at most ZR_MAX_PASSES, and in n_sums[i] the number of sums
   * per block of pass i, at least 1. 0 passes: the host calls zr_optimizer_api.step() for the parameter, and neither
   * function below. Called for every parameter after zr_optimizer_api.describe(); the result does not change. */
  zr_code (*passes)(void *self, const zr_param *, uint32_t *n_passes, uint32_t *n_sums, zr_error *);

  /* [worker] One pass over a slice. It may change the states of the slice, but not its weights or master weights;
   * zr_update_slice.weight of bf16 and fp16 weights is undefined. The rules of zr_optimizer_api.step() apply. */
  zr_code (*add_up)(void *self, const zr_step *, const zr_update_slice *, const zr_sums *, zr_error *);

  /* [worker] Updates a slice after all passes, in place of zr_optimizer_api.step(), whose rules apply. */
  zr_code (*update)(void *self, const zr_step *, const zr_update_slice *, const zr_sums *, zr_error *);
} zr_partial_sums_api;
#endif
