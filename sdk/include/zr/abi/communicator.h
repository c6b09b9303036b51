/* Communicator role, "zr.communicator/1": moves flat buffers between the ranks of one job. */
#ifndef ZR_ABI_COMMUNICATOR_H
#define ZR_ABI_COMMUNICATOR_H
#include "zr/abi/base.h"

/* counts[r]: elements of rank r's part, in rank order; NULL: equal parts. A part may be empty. src may be dst's own
 * range
 * ("in place"). Reductions of narrow floats add in fp32 and round once. */
enum {
  ZR_ALL_REDUCE = 1,     /* src[n] -> dst[n] everywhere */
  ZR_REDUCE_SCATTER = 2, /* src[n] cut by counts -> dst[counts[rank]] */
  ZR_ALL_GATHER = 3,     /* src[counts[rank]] -> dst[n] */
  ZR_BROADCAST = 4,      /* root's src -> dst; src is read on root only */
  ZR_REDUCE = 5,         /* src[n] -> root's dst[n] */
  ZR_GATHER = 6,         /* src[counts[rank]] -> root's dst[n] */
  ZR_SCATTER = 7,        /* root's src[n] -> dst[counts[rank]] */
  ZR_ALL_TO_ALL = 8,     /* src cut by counts (to), dst cut by recv_counts (from) */
  ZR_SEND = 9,           /* src -> peer, matched by tag in order */
  ZR_RECV = 10,          /* peer -> dst */
  ZR_BARRIER = 11
};
enum { ZR_SUM = 1, ZR_MIN = 2, ZR_MAX = 3 };
/* Fold into dst: dst + src_0 + src_1 + ... instead of +0 + src_0 + ... (all_reduce, reduce_scatter, reduce). */
enum { ZR_COLL_ACCUMULATE = 1u << 0 };

typedef struct zr_coll {
  uint32_t size, op, reduce, flags;
  zr_view src, dst;           /* dtypes equal, or dst F32 and src BF16/F16 where the caps say WIDEN */
  const int64_t *counts;      /* or NULL */
  const int64_t *recv_counts; /* all_to_all; or NULL: as counts */
  int32_t root, peer, tag, rsv;
  uint64_t fingerprint; /* of all above but addresses; equal on all ranks, else ZR_MISMATCH (send, recv: 0) */
  const char *label;    /* for reports: "gradient bucket 3" */
} zr_coll;

typedef struct zr_comm_open {
  uint32_t size;
  int32_t rank, world, rsv;
  const char *axis; /* "data" */
} zr_comm_open;

enum {
  ZR_COMM_RANK_ORDERED = 1, /* reductions add in rank order: timing and topology do not change the bits */
  ZR_COMM_UPCAST = 2,       /* reductions take src BF16 or F16 with dst F32 */
  ZR_COMM_ACCUMULATE = 4,   /* ZR_COLL_ACCUMULATE is understood */
  ZR_COMM_ASYNC = 8         /* submit with a done returns before the collective is complete */
};
typedef struct zr_comm_caps {    /* out: callee writes at most `size` bytes */
  uint32_t size, flags;          /* flags: ZR_COMM_* */
  uint64_t ops, dtypes, reduces; /* bit i: value i */
} zr_comm_caps;

typedef struct zr_communicator_api {
  uint32_t size, rsv;
  zr_code (*open)(void *self, const zr_comm_open *, void **comm, zr_error *); /* [control] collective over the job */
  void (*close)(void *comm);                                                  /* [control] local; accepts NULL */
  zr_code (*caps)(void *comm, zr_comm_caps *, zr_error *);                    /* [any] */
  /* [use] done NULL: complete on return. Else: starts, arguments but the two views' memory may go, buffers stay until
   * done resolves; completes in submission order. Complete: dst is written and src may be overwritten on this rank. */
  zr_code (*submit)(void *comm, const zr_coll *, zr_stream *, zr_done *, zr_error *);
  zr_code (*progress)(void *comm, zr_error *); /* [use] advance what was submitted, never wait; NULL: needs none */
  /* [use] Memory that peers may read in place, zeroed, 64-byte aligned at least; lives until mem_free or close. NULL
   * slots: the host's own memory is as good. */
  zr_code (*mem_alloc)(void *comm, uint64_t bytes, uint64_t align, uint32_t flags, void **out, zr_error *);
  void (*mem_free)(void *comm, void *memory); /* [use] accepts NULL */
  void (*abort)(void *comm);                  /* [any] every call that waits returns ZR_CANCELLED, now and later */
} zr_communicator_api;

/* The host's wrapped communicator, lent to strategies and optimizers: sequence-numbered, timed out, counted. Frozen. */
typedef struct zr_comm_ref {
  const zr_communicator_api *api; /* only submit, caps and progress may be called */
  void *comm;
  int32_t rank, world;
} zr_comm_ref;
#endif
