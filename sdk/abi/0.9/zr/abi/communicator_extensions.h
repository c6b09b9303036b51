/* Optional functions of a communicator, found by string id through zr_component.extension. */
#ifndef ZR_ABI_COMMUNICATOR_EXTENSIONS_H
#define ZR_ABI_COMMUNICATOR_EXTENSIONS_H
#include "zr/abi/base.h"

/* Extension "zr.communicator.shared_weights/1": memory that all ranks of one node share in place. */
typedef struct zr_shared_weights_api {
  uint32_t size, rsv;

  /* [use] Collective: the same number of bytes on every rank. The memory is zeroed and begins at a page boundary.
   * *writer and *reader are two mappings of it: *reader is read-only, and shows what any rank wrote through its
   * *writer. Both are valid until free() or close(). */
  zr_code (*alloc)(void *comm, uint64_t bytes, void **writer, const void **reader, zr_error *);

  /* [use] Frees the mappings of this rank. Accepts NULL. */
  void (*free)(void *comm, void *writer);
} zr_shared_weights_api;

/* Extension "zr.communicator.plan/1": the memory that a communicator needs, for plans. */
typedef struct zr_communicator_plan {
  uint32_t size, rsv;

  /* [control] Returns the bytes of host memory that each rank allocates in open(). Opens nothing. */
  uint64_t (*open_bytes)(void *self, int32_t world);
} zr_communicator_plan;

/* For ZR_SIZE_0_9. */
enum {
  zr_shared_weights_api_size_0_9 = 24, /* bytes */
  zr_communicator_plan_size_0_9 = 16   /* bytes */
};
#endif
