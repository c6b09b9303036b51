/* A strategy 'flat', an optimizer 'adam' and a communicator 'wire' in one C library. They can be chosen and declare
 * keys, but cannot train. */
#include <math.h>

#include "zr/abi/communicator.h"
#include "zr/abi/module.h"
#include "zr/abi/optimizer.h"
#include "zr/abi/strategy.h"

ZR_TAG(ZR_ABI_TAG);
ZR_TAG(kind_strategy_1);
ZR_TAG(kind_optimizer_1);
ZR_TAG(kind_communicator_1);

static int object;
static zr_code create(const zr_host* host, const zr_config* config, void** self, zr_error* error) {
  (void)host, (void)config, (void)error;
  *self = &object;
  return ZR_OK;
}
static void destroy(void* self) { (void)self; }

static zr_code describe_strategy(void* s, zr_strategy_desc* out, zr_error* e) {
  const zr_strategy_desc desc = {.size = sizeof desc, .device_types = 1u << ZR_DEVICE_CPU};
  (void)s, (void)e;
  zr_take(out, out->size, &desc);
  return ZR_OK;
}
static zr_code plan(void* s, const zr_plan_in* in, const zr_plan_sink* sink, zr_error* e) {
  return (void)s, (void)in, (void)sink, (void)e, ZR_OK;
}
static zr_code bind(void* s, const zr_plan_in* in, const zr_bind* b, zr_error* e) {
  return (void)s, (void)in, (void)b, (void)e, ZR_OK;
}
static zr_code grad_destination(void* s, uint32_t p, int64_t* first, const zr_use* use, zr_view* dst, zr_error* e) {
  return (void)s, (void)p, (void)first, (void)use, (void)dst, (void)e, ZR_AGAIN;
}
static zr_code grad_ready(void* s, uint32_t p, int64_t first, int64_t count, const zr_use* use, zr_error* e) {
  return (void)s, (void)p, (void)first, (void)count, (void)use, (void)e, ZR_OK;
}
static zr_code event(void* s, uint32_t kind, const zr_use* use, zr_error* e) {
  return (void)s, (void)kind, (void)use, (void)e, ZR_OK;
}
static zr_code nothing(void* s, const zr_use* use, zr_error* e) { return (void)s, (void)use, (void)e, ZR_OK; }
static const zr_strategy_api strategy = {.size = sizeof strategy,
                                         .describe = describe_strategy,
                                         .plan = plan,
                                         .bind = bind,
                                         .grad_destination = grad_destination,
                                         .grad_ready = grad_ready,
                                         .event = event,
                                         .grads_finish = nothing,
                                         .updated = nothing};

static zr_code describe(void* s, const zr_param* p, zr_optimizer_desc* out, zr_error* e) {
  const zr_optimizer_desc desc = {
      .size = sizeof desc, .granularity = ZR_ELEMENTWISE, .device_types = 1u << ZR_DEVICE_CPU};
  (void)s, (void)p, (void)e;
  zr_take(out, out->size, &desc);
  return ZR_OK;
}
static zr_code add_group(void* s, uint32_t g, const zr_config* c, zr_error* e) {
  return (void)s, (void)g, (void)c, (void)e, ZR_OK;
}
static zr_code step(void* s, const zr_step* st, const zr_update_slice* const* u, uint32_t n, zr_stream* str, zr_done* d,
                    zr_error* e) {
  return (void)s, (void)st, (void)u, (void)n, (void)str, (void)d, (void)e, ZR_OK;
}
static const zr_optimizer_api optimizer = {
    .size = sizeof optimizer, .add_group = add_group, .describe = describe, .step = step};

static zr_code open_comm(void* s, const zr_comm_open* o, void** comm, zr_error* e) {
  return (void)s, (void)o, (void)comm, (void)e, ZR_COMM;
}
static void close_comm(void* comm) { (void)comm; }
static zr_code caps(void* s, zr_comm_caps* out, zr_error* e) {
  const zr_comm_caps all = {.size = sizeof all,
                            .ops = 1u << ZR_ALL_GATHER | 1u << ZR_BARRIER,
                            .dtypes = 1u << ZR_U8,
                            .device_types = 1u << ZR_DEVICE_CPU};
  (void)s, (void)e;
  zr_take(out, out->size, &all);
  return ZR_OK;
}
static zr_code submit(void* comm, const zr_coll* c, zr_stream* s, zr_done* d, zr_error* e) {
  return (void)comm, (void)c, (void)s, (void)d, (void)e, ZR_COMM;
}
static const zr_communicator_api communicator = {.size = sizeof communicator,
                                                 .caps = caps,
                                                 .open = open_comm,
                                                 .close = close_comm,
                                                 .submit = submit,
                                                 .abort = close_comm};

static const zr_key bucket = {sizeof(zr_key), ZR_KEY_BYTES, 0,       0, "bucket_bytes",
                              "\"16MiB\"",    4096,         1 << 30, 0, "gradients that leave together"};
static const zr_key beta1 = {
    sizeof(zr_key), ZR_KEY_FLOAT, ZR_KEY_PER_GROUP, 0, "beta1", "0.9", 0, 1, 0, "decay of the first moment"};
static const zr_key beta2 = {
    sizeof(zr_key), ZR_KEY_FLOAT, ZR_KEY_PER_GROUP, 0, "beta2", "0.999", 0, 1, 0, "decay of the second moment"};
static const zr_key fused = {sizeof(zr_key), ZR_KEY_BOOL, 0,        0, "fused",
                             "true",         -INFINITY,   INFINITY, 0, "one pass over memory"};
static const zr_key* const of_flat[] = {&bucket};
static const zr_key* const of_adam[] = {&beta1, &beta2, &fused};

static const zr_component flat = {.size = sizeof flat,
                                  .id = "flat",
                                  .kind = "zr.strategy/1",
                                  .version = "2.1",
                                  .api = &strategy,
                                  .create = create,
                                  .destroy = destroy,
                                  .keys = of_flat,
                                  .n_keys = 1,
                                  .description = "one shard per rank",
                                  .url = "https://example.org/shards",
                                  .license = "MIT"};
static const zr_component adam = {.size = sizeof adam,
                                  .id = "adam",
                                  .kind = "zr.optimizer/1",
                                  .version = "2.2",
                                  .api = &optimizer,
                                  .create = create,
                                  .destroy = destroy,
                                  .keys = of_adam,
                                  .n_keys = 3};
static const zr_component wire = {.size = sizeof wire,
                                  .id = "wire",
                                  .kind = "zr.communicator/1",
                                  .version = "2.3",
                                  .api = &communicator,
                                  .create = create,
                                  .destroy = destroy};
static const zr_component* const components[] = {&flat, &adam, &wire};

const zr_module* zr_module_v1(uint32_t host_minor) {
  static const zr_module module = {.size = sizeof module,
                                   .built_minor = ZR_ABI_MINOR,
                                   .need_minor = ZR_TARGET_MINOR,
                                   .name = "three",
                                   .vendor = "tests",
                                   .version = "2.0",
                                   .build = "C11",
                                   .components = components,
                                   .n_components = 3};
  (void)host_minor;
  return &module;
}
