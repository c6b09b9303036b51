/* Communicators, "zr.communicator/1": move flat buffers between the ranks of one job. */
#ifndef ZR_ABI_COMMUNICATOR_H
#define ZR_ABI_COMMUNICATOR_H
#include "zr/abi/base.h"

/* Operations. counts[r] is the number of elements of rank r's part; parts follow each other in rank order and may be
 * empty. Without counts all parts are equal. An operation may be in place: src is then this rank's part of dst, or all
 * of dst. Reductions of bf16 and fp16 accumulate in fp32 and round once. */
enum {
  ZR_ALL_REDUCE = 1,     /* src[n] of all ranks -> dst[n] on every rank */
  ZR_REDUCE_SCATTER = 2, /* src[n], cut by counts -> dst[counts[rank]] */
  ZR_ALL_GATHER = 3,     /* src[counts[rank]] -> dst[n] on every rank */
  ZR_BROADCAST = 4,      /* root's src -> dst on every rank; src is read on root only */
  ZR_REDUCE = 5,         /* src[n] of all ranks -> root's dst[n] */
  ZR_GATHER = 6,         /* src[counts[rank]] -> root's dst[n] */
  ZR_SCATTER = 7,        /* root's src[n], cut by counts -> dst[counts[rank]] */
  ZR_ALL_TO_ALL = 8,     /* src is cut by counts (to each rank), dst by recv_counts (from each rank) */
  ZR_SEND = 9,           /* src -> peer; sends and receives with equal tags match in order */
  ZR_RECV = 10,          /* peer -> dst */
  ZR_BARRIER = 11
};

/* Reductions. */
enum { ZR_SUM = 1, ZR_MIN = 2, ZR_MAX = 3 };

/* For all_reduce, reduce_scatter and reduce: add to the content of dst, that is, compute dst + src_0 + src_1 + ...
 * instead of +0 + src_0 + src_1 + ... */
enum { ZR_COLL_ACCUMULATE = 1u << 0 };

typedef struct zr_coll {
  uint32_t size, op, reduce, flags;

  /* Both have the same dtype; or dst is F32 and src is BF16 or F16, if caps() reports ZR_COMM_UPCAST. */
  zr_view src, dst;
  const int64_t *counts; /* one per rank; or NULL: equal parts */

  /* For all_to_all only; or NULL: same as counts. */
  const int64_t *recv_counts;
  int32_t root, peer, tag, rsv;

  /* A hash of op, reduce, flags, dtypes, total count, counts (except of all_to_all), root and label. It must be equal
   * on all ranks, else the operation fails with ZR_MISMATCH. 0 for send and recv. */
  uint64_t fingerprint;
  const char *label; /* for reports: "gradient bucket 3" */
} zr_coll;

typedef struct zr_comm_open {
  uint32_t size;
  int32_t rank, world, rsv;
  const char *axis; /* name of the parallel dimension; always "data" in this version */
} zr_comm_open;

enum {
  ZR_COMM_RANK_ORDERED = 1, /* reductions add in rank order: timing and topology do not change the bits */
  ZR_COMM_UPCAST = 2,       /* reductions accept src BF16 or F16 with dst F32 */
  ZR_COMM_ACCUMULATE = 4,   /* ZR_COLL_ACCUMULATE is supported */
  ZR_COMM_ASYNC = 8         /* submit() with a completion returns before the collective is complete */
};
typedef struct zr_comm_caps {    /* output: the callee writes at most `size` bytes */
  uint32_t size, flags;          /* flags: ZR_COMM_* */
  uint64_t ops, dtypes, reduces; /* bit sets: bit i is set if the value i is supported */
} zr_comm_caps;

typedef struct zr_communicator_api {
  uint32_t size, rsv;

  /* [control] Opens a communicator; collective over the job. */
  zr_code (*open)(void *self, const zr_comm_open *, void **comm, zr_error *);

  /* [control] Closes it; local to this rank. Accepts NULL. */
  void (*close)(void *comm);

  /* [any] Reports what the communicator supports. */
  zr_code (*caps)(void *comm, zr_comm_caps *, zr_error *);

  /* [use] Runs or starts an operation. A null zr_done: the operation is complete on return. Otherwise the operation
   * starts, and the completion resolves when it is complete; operations complete in submission order. The memory of
   * both views must then stay valid until the completion resolves; all other arguments are valid only until the call
   * returns. An operation is complete on this rank when dst is written and src may be overwritten. */
  zr_code (*submit)(void *comm, const zr_coll *, zr_stream *, zr_done *, zr_error *);

  /* [use] Advances submitted operations without waiting. Or NULL: the communicator does not need such calls. */
  zr_code (*progress)(void *comm, zr_error *);

  /* [use] Allocates memory that peers may read in place: zeroed, aligned to at least 64 bytes, valid until mem_free()
   * or close(). flags: 0. mem_alloc and mem_free are both NULL if peers do not read this rank's memory
   * directly. */
  zr_code (*mem_alloc)(void *comm, uint64_t bytes, uint64_t align, uint32_t flags, void **out, zr_error *);

  /* [use] Frees memory of mem_alloc(). Accepts NULL. */
  void (*mem_free)(void *comm, void *memory);

  /* [any] Calls that wait return ZR_CANCELLED at once, and so do all later calls that would wait. */
  void (*abort)(void *comm);
} zr_communicator_api;

/* The host's wrapper of a communicator, lent to strategies and optimizers. The wrapper numbers operations, limits how
 * long they may take, and counts bytes. Frozen. */
typedef struct zr_comm_ref {
  const zr_communicator_api *api; /* only submit, caps and progress may be called */
  void *comm;
  int32_t rank, world;
} zr_comm_ref;
#endif
