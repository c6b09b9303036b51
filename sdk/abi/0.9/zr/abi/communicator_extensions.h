/* Optional functions of a communicator, found by string id through zr_component.extension. */
#ifndef ZR_ABI_COMMUNICATOR_EXTENSIONS_H
#define ZR_ABI_COMMUNICATOR_EXTENSIONS_H
#include "zr/abi/base.h"
#include "zr/abi/communicator.h"

/* Extension "zr.communicator.shared_weights/1": memory that all ranks of one host share in place. */
typedef struct zr_shared_weights_api {
  uint32_t size, rsv;

  /* [use] Collective: the same number of bytes on every rank. The memory is zeroed and begins at a page boundary.
   * *writer and *reader are two mappings of it: *reader is read-only, and shows what any rank of this host wrote
   * through its *writer. Both are valid until free() or close(). */
  zr_code (*alloc)(void *comm, uint64_t bytes, void **writer, const void **reader, zr_error *);

  /* [use] Frees the mappings of this rank. Accepts NULL. */
  void (*free)(void *comm, void *writer);

  /* [control] ZR_OK if a job can use alloc() that has ranks[h] ranks on host h, numbered host by host; if there are
   * several hosts, ZR_COLL_SHARED is then accepted, too. ZR_UNSUPPORTED: it cannot. Opens nothing. Or NULL: one host
   * only. */
  zr_code (*can_share)(void *self, uint32_t n_hosts, const int32_t *ranks, zr_error *);
} zr_shared_weights_api;

/* The hosts of a job, and the bytes of collectives, to which the callee adds. */
typedef struct zr_traffic {
  uint32_t size;
  uint32_t n_hosts;     /* length of the three lists */
  const int32_t *ranks; /* by host: its number of ranks; ranks are numbered host by host */
  uint64_t *sent;       /* by host: what its ranks send to ranks of other hosts */
  uint64_t *received;   /* by host: what its ranks receive from ranks of other hosts */
  uint64_t inside;      /* what ranks get from ranks of their own host, in messages or through shared memory */
} zr_traffic;

/* Extension "zr.communicator.plan/1", for plans: the memory that a communicator needs, and the bytes that it moves. */
typedef struct zr_communicator_plan {
  uint32_t size, rsv;

  /* [control] Returns the bytes of host memory that each rank allocates in open(). Opens nothing. */
  uint64_t (*open_bytes)(void *self, int32_t world);

  /* [control] Adds the bytes that all ranks together transfer in one collective, without headers of messages. `coll` is
   * the collective as rank 0 submits it; its views have addresses, but no memory that may be read or written. In an
   * all_to_all all ranks have the same counts, if rank 0 receives as much from every rank as it sends to itself;
   * otherwise its bytes are unknown. ZR_UNSUPPORTED: unknown for this operation or these hosts; nothing is added. Opens
   * nothing. Or NULL: unknown. */
  zr_code (*traffic)(void *self, const zr_coll *coll, zr_traffic *, zr_error *);
} zr_communicator_plan;

/* For ZR_SIZE_0_9. */
enum {
  zr_shared_weights_api_size_0_9 = 32, /* bytes */
  zr_traffic_size_0_9 = 40,            /* bytes */
  zr_communicator_plan_size_0_9 = 24   /* bytes */
};
#endif
