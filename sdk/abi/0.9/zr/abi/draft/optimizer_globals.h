/* Draft: state of an optimizer that does not belong to a parameter. */
#ifndef ZR_ABI_DRAFT_OPTIMIZER_GLOBALS_H
#define ZR_ABI_DRAFT_OPTIMIZER_GLOBALS_H
#include "zr/abi/draft/draft.h"
#include "zr/abi/optimizer.h"

/* [step] A function of the host, called during save_globals() only. It copies key and value; value is NULL only if
 * bytes is 0. */
typedef void (*zr_global_sink)(void *ctx, const char *key, const void *value, uint64_t bytes);

/* Extension "zr.optimizer.globals/1". */
typedef struct zr_optimizer_globals_api {
  uint32_t size, rsv;

  /* [step] Passes state that is not per parameter to the sink, for checkpoints. ctx is passed to the sink. */
  zr_code (*save_globals)(void *self, zr_global_sink, void *ctx, zr_error *);

  /* [step] Restores one saved value, before the first step; the value is copied. ZR_INVALID if the key is unknown. */
  zr_code (*load_global)(void *self, const char *key, const void *value, uint64_t bytes, zr_error *);
} zr_optimizer_globals_api;
#endif
