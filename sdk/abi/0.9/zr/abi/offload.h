/* Offload tiers, "zr.offload/1": memory or disk that stores bytes. The host decides what is stored on which tier, and
 * when it moves. */
#ifndef ZR_ABI_OFFLOAD_H
#define ZR_ABI_OFFLOAD_H
#include "zr/abi/base.h"

enum {
  ZR_TIER_MAPPABLE = 1u << 0, /* map() and unmap() are offered */
  ZR_TIER_ASYNC = 1u << 1,    /* write() and read() with a completion return before the transfers are complete */
  ZR_TIER_STREAMS = 1u << 2   /* write() and read() accept streams */
};
typedef struct zr_offload_caps { /* output: the callee writes at most `size` bytes */
  uint32_t size, flags;          /* flags: ZR_TIER_* */
  uint64_t capacity;             /* bytes; 0: unknown */
  uint64_t io_align; /* power of two, at most 2 MiB: offsets, lengths and addresses of transfers are multiples; or 0 */
  uint64_t io_bytes; /* preferred size of a transfer, in bytes */
  uint64_t io_depth; /* preferred number of transfers in flight */
  uint64_t device_types;       /* bit i: transfers from memory of DLPack device type i; bit 1 (CPU) is required */
  uint64_t host_bytes_per_mib; /* bytes of host memory that the tier itself needs per MiB stored */
} zr_offload_caps;

typedef struct zr_transfer {   /* frozen */
  uint64_t allocation, offset; /* offset: bytes from the start of the allocation */
  zr_view memory;              /* U8, on a device of device_types */
} zr_transfer;

typedef struct zr_offload_api {
  uint32_t size, rsv;

  /* [io] Reports capabilities, also before open(), because the plan uses them. Only `capacity` may change later. */
  zr_code (*caps)(void *self, zr_offload_caps *, zr_error *);

  /* [control] Opens the tier; called at most once. */
  zr_code (*open)(void *self, zr_error *);

  /* [step] Allocates bytes. On success the space is reserved: a disk that is too small fails here and not in
   * write(). The content is undefined. The id differs from those of all other allocations that are not released. */
  zr_code (*reserve)(void *self, uint64_t bytes, const char *tag, uint64_t *allocation, zr_error *);

  /* [step] Frees an allocation. No transfer of it is in flight. */
  void (*release)(void *self, uint64_t allocation);

  /* [io] Copies memory to allocations, n transfers; see "Streams" in zr/abi/base.h. Several calls may run at once. One
   * completion covers all n transfers; if it resolves with an error, `native` is the index of the transfer that failed.
   * The list of transfers is valid only until the call returns. The tier itself completes partial reads and writes. If
   * the tier's own queue is full, the call waits. Transfers of the same bytes that are in flight at the same time have
   * no order. ZR_INVALID if a transfer is not within an allocation; then no transfer of the
   * call needs to be done. */
  zr_code (*write)(void *self, const zr_transfer *, uint32_t n, zr_stream *, zr_done *, zr_error *);

  /* [io] Copies from allocations to memory, under the same rules; the memory is complete when the completion resolves.
   * ZR_IO if the bytes differ from those last written. */
  zr_code (*read)(void *self, const zr_transfer *, uint32_t n, zr_stream *, zr_done *, zr_error *);

  /* [step] Returns the allocation's own memory, valid until unmap(): a U8 view of all its bytes, aligned to io_align
   * and to 64 bytes. NULL unless ZR_TIER_MAPPABLE. */
  zr_code (*map)(void *self, uint64_t allocation, zr_view *out, zr_error *);

  /* [step] Ends a map(). NULL unless ZR_TIER_MAPPABLE. */
  void (*unmap)(void *self, uint64_t allocation);

  /* [step] Announces memory that many transfers will use, until unreg(), so that the tier can prepare it. reg and unreg
   * are both NULL, or neither. The host logs a failure; transfers are then slower. */
  zr_code (*reg)(void *self, const zr_view *memory, zr_error *);

  /* [step] Ends a reg(). No transfer of the memory is in flight. */
  void (*unreg)(void *self, const zr_view *memory);
} zr_offload_api;

/* For ZR_SIZE_0_9. */
enum {
  zr_offload_caps_size_0_9 = 56, /* bytes */
  zr_offload_api_size_0_9 = 88   /* bytes */
};
#endif
