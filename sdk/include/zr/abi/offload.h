/* Offload role, "zr.offload/1": one tier of memory or disk that stores bytes. The host places, pages and evicts. */
#ifndef ZR_ABI_OFFLOAD_H
#define ZR_ABI_OFFLOAD_H
#include "zr/abi/base.h"

enum { ZR_TIER_MAPPABLE = 1u << 0, ZR_TIER_ASYNC = 1u << 1 };
typedef struct zr_offload_caps { /* out: callee writes at most `size` bytes */
  uint32_t size, flags;
  uint64_t capacity;           /* bytes; 0: not known */
  uint64_t io_align;           /* offsets, lengths and addresses of transfers are multiples of this, a power of two */
  uint64_t io_bytes;           /* the transfer size it likes best */
  uint64_t io_depth;           /* how many of them under way at a time it likes best */
  uint64_t device_types;       /* bit i: memory of DLPack device i can be read and written directly */
  uint64_t host_bytes_per_mib; /* host memory of its own that it takes for each MiB it stores, in bytes */
} zr_offload_caps;

typedef struct zr_transfer {   /* frozen */
  uint64_t allocation, offset; /* bytes */
  zr_view memory;              /* U8, on a device of device_types */
} zr_transfer;

struct zr_offload_api;
typedef struct zr_offload_ref { /* frozen: the tier below, for tiers that compress or encrypt */
  const struct zr_offload_api *api;
  void *self;
} zr_offload_ref;

typedef struct zr_offload_api {
  uint32_t size, rsv;
  zr_code (*open)(void *self, const zr_offload_ref *below, zr_error *); /* [control] once; below: or NULL */
  zr_code (*caps)(void *self, zr_offload_caps *, zr_error *);           /* [any] after open */
  /* [step] The bytes are the slot's own from now on: a disk that has not got them says so here. Content undefined. */
  zr_code (*reserve)(void *self, uint64_t bytes, const char *tag, uint64_t *allocation, zr_error *);
  void (*release)(void *self, uint64_t allocation); /* [step] no transfer is under way */
  /* [any] Several at once. done NULL: complete on return. Else the list may go when the call returns, memory stays
   * until done resolves; one done for all n, a failure's `native` is the index that failed. Short transfers are
   * finished by the tier; when its own room is taken the call waits. Transfers of the same bytes of a slot that are
   * under way at a time are in no order. */
  zr_code (*write)(void *self, const zr_transfer *, uint32_t n, zr_stream *, zr_done *, zr_error *);
  /* [any] likewise: memory is written from the slot, and is whole when done resolves. Bytes that are not those last
   * written: ZR_IO. */
  zr_code (*read)(void *self, const zr_transfer *, uint32_t n, zr_stream *, zr_done *, zr_error *);
  /* [step] lives until unmap; NULL unless MAPPABLE */
  zr_code (*map)(void *self, uint64_t allocation, zr_view *out, zr_error *);
  void (*unmap)(void *self, uint64_t allocation); /* [step] NULL unless MAPPABLE */
  zr_code (*flush)(void *self, zr_error *);       /* [step] NULL, or: what was written survives a process kill */
  /* [step] Memory that many transfers will use, until unreg: the tier may prepare it. Both NULL, or neither. A failure
   * is told and means slower transfers. */
  zr_code (*reg)(void *self, const zr_view *memory, zr_error *);
  void (*unreg)(void *self, const zr_view *memory); /* [step] no transfer is under way */
} zr_offload_api;
#endif
