/* Draft: optimizers that update memory of a device. The host keeps weights, gradients and optimizer states on the
 * device of the job if the strategy and all optimizers accept its memory and streams, and each optimizer has the
 * extension below; otherwise it keeps them in host memory and calls step() without a stream. */
#ifndef ZR_ABI_DRAFT_DEVICE_H
#define ZR_ABI_DRAFT_DEVICE_H
#include "zr/abi/draft/draft.h"
#include "zr/abi/optimizer.h"

/* A point of a stream, for other streams that wait for it. */
typedef struct zr_event_s zr_event;

/* "zr.host.stream/1": the streams that the host passes to plug-ins, and those that it makes for them. A plug-in that
 * works on a stream of its own first lets it wait for an event of the stream that it got, and in the end lets that one
 * wait for an event of its own: its outputs are then complete in the order of the stream that it got. */
typedef struct zr_stream_service {
  uint32_t size, rsv;

  /* [any] The handle of the device's own library, such as a cudaStream_t; NULL may be a valid handle. Valid as long as
   * the instance. */
  void *(*native)(zr_stream *);

  /* [any] The device of the stream. */
  zr_device (*device)(zr_stream *);

  /* [step] [use] Makes a stream of the same device. Its operations run at the same time as those of other streams,
   * except for waits. ZR_UNSUPPORTED: the host makes no streams of this device. */
  zr_code (*create)(zr_stream *like, zr_stream **out, zr_error *);

  /* [control] [step] [use] Frees a stream that create() returned. Operations that are enqueued on it still run. Accepts
   * NULL. */
  void (*destroy)(zr_stream *);

  /* [step] [use] *event becomes the current end of the stream. On entry, *event is NULL, or an event that the call
   * frees. */
  zr_code (*record)(zr_stream *, zr_event **event, zr_error *);

  /* [step] [use] What is enqueued on the stream later begins after the event. The call does not wait for it. The event
   * may then be recorded again, or freed. */
  zr_code (*wait)(zr_stream *, zr_event *, zr_error *);

  /* [control] [step] [use] Frees an event that record() returned. Accepts NULL. */
  void (*event_free)(zr_event *);
} zr_stream_service;

/* Device types in addition to those of base.h. */
enum {
  ZR_DEVICE_EXTENSION = 12 /* without a number of its own in DLPack: backends that libtorch calls PrivateUse1 */
};

/* Extension "zr.optimizer.device/1". */
typedef struct zr_optimizer_device_api {
  uint32_t size, rsv;

  /* [step] Enqueues on the stream: for every block of `block` elements of every view, the sum of the squares of its
   * elements, which goes to the next element of sums (fp64). The last block of a view may be shorter. The order of
   * operations is that of the host (docs/numerics.md, section 7): element i of a block is squared in fp64, which is
   * exact, and added to sum i % 16, in ascending order of i, from +0 on; then the 16 sums are added in ascending order,
   * from +0 on. The views are fp32; they and `sums` are on the device of the stream. */
  zr_code (*norm_blocks)(void *self, const zr_view *values, uint32_t n, int64_t block, const zr_view *sums, zr_stream *,
                         zr_error *);
} zr_optimizer_device_api;
#endif
