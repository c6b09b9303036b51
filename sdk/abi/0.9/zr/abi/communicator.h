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

/* Flags of an operation. */
enum {
  /* For all_reduce, reduce_scatter and reduce: add to the content of dst, that is, compute dst + src_0 + src_1 + ...
   * instead of +0 + src_0 + src_1 + ... */
  ZR_COLL_ACCUMULATE = 1u << 0,

  /* From strategies and optimizers to the host, which passes on the three flags below instead: the operation sums
   * gradients or gathers them, and the user may choose that it is not exact. */
  ZR_COLL_GRADIENTS = 1u << 1,
  /* As ZR_COLL_GRADIENTS, but the operation gathers weights. */
  ZR_COLL_WEIGHTS = 1u << 2,

  /* From the host to a communicator with ZR_COMM_QUANTIZED: where values pass between hosts, they may be rounded to
   * integers of 8 bits, with one scale per block. All ranks get the same results. */
  ZR_COLL_INT8 = 1u << 3,
  /* As ZR_COLL_INT8, but of 4 bits. At most one of the two is set. */
  ZR_COLL_INT4 = 1u << 4,

  /* From the host to a communicator with ZR_COMM_ANY_ORDER: it may add in any order that is the same in every run. */
  ZR_COLL_ANY_ORDER = 1u << 5,

  /* From strategies, for an all_gather in place over several hosts: dst is memory that the ranks of this host share
   * (ZR_BUFFER_SHARED). Each rank has written its part there; the ranks of a host receive those of other hosts
   * together, and it is complete on a rank when all parts are there. */
  ZR_COLL_SHARED = 1u << 6
};

typedef struct zr_coll {
  uint32_t size, op, reduce, flags;

  /* Both have the same dtype; or dst is F32 and src is BF16 or F16, if caps() reports ZR_COMM_UPCAST. */
  zr_view src, dst;
  const int64_t *counts; /* one per rank; or NULL: equal parts */

  /* For all_to_all only; or NULL: same as counts. */
  const int64_t *recv_counts;
  int32_t root, peer, tag, rsv;

  /* A hash of op, reduce, flags, dtypes, total count, counts (except of all_to_all), root and label. 0 for send and
   * recv. It is equal on all ranks unless they disagree about the operation; a communicator that compares it fails
   * with ZR_MISMATCH, and need not compare it. */
  uint64_t fingerprint;
  const char *label; /* for reports: "gradient bucket 3" */
} zr_coll;

typedef struct zr_comm_open {
  uint32_t size;
  int32_t rank, world, rsv;
  zr_device device;         /* of the views that submit() gets: one of caps()' device_types */
  const char *axis;         /* name of the parallel dimension; always "data" in this version */
  const char *store_prefix; /* equal on all ranks, and no other communicator of the job has it: begin the keys of
                             * "zr.host.store/1" with it */
} zr_comm_open;

enum {
  ZR_COMM_RANK_ORDERED = 1, /* reductions add in rank order: timing and topology do not change the bits */
  ZR_COMM_UPCAST = 2,       /* reductions accept src BF16 or F16 with dst F32 */
  ZR_COMM_ACCUMULATE = 4,   /* ZR_COLL_ACCUMULATE is supported */
  ZR_COMM_ASYNC = 8,        /* submit() with a completion returns before the collective is complete */
  ZR_COMM_STREAMS = 16,     /* submit() accepts streams of the device that open() got */
  ZR_COMM_QUANTIZED = 32,   /* ZR_COLL_INT8 and ZR_COLL_INT4 are accepted */
  ZR_COMM_ANY_ORDER = 64    /* ZR_COLL_ANY_ORDER is accepted */
};
typedef struct zr_comm_caps {    /* output: the callee writes at most `size` bytes */
  uint32_t size, flags;          /* flags: ZR_COMM_* */
  uint64_t ops, dtypes, reduces; /* bit sets: bit i is set if the value i is supported */
  uint64_t device_types;         /* bit i: DLPack device type i; bit 1 (CPU) is required in this version */
} zr_comm_caps;

typedef struct zr_communicator_api {
  uint32_t size, rsv;

  /* [any] Reports what the communicators of this instance support, before the first open(); does not change later. */
  zr_code (*caps)(void *self, zr_comm_caps *, zr_error *);

  /* [control] Opens a communicator; collective over the job. One instance may open several. */
  zr_code (*open)(void *self, const zr_comm_open *, void **comm, zr_error *);

  /* [control] Closes it; local to this rank. Every accepted completion is resolved on return: those of operations that
   * are not complete, with ZR_CANCELLED. Accepts NULL. */
  void (*close)(void *comm);

  /* [use] Runs or starts an operation; see "Streams" in zr/abi/base.h. Operations complete in submission order. An
   * operation is complete on this rank when dst is written and src may be overwritten. The communicator may resolve the
   * completion on a thread of its own. */
  zr_code (*submit)(void *comm, const zr_coll *, zr_stream *, zr_done *, zr_error *);

  /* [use] Advances submitted operations without waiting. Or NULL: the communicator does not need such calls. */
  zr_code (*progress)(void *comm, zr_error *);

  /* [use] Allocates memory that peers may read in place: zeroed, aligned to at least 64 bytes, on the device that
   * open() got, valid until mem_free() or close(). *out is a U8 view of at least `bytes` bytes. Local: ranks call it
   * with sizes of their own, and not equally often. flags: 0. mem_alloc and mem_free are both NULL if peers do not read
   * this rank's memory directly. */
  zr_code (*mem_alloc)(void *comm, uint64_t bytes, uint64_t align, uint32_t flags, zr_view *out, zr_error *);

  /* [use] Frees memory of mem_alloc(): the view that it returned. */
  void (*mem_free)(void *comm, const zr_view *memory);

  /* [any] Calls that wait return ZR_CANCELLED at once, and so do all later calls that would wait. */
  void (*abort)(void *comm);
} zr_communicator_api;

/* The host's wrapper of a communicator, lent to strategies. The wrapper numbers operations, composes those that the
 * communicator does not support (but not send and recv), limits how long they may take, and counts bytes. */
typedef struct zr_collectives_api {
  uint32_t size, rsv;

  /* [use] As in zr_communicator_api. The host fills in the fingerprint. */
  zr_code (*submit)(void *comm, const zr_coll *, zr_stream *, zr_done *, zr_error *);

  /* [use] As in zr_communicator_api. */
  zr_code (*progress)(void *comm, zr_error *);
} zr_collectives_api;
/* A communicator of the host. Frozen. */
typedef struct zr_comm_ref {
  const zr_collectives_api *api; /* its functions */
  void *comm;                    /* their first argument */
  int32_t rank, world;           /* of the communicator */
} zr_comm_ref;

/* For ZR_SIZE_0_9. */
enum {
  zr_coll_size_0_9 = 128,            /* bytes */
  zr_comm_open_size_0_9 = 40,        /* bytes */
  zr_comm_caps_size_0_9 = 40,        /* bytes */
  zr_communicator_api_size_0_9 = 72, /* bytes */
  zr_collectives_api_size_0_9 = 24   /* bytes */
};
#endif
