/* The strategy "@ID@": every rank holds all weights, gradients and optimizer states, and one all-reduce after each
 * backward sums the gradients of all parameters. */
#include <stdlib.h>

#include "zr/abi/strategy.h"
#include "zr/c.h"

typedef struct plugin {
  const zr_host* host;
  const zr_plan_in* in; /* of bind(); lives as long as the instance */
  int64_t* begin;       /* where each trainable parameter begins in the buffers of gradients */
  zr_view gradients, sums;
  zr_comm_ref comm;
} plugin;

static zr_code create(const zr_host* host, const zr_config* config, void** self, zr_error* error) {
  plugin* me = calloc(1, sizeof *me);
  (void)config;
  if (!me) return zr_fail(error, ZR_NOMEM, 0, "no memory for the strategy");
  me->host = host;
  *self = me;
  return ZR_OK;
}
static void destroy(void* self) {
  plugin* me = self;
  if (me) free(me->begin);
  free(me);
}

static zr_code describe(void* self, zr_strategy_desc* out, zr_error* error) {
  (void)self, (void)error;
  zr_strategy_desc desc = {.device_types = 1u << ZR_DEVICE_CPU};
  ZR_WRITE_OUTPUT(out, desc);
  return ZR_OK;
}

/* Frozen parameters have weights only. */
static int has_role(const zr_param* param, uint32_t role) {
  return role == ZR_ROLE_WEIGHT || !(param->flags & ZR_PARAM_FROZEN);
}
/* Lays the parameters of a role one after the other, writes where each begins, and returns the elements of all. */
static int64_t layout(const zr_plan_in* in, uint32_t role, int64_t* begin) {
  int64_t elements = 0;
  for (uint32_t p = 0; p < in->n_params; ++p) {
    if (begin) begin[p] = elements;
    if (has_role(in->params[p], role)) elements += zr_round_up(in->params[p]->count, in->align);
  }
  return elements;
}
static void emit_buffer(const zr_plan_in* in, const zr_plan_sink* sink, uint32_t role, const char* tag,
                        zr_dtype dtype) {
  const zr_buffer buffer = {
      .size = sizeof buffer, .role = role, .tag = tag, .elements = layout(in, role, NULL), .dtype = dtype};
  sink->buffer(sink->ctx, &buffer);
}
/* A parameter without elements has no piece. */
static void emit_pieces(const zr_plan_in* in, const zr_plan_sink* sink, uint32_t role, uint32_t buffer) {
  int64_t begin = 0;
  for (uint32_t p = 0; p < in->n_params; ++p) {
    if (!has_role(in->params[p], role)) continue;
    const zr_piece piece = {.size = sizeof piece,
                            .role = role,
                            .param = p,
                            .buffer = buffer,
                            .count = in->params[p]->count,
                            .offset = begin};
    if (piece.count > 0) sink->piece(sink->ctx, &piece);
    begin += zr_round_up(piece.count, in->align);
  }
}

/* Pure: the host also asks for plans of other ranks and worlds. First all buffers, then the pieces of each role. */
static zr_code plan(void* self, const zr_plan_in* in, const zr_plan_sink* sink, zr_error* error) {
  (void)self, (void)error;
  emit_buffer(in, sink, ZR_ROLE_WEIGHT, "weights", in->weight_dtype);
  emit_buffer(in, sink, ZR_ROLE_GRAD, "gradients", in->grad_dtype);
  emit_buffer(in, sink, ZR_ROLE_REDUCED_GRAD, "reduced gradients", in->reduced_grad_dtype);
  emit_pieces(in, sink, ZR_ROLE_WEIGHT, 0);
  emit_pieces(in, sink, ZR_ROLE_REDUCED_GRAD, 2);
  return ZR_OK;
}

static zr_code bind(void* self, const zr_plan_in* in, const zr_bind* bound, zr_error* error) {
  plugin* me = self;
  me->begin = calloc(in->n_params + 1u, sizeof *me->begin);
  if (!me->begin) return zr_fail(error, ZR_NOMEM, 0, "no memory for the layout of %u parameters", in->n_params);
  layout(in, ZR_ROLE_REDUCED_GRAD, me->begin);
  me->in = in;
  me->gradients = bound->buffers[1];
  me->sums = bound->buffers[2];
  me->comm = bound->comm;
  return ZR_OK;
}

/* Where autograd writes the gradient of a parameter, from element *first on. */
static zr_code grad_destination(void* self, uint32_t param, int64_t* first, const zr_use* use, zr_view* dst,
                                zr_error* error) {
  const plugin* me = self;
  (void)use, (void)error;
  *dst = zr_part(me->gradients, me->begin[param] + *first, me->in->params[param]->count - *first);
  return ZR_OK;
}
static zr_code grad_ready(void* self, uint32_t param, int64_t first, int64_t count, const zr_use* use,
                          zr_error* error) {
  (void)self, (void)param, (void)first, (void)count, (void)use, (void)error;
  return ZR_OK;
}

/* Adds the gradients of this backward to the sums; the first micro-step of a step begins them. */
static zr_code event(void* self, uint32_t kind, const zr_use* use, zr_error* error) {
  plugin* me = self;
  if (kind != ZR_BACKWARD_END || me->gradients.count == 0) return ZR_OK;
  const zr_coll coll = {.size = sizeof coll,
                        .op = ZR_ALL_REDUCE,
                        .reduce = ZR_SUM,
                        .flags = use->micro > 0 ? ZR_COLL_ACCUMULATE : 0,
                        .src = me->gradients,
                        .dst = me->sums,
                        .label = "all gradients"};
  return me->comm.api->submit(me->comm.comm, &coll, NULL, NULL, error);
}

/* For grads_finish and updated, where nothing is left to do: the sums are complete, and every rank has updated all
 * weights. */
static zr_code nothing_left(void* self, const zr_use* use, zr_error* error) {
  (void)error;
  return zr_complete(((plugin*)self)->host, use->done);
}

static const zr_strategy_api api = {.size = sizeof api,
                                    .describe = describe,
                                    .plan = plan,
                                    .bind = bind,
                                    .grad_destination = grad_destination,
                                    .grad_ready = grad_ready,
                                    .event = event,
                                    .grads_finish = nothing_left,
                                    .updated = nothing_left};
static const zr_component component = {.size = sizeof component,
                                       .id = "@ID@",
                                       .kind = "zr.strategy/1",
                                       .version = "0.1.0",
                                       .api = &api,
                                       .create = create,
                                       .destroy = destroy,
                                       .description = "every rank has all weights, gradients and optimizer states"};
ZR_MODULE_C(strategy, "@ID@", "@VENDOR@", "0.1.0", component);
