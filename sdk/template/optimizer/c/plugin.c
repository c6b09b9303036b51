/* The optimizer "@ID@": gradient descent with momentum. For a gradient g, momentum buffer b, weight w and learning rate
 * lr, in fp32 and in this order (each product and sum is rounded once):
 *
 *   b <- b momentum + g     (at the first update: b <- g)
 *   w <- w - b lr */
#include <stdlib.h>

#include "zr/abi/optimizer.h"
#include "zr/c.h"

typedef struct plugin {
  const zr_host* host;
  const zr_config_service* config;
  float* momentum; /* by parameter group */
  uint32_t n_groups;
} plugin;

/* The host adds groups in order; group 0 has the config of create(). */
static zr_code add_group(void* self, uint32_t group, const zr_config* config, zr_error* error) {
  plugin* me = self;
  double momentum;
  const zr_code code = me->config->get_float(config, "momentum", &momentum);
  if (code != ZR_OK) return zr_fail(error, code, 0, "cannot read the key momentum");
  float* longer = realloc(me->momentum, (group + 1) * sizeof *longer);
  if (!longer) return zr_fail(error, ZR_NOMEM, 0, "no memory for parameter group %u", group);
  longer[group] = (float)momentum;
  me->momentum = longer;
  me->n_groups = group + 1;
  return ZR_OK;
}

static void destroy(void* self) {
  plugin* me = self;
  if (me) free(me->momentum);
  free(me);
}

static zr_code create(const zr_host* host, const zr_config* config, void** self, zr_error* error) {
  plugin* me = calloc(1, sizeof *me);
  if (!me) return zr_fail(error, ZR_NOMEM, 0, "no memory for the optimizer");
  me->host = host;
  me->config = host->service(host, "zr.host.config/1");
  const zr_code code = me->config ? add_group(me, 0, config, error)
                                  : zr_fail(error, ZR_UNSUPPORTED, 0, "the host does not offer zr.host.config/1");
  if (code == ZR_OK)
    *self = me;
  else
    destroy(me);
  return code;
}

static zr_code describe(void* self, const zr_param* param, zr_optimizer_desc* out, zr_error* error) {
  static const zr_slot slots[] = {{"momentum_buffer", ZR_F32, ZR_SLOT_LIKE_PARAM, 0, 0}};
  (void)self, (void)param, (void)error;
  zr_optimizer_desc desc = {
      .granularity = ZR_ELEMENTWISE, .n_slots = 1, .slots = slots, .device_types = 1u << ZR_DEVICE_CPU};
  ZR_WRITE_OUTPUT(out, desc);
  return ZR_OK;
}

static void update(float momentum, float grad_mul, const zr_update_slice* slice) {
  const int copies = slice->weight.dtype != ZR_F32; /* 16-bit weights are copies of fp32 master weights */
  float *weight = copies ? slice->master.data : slice->weight.data, *buffer = slice->slots[0].data;
  const float *grads = slice->grad.data, lr = (float)slice->lr;
  uint16_t* out = slice->weight.data;
  for (int64_t i = 0; i < slice->count; ++i) {
    const float grad = grads[i] * grad_mul;
    buffer[i] = slice->step == 1 ? grad : buffer[i] * momentum + grad;
    weight[i] -= buffer[i] * lr;
    if (copies) out[i] = slice->weight.dtype == ZR_BF16 ? zr_to_bf16(weight[i]) : zr_to_f16(weight[i]);
  }
}

static zr_code step(void* self, const zr_step* job, const zr_update_slice* const* slices, uint32_t n, zr_stream* stream,
                    zr_done* done, zr_error* error) {
  const plugin* me = self;
  if (stream) return zr_fail(error, ZR_UNSUPPORTED, 0, "updates on streams are not supported");
  for (uint32_t i = 0; i < n; ++i) {
    const zr_dtype dtype = slices[i]->weight.dtype;
    if (slices[i]->group >= me->n_groups || (dtype != ZR_F32 && dtype != ZR_BF16 && dtype != ZR_F16))
      return zr_fail(error, ZR_INVALID, 0, "parameter %s: unknown group or dtype", slices[i]->name);
  }
  for (uint32_t i = 0; i < n; ++i) update(me->momentum[slices[i]->group], job->grad_mul, slices[i]);
  return zr_complete(me->host, done);
}

static const zr_key momentum_key = {.size = sizeof(zr_key),
                                    .type = ZR_KEY_FLOAT,
                                    .flags = ZR_KEY_PER_GROUP,
                                    .name = "momentum",
                                    .def = "0.9",
                                    .min = 0,
                                    .max = 1,
                                    .meaning = "fraction of the previous update that is kept"};
static const zr_key* const keys[] = {&momentum_key};
static const zr_optimizer_api api = {.size = sizeof api, .add_group = add_group, .describe = describe, .step = step};
static const zr_component component = {.size = sizeof component,
                                       .id = "@ID@",
                                       .kind = "zr.optimizer/1",
                                       .version = "0.1.0",
                                       .api = &api,
                                       .create = create,
                                       .destroy = destroy,
                                       .keys = keys,
                                       .n_keys = 1,
                                       .description = "gradient descent with momentum"};
ZR_MODULE_C(optimizer, "@ID@", "@VENDOR@", "0.1.0", component);
