/* The offload tier "@ID@": allocations are memory of the process. */
#include <pthread.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "zr/abi/offload.h"
#include "zr/c.h"

typedef struct block { /* an allocation */
  uint64_t bytes;
  _Alignas(max_align_t) char data[];
} block;

typedef struct plugin {
  const zr_host* host;
  uint64_t capacity;
  pthread_mutex_t mutex; /* of what follows: read() and write() run on several threads, also during reserve() */
  uint64_t used;         /* bytes */
  block** blocks;        /* the allocation with the id i + 1, or NULL */
  size_t n_blocks;
} plugin;

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
  pthread_mutex_init(&me->mutex, NULL);
  *self = me;
  return ZR_OK;
}
static void destroy(void* self) {
  plugin* me = self;
  if (!me) return;
  for (size_t i = 0; i < me->n_blocks; ++i) free(me->blocks[i]);
  free(me->blocks);
  pthread_mutex_destroy(&me->mutex);
  free(me);
}

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

/* An unused entry of me->blocks; me->n_blocks if there is no memory for one. With the mutex. */
static size_t unused_entry(plugin* me) {
  size_t i = 0;
  while (i < me->n_blocks && me->blocks[i]) ++i;
  if (i < me->n_blocks) return i;
  block** longer = realloc(me->blocks, (i + 1) * sizeof *longer);
  if (!longer) return i;
  longer[i] = NULL;
  me->blocks = longer;
  me->n_blocks = i + 1;
  return i;
}
static zr_code reserve_locked(plugin* me, uint64_t bytes, const char* tag, uint64_t* allocation, zr_error* error) {
  const unsigned long left = me->capacity - me->used;
  if (bytes > left)
    return zr_fail(error, ZR_NOMEM, 0, "cannot store %lu bytes of '%s': %lu bytes are left; increase capacity", bytes,
                   tag, left);
  const size_t entry = unused_entry(me);
  block* made = entry < me->n_blocks ? malloc(sizeof *made + bytes) : NULL;
  if (!made) return zr_fail(error, ZR_NOMEM, 0, "no memory for %lu bytes of '%s'", bytes, tag);
  made->bytes = bytes;
  me->blocks[entry] = made;
  me->used += bytes;
  *allocation = entry + 1;
  return ZR_OK;
}
static zr_code reserve(void* self, uint64_t bytes, const char* tag, uint64_t* allocation, zr_error* error) {
  plugin* me = self;
  pthread_mutex_lock(&me->mutex);
  const zr_code code = reserve_locked(me, bytes, tag, allocation, error);
  pthread_mutex_unlock(&me->mutex);
  return code;
}
static void release(void* self, uint64_t allocation) {
  plugin* me = self;
  pthread_mutex_lock(&me->mutex);
  block** entry = &me->blocks[allocation - 1];
  me->used -= (*entry)->bytes;
  free(*entry);
  *entry = NULL;
  pthread_mutex_unlock(&me->mutex);
}

/* The stored bytes of a transfer; NULL if it is not within an allocation. */
static char* stored_bytes(plugin* me, const zr_transfer* transfer) {
  pthread_mutex_lock(&me->mutex);
  const uint64_t id = transfer->allocation;
  block* found = id >= 1 && id <= me->n_blocks ? me->blocks[id - 1] : NULL;
  pthread_mutex_unlock(&me->mutex);
  if (!found || transfer->offset > found->bytes || (uint64_t)transfer->memory.count > found->bytes - transfer->offset)
    return NULL;
  return found->data + transfer->offset;
}
/* Checks all transfers before it starts the first. */
static zr_code check(plugin* me, const zr_transfer* transfers, uint32_t n, const zr_stream* stream, zr_error* error) {
  if (stream) return zr_fail(error, ZR_UNSUPPORTED, 0, "transfers on streams are not supported");
  for (uint32_t i = 0; i < n; ++i)
    if (!stored_bytes(me, &transfers[i]))
      return zr_fail(error, ZR_INVALID, i, "transfer %u is not within an allocation", i);
  return ZR_OK;
}
static zr_code write(void* self, const zr_transfer* transfers, uint32_t n, zr_stream* stream, zr_done* done,
                     zr_error* error) {
  plugin* me = self;
  const zr_code code = check(me, transfers, n, stream, error);
  if (code != ZR_OK) return code;
  for (uint32_t i = 0; i < n; ++i)
    if (transfers[i].memory.count > 0)
      memcpy(stored_bytes(me, &transfers[i]), transfers[i].memory.data, (size_t)transfers[i].memory.count);
  return zr_complete(me->host, done);
}
static zr_code read(void* self, const zr_transfer* transfers, uint32_t n, zr_stream* stream, zr_done* done,
                    zr_error* error) {
  plugin* me = self;
  const zr_code code = check(me, transfers, n, stream, error);
  if (code != ZR_OK) return code;
  for (uint32_t i = 0; i < n; ++i)
    if (transfers[i].memory.count > 0)
      memcpy(transfers[i].memory.data, stored_bytes(me, &transfers[i]), (size_t)transfers[i].memory.count);
  return zr_complete(me->host, done);
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
                                       .n_keys = 1,
                                       .description = "memory of the process"};
ZR_MODULE_C(offload, "@ID@", "@VENDOR@", "0.1.0", component);
