/* Draft: tiers that compress or encrypt for the tier below, and tiers that survive a kill of the process. The host does
 * not use either extension yet. */
#ifndef ZR_ABI_DRAFT_OFFLOAD_LAYERS_H
#define ZR_ABI_DRAFT_OFFLOAD_LAYERS_H
#include "zr/abi/draft/draft.h"
#include "zr/abi/offload.h"

typedef struct zr_offload_ref { /* frozen: the tier below; the host owns it and destroys it after the tier above */
  const zr_offload_api *api;
  void *self;
} zr_offload_ref;

/* Extension "zr.offload.layer/1": the host calls open_above() instead of open(). */
typedef struct zr_offload_layer_api {
  uint32_t size, rsv;

  /* [control] Opens the tier on the tier below, which is open already. The tier may call every function of the tier
   * below from the function of the same name. */
  zr_code (*open_above)(void *self, const zr_offload_ref *below, zr_error *);
} zr_offload_layer_api;

/* Extension "zr.offload.flush/1". */
typedef struct zr_offload_flush_api {
  uint32_t size, rsv;

  /* [step] On return all bytes written so far survive a kill of the process. */
  zr_code (*flush)(void *self, zr_error *);
} zr_offload_flush_api;
#endif
