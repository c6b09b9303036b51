/* What a plug-in library exports: one pure function, and data symbols (tags) that name its kinds, so that the host can
 * inspect the library without running it. */
#ifndef ZR_ABI_MODULE_H
#define ZR_ABI_MODULE_H
#include "zr/abi/base.h"
#include "zr/abi/host.h"

/* One plug-in. Static: it lives as long as the process. */
typedef struct zr_component {
  uint32_t size, flags;
  const char *id;      /* the name in TOML; unique per kind */
  const char *kind;    /* "zr.strategy/1", "zr.communicator/1", "zr.optimizer/1" or "zr.offload/1" */
  const char *version; /* of the component, free text */
  const void *api;     /* zr_strategy_api, zr_communicator_api, zr_optimizer_api or zr_offload_api, by kind */

  /* [control] Creates an instance. On success the host owns *self and passes it to destroy() once. config is the
   * component's TOML table and is valid until create() returns; host lives as long as the process. */
  zr_code (*create)(const zr_host *host, const zr_config *config, void **self, zr_error *error);

  /* [control] Destroys an instance. Accepts NULL. */
  void (*destroy)(void *self);

  /* [any] Returns a table of a later revision or of a vendor, by id; NULL for an unknown id. The function itself may be
   * NULL. */
  const void *(*extension)(void *self, const char *id);
  const zr_key *const *keys; /* the schema of the component's TOML table; NULL if n_keys is 0 */
  uint32_t n_keys, rsv;
} zr_component;

/* The plug-ins of one library. Static: it lives as long as the process. */
typedef struct zr_module {
  uint32_t size;
  uint16_t built_minor; /* the ABI minor version that the library was built for */
  uint16_t need_minor;  /* the lowest minor version of a host that can load the library */
  const char *name, *vendor, *version;
  const char *build; /* compiler and flags, free text */
  const zr_component *const *components;
  uint32_t n_components, rsv;
  zr_code (*startup)(const zr_host *host, zr_error *error); /* [control] called before the first create(); or NULL */
  void (*shutdown)(void);                                   /* [control] called after the last destroy(); or NULL */
} zr_module;

#ifdef __cplusplus
extern "C" {
#endif
/* [control] The only exported function. It is pure: the host may call it before any other, and any number of times. It
 * never returns NULL. */
ZR_EXPORT const zr_module *zr_module_v1(uint32_t host_minor);
#ifdef __cplusplus
}
#endif

/* Data symbols by which the host identifies a library without running it: zr_tag_abi_0_3 (the major and minor version
 * it needs), and one zr_tag_kind_<kind> per kind of plug-in it contains. All are in the section "zrabi". */
#ifdef __cplusplus
#define ZR_TAG(name)                                                                        \
  extern "C" ZR_EXPORT __attribute__((section("zrabi"))) const unsigned char zr_tag_##name; \
  extern "C" __attribute__((used)) const unsigned char zr_tag_##name = 1
#else
#define ZR_TAG(name) ZR_EXPORT __attribute__((section("zrabi"), used)) const unsigned char zr_tag_##name = 1
#endif
#endif
