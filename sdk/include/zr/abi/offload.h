/* Offload role, "zr.offload/1": one tier of memory or disk that stores bytes. The host places, pages and evicts. */
#ifndef ZR_ABI_OFFLOAD_H
#define ZR_ABI_OFFLOAD_H
#include "zr/abi/base.h"

enum { ZR_TIER_MAPPABLE = 1u << 0, ZR_TIER_ASYNC = 1u << 1 };
typedef struct zr_offload_caps { /* out: callee writes at most `size` bytes */
  uint32_t size, flags;
  uint64_t capacity;     /* bytes; 0: not known */
  uint64_t io_align;     /* offsets, lengths and addresses of transfers are multiples of this */
  uint64_t io_bytes;     /* the transfer size it likes best */
  uint64_t device_types; /* bit i: memory of DLPack device i can be read and written directly */
} zr_offload_caps;

typedef struct zr_transfer { /* frozen */
  uint64_t slot, offset;     /* bytes */
  zr_view memory;            /* U8, on a device of device_types */
} zr_transfer;

struct zr_offload_api;
typedef struct zr_offload_ref { /* frozen: the tier below, for tiers that compress or encrypt */
  const struct zr_offload_api *api;
  void *self;
} zr_offload_ref;

typedef struct zr_offload_api {
  uint32_t size, rsv;
  zr_code (*open)(void *self, const zr_offload_ref *below, zr_error *); /* [control] below: or NULL */
  zr_code (*caps)(void *self, zr_offload_caps *, zr_error *);           /* [any] */
  /* [step] content undefined */
  zr_code (*reserve)(void *self, uint64_t bytes, const char *tag, uint64_t *slot, zr_error *);
  void (*release)(void *self, uint64_t slot); /* [step] no transfer is under way */
  /* [worker] done NULL: complete on return. Else the list may go when the call returns, memory stays until done
   * resolves; one done for all n, a failure's `native` is the index that failed. Short transfers are finished by the
   * tier. */
  zr_code (*write)(void *self, const zr_transfer *, uint32_t n, zr_stream *, zr_done *, zr_error *);
  /* [worker] likewise: memory is written from the slot, and is whole when done resolves. */
  zr_code (*read)(void *self, const zr_transfer *, uint32_t n, zr_stream *, zr_done *, zr_error *);
  /* [step] lives until unmap; NULL unless MAPPABLE */
  zr_code (*map)(void *self, uint64_t slot, zr_view *out, zr_error *);
  void (*unmap)(void *self, uint64_t slot); /* [step] NULL unless MAPPABLE */
  zr_code (*flush)(void *self, zr_error *); /* [step] what was written survives a process kill */
} zr_offload_api;
#endif
