/* The zoo's optimizer in C11: SGD with momentum, in the order of operations of plugins/optimizers/sgd. */
#include <math.h>
#include <stdlib.h>

#include "zr/abi/module.h"
#include "zr/abi/optimizer.h"
#include "zr/c.h"

typedef struct sgd {
  const zr_host* host;
  float momentum;
} sgd;

static zr_code create(const zr_host* host, const zr_config* config, void** self, zr_error* error) {
  const zr_config_service* values = host->service(host, "zr.host.config/1");
  double momentum;
  if (!values) return zr_fail(error, ZR_UNSUPPORTED, 0, "the host does not offer zr.host.config/1");
  const zr_code code = values->get_float(config, "momentum", &momentum);
  if (code != ZR_OK) return zr_fail(error, code, 0, "cannot read the key momentum");
  sgd* made = malloc(sizeof *made);
  if (!made) return zr_fail(error, ZR_NOMEM, 0, "no memory for the optimizer");
  made->host = host;
  made->momentum = (float)momentum;
  *self = made;
  return ZR_OK;
}

static void destroy(void* self) { free(self); }

static const void* extension(const char* id) {
  (void)id;
  return NULL;
}

static zr_code add_group(void* self, uint32_t group, const zr_config* config, zr_error* error) {
  (void)self, (void)group, (void)config, (void)error; /* no key of this optimizer is per group */
  return ZR_OK;
}

static zr_code describe(void* self, const zr_param* param, zr_optimizer_desc* out, zr_error* error) {
  static const zr_slot slots[] = {{"momentum_buffer", ZR_F32, ZR_SLOT_LIKE_PARAM, 0, 0}};
  (void)self, (void)param, (void)error;
  zr_optimizer_desc desc = {0};
  desc.size = out->size < sizeof desc ? out->size : (uint32_t)sizeof desc;
  desc.granularity = ZR_ELEMENTWISE;
  desc.n_slots = 1;
  desc.slots = slots;
  desc.device_types = 1u << ZR_DEVICE_CPU;
  __builtin_memcpy(out, &desc, desc.size);
  return ZR_OK;
}

static zr_code step(void* self, const zr_step* job, const zr_update_slice* const* slices, uint32_t n, zr_stream* stream,
                    zr_done* done, zr_error* error) {
  const sgd* constants = self;
  if (stream) return zr_fail(error, ZR_UNSUPPORTED, 0, "updates on streams are not supported");
  for (uint32_t s = 0; s < n; ++s) {
    const zr_dtype dtype = slices[s]->weight.dtype;
    if (dtype != ZR_F32 && dtype != ZR_BF16 && dtype != ZR_F16)
      return zr_fail(error, ZR_INVALID, 0, "parameter %s: weights of dtype %d", slices[s]->name, (int)dtype);
  }
  for (uint32_t s = 0; s < n; ++s) {
    const zr_update_slice* slice = slices[s];
    const zr_dtype dtype = slice->weight.dtype;
    float *weight = dtype == ZR_F32 ? slice->weight.data : slice->master.data, *buffer = slice->slots[0].data;
    uint16_t* rounded = slice->weight.data; /* of bf16 and fp16 weights */
    const float* grad = slice->grad.data;
    const float lr = (float)slice->lr;
    for (int64_t i = 0; i < slice->count; ++i) {
      const float g = grad[i] * job->grad_mul;
      buffer[i] = slice->step == 1 ? g : buffer[i] * constants->momentum + g;
      weight[i] = weight[i] - buffer[i] * lr;
      if (dtype != ZR_F32) rounded[i] = dtype == ZR_BF16 ? zr_to_bf16(weight[i]) : zr_to_f16(weight[i]);
    }
  }
  return zr_complete(constants->host, done);
}

static const zr_key momentum_key = {.size = sizeof(zr_key),
                                    .type = ZR_KEY_FLOAT,
                                    .name = "momentum",
                                    .def = "0.9",
                                    .min = 0,
                                    .max = INFINITY,
                                    .meaning = "momentum factor"};
static const zr_key* const keys[] = {&momentum_key};
static const zr_optimizer_api api = {sizeof api, 0, add_group, describe, step};
static const zr_component component = {.size = sizeof component,
                                       .id = "sgd",
                                       .kind = "zr.optimizer/1",
                                       .version = "0.9",
                                       .api = &api,
                                       .create = create,
                                       .destroy = destroy,
                                       .extension = extension,
                                       .keys = keys,
                                       .n_keys = 1,
                                       .description = "gradient descent with momentum",
                                       .license = "Apache-2.0"};
static const zr_component* const components[] = {&component};
static const zr_module module = {
    sizeof module, ZR_ABI_MINOR, ZR_TARGET_MINOR, "sgd", "zoo", "0.9", __VERSION__, components, 1, 0, NULL, NULL};

ZR_TAG(ZR_ABI_TAG);
ZR_TAG(kind_optimizer_1);
ZR_ID_TAG(optimizer, "sgd");

const zr_module* zr_module_v1(uint32_t host_minor) {
  (void)host_minor;
  return &module;
}
