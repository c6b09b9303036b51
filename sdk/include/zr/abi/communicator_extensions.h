/* What a communicator may offer besides, by string id: zr_component.extension. */
#ifndef ZR_ABI_COMMUNICATOR_EXTENSIONS_H
#define ZR_ABI_COMMUNICATOR_EXTENSIONS_H
#include "zr/abi/base.h"

/* Extension "zr.communicator.shared_weights/1", where ranks of one host can have one memory in place. */
typedef struct zr_shared_weights_api {
  uint32_t size, rsv;
  /* [use] Collective: the same bytes on every rank, zeroed, on a page; *reader sees what any rank wrote to its *writer
   * and cannot be written to. Both live until free or close. */
  zr_code (*alloc)(void *comm, uint64_t bytes, void **writer, const void **reader, zr_error *);
  void (*free)(void *comm, void *writer); /* [use] of this rank; accepts NULL */
} zr_shared_weights_api;
/* Extension "zr.communicator.plan/1". */
typedef struct zr_communicator_plan {
  uint32_t size, rsv;
  uint64_t (*open_bytes)(void *self, int32_t world); /* [control] host memory a rank takes at open, without opening */
} zr_communicator_plan;
#endif
