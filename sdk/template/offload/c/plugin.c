/* The offload tier "@ID@": allocations are memory of malloc(). */
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "zr/abi/offload.h"
#include "zr/c.h"

typedef struct plugin {
  const zr_host* host;
  uint64_t capacity, used; /* bytes */
} plugin;

typedef struct block { /* an allocation; its id is its address */
  uint64_t bytes;
  _Alignas(max_align_t) char data[];
} block;
static block* block_of(uint64_t allocation) { return (block*)(uintptr_t)allocation; }

static zr_code create(const zr_host* host, const zr_config* config, void** self, zr_error* error) {
  const zr_config_service* values = host->service(host, "zr.host.config/1");
  int64_t capacity;
  if (!values) return zr_fail(error, ZR_UNSUPPORTED, 0, "the host does not offer zr.host.config/1");
  const zr_code code = values->get_int(config, "capacity", &capacity);
  if (code != ZR_OK) return zr_fail(error, code, 0, "cannot read the key capacity");
  plugin* me = calloc(1, sizeof *me);
  if (!me) return zr_fail(error, ZR_NOMEM, 0, "no memory for the tier");
  me->host = host;
  me->capacity = (uint64_t)capacity;
  *self = me;
  return ZR_OK;
}
static void destroy(void* self) { free(self); }

static zr_code caps(void* self, zr_offload_caps* out, zr_error* error) {
  const plugin* me = self;
  (void)error;
  zr_offload_caps caps = {
      .capacity = me->capacity, .io_align = 1, .io_bytes = 1 << 20, .io_depth = 1, .device_types = 1u << ZR_DEVICE_CPU};
  ZR_WRITE_OUTPUT(out, caps);
  return ZR_OK;
}
static zr_code open(void* self, zr_error* error) {
  (void)self, (void)error;
  return ZR_OK;
}

static zr_code reserve(void* self, uint64_t bytes, const char* tag, uint64_t* allocation, zr_error* error) {
  plugin* me = self;
  const unsigned long left = me->capacity - me->used;
  if (bytes > left)
    return zr_fail(error, ZR_NOMEM, 0, "cannot store %lu bytes of '%s': %lu bytes are left; increase capacity", bytes,
                   tag, left);
  block* made = malloc(sizeof *made + bytes);
  if (!made) return zr_fail(error, ZR_NOMEM, 0, "no memory for %lu bytes of '%s'", bytes, tag);
  made->bytes = bytes;
  me->used += bytes;
  *allocation = (uintptr_t)made;
  return ZR_OK;
}
static void release(void* self, uint64_t allocation) {
  ((plugin*)self)->used -= block_of(allocation)->bytes;
  free(block_of(allocation));
}

/* Checks all transfers before it starts the first. */
static zr_code check(const zr_transfer* transfers, uint32_t n, const zr_stream* stream, zr_error* error) {
  if (stream) return zr_fail(error, ZR_UNSUPPORTED, 0, "transfers on streams are not supported");
  for (uint32_t i = 0; i < n; ++i) {
    const uint64_t size = block_of(transfers[i].allocation)->bytes, first = transfers[i].offset;
    if (first > size || (uint64_t)transfers[i].memory.count > size - first)
      return zr_fail(error, ZR_INVALID, i, "transfer %u exceeds its allocation", i);
  }
  return ZR_OK;
}
static zr_code write(void* self, const zr_transfer* transfers, uint32_t n, zr_stream* stream, zr_done* done,
                     zr_error* error) {
  const zr_code code = check(transfers, n, stream, error);
  if (code != ZR_OK) return code;
  for (uint32_t i = 0; i < n; ++i)
    if (transfers[i].memory.count > 0)
      memcpy(block_of(transfers[i].allocation)->data + transfers[i].offset, transfers[i].memory.data,
             (size_t)transfers[i].memory.count);
  return zr_complete(((plugin*)self)->host, done);
}
static zr_code read(void* self, const zr_transfer* transfers, uint32_t n, zr_stream* stream, zr_done* done,
                    zr_error* error) {
  const zr_code code = check(transfers, n, stream, error);
  if (code != ZR_OK) return code;
  for (uint32_t i = 0; i < n; ++i)
    if (transfers[i].memory.count > 0)
      memcpy(transfers[i].memory.data, block_of(transfers[i].allocation)->data + transfers[i].offset,
             (size_t)transfers[i].memory.count);
  return zr_complete(((plugin*)self)->host, done);
}

static const zr_key capacity_key = {.size = sizeof(zr_key),
                                    .type = ZR_KEY_BYTES,
                                    .name = "capacity",
                                    .def = "\"1GiB\"",
                                    .min = 0,
                                    .max = 1e15,
                                    .meaning = "largest number of bytes that a rank stores"};
static const zr_key* const keys[] = {&capacity_key};
static const zr_offload_api api = {.size = sizeof api,
                                   .caps = caps,
                                   .open = open,
                                   .reserve = reserve,
                                   .release = release,
                                   .write = write,
                                   .read = read};
static const zr_component component = {.size = sizeof component,
                                       .id = "@ID@",
                                       .kind = "zr.offload/1",
                                       .version = "0.1.0",
                                       .api = &api,
                                       .create = create,
                                       .destroy = destroy,
                                       .keys = keys,
                                       .n_keys = 1};
ZR_MODULE_C(offload, "@ID@", "@VENDOR@", "0.1.0", component);
