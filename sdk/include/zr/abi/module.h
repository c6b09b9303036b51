/* What a plug-in library exports: one pure function, and data tags that name its kinds without running it. */
#ifndef ZR_ABI_MODULE_H
#define ZR_ABI_MODULE_H
#include "zr/abi/base.h"
#include "zr/abi/host.h"

/* Kinds: "zr.strategy/1", "zr.communicator/1", "zr.optimizer/1", "zr.offload/1". */
typedef struct zr_component { /* static, lives as long as the process */
  uint32_t size, flags;
  const char *id; /* the TOML name, unique per kind */
  const char *kind;
  const char *version; /* of the component, free text */
  const void *api;     /* zr_strategy_api, zr_communicator_api, zr_optimizer_api or zr_offload_api, by kind */
  /* [control] On success *self is owned by the host and goes to destroy() once. config: this component's table, lives
   * until create returns. host lives as long as the process. */
  zr_code (*create)(const zr_host *host, const zr_config *config, void **self, zr_error *error);
  void (*destroy)(void *self); /* [control] accepts NULL */
  /* [any] A table of a later or a vendor's revision, by id; NULL for an id that is not known. The slot may be NULL. */
  const void *(*extension)(void *self, const char *id);
  const zr_key *const *keys; /* the schema of its table; NULL if n_keys is 0 */
  uint32_t n_keys, rsv;
} zr_component;

typedef struct zr_module { /* static, lives as long as the process */
  uint32_t size;
  uint16_t built_minor; /* the ABI minor it was built for */
  uint16_t need_minor;  /* the lowest host minor it runs with */
  const char *name, *vendor, *version;
  const char *build; /* compiler and flags, free text */
  const zr_component *const *components;
  uint32_t n_components, rsv;
  zr_code (*startup)(const zr_host *host, zr_error *error); /* [control] before the first create; or NULL */
  void (*shutdown)(void);                                   /* [control] after the last destroy; or NULL */
} zr_module;

#ifdef __cplusplus
extern "C" {
#endif
/* [control] The only function exported. Pure: may be called first, and any number of times; never NULL. */
ZR_EXPORT const zr_module *zr_module_v1(uint32_t host_minor);
#ifdef __cplusplus
}
#endif

/* Data symbols that a file is judged by without running it: zr_tag_abi_0_3 (major, minor it needs) and one
 * zr_tag_kind_<kind> per kind it holds, all in the section "zrabi". */
#ifdef __cplusplus
#define ZR_TAG(name)                                                                        \
  extern "C" ZR_EXPORT __attribute__((section("zrabi"))) const unsigned char zr_tag_##name; \
  extern "C" __attribute__((used)) const unsigned char zr_tag_##name = 1
#else
#define ZR_TAG(name) ZR_EXPORT __attribute__((section("zrabi"), used)) const unsigned char zr_tag_##name = 1
#endif
#endif
