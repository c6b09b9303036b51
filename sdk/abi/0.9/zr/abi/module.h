/* What a plug-in library exports: one pure function, and data symbols (tags) that name its kinds, so that the host can
 * inspect the library without running it. */
#ifndef ZR_ABI_MODULE_H
#define ZR_ABI_MODULE_H
#include "zr/abi/base.h"
#include "zr/abi/host.h"

/* One plug-in. Static: it lives as long as the process. */
typedef struct zr_component {
  uint32_t size, flags; /* flags: 0 */
  const char *id; /* the name in TOML, unique per kind: "lion", or "acme.lion" with the name of a vendor; each word has
                   * lower-case letters, digits and underscores and begins with a letter; the first must not be a
                   * key of the role's TOML table ("timeout") or a tier of the host ("device", "auto") */
  const char *kind;    /* "zr.strategy/1", "zr.communicator/1", "zr.optimizer/1" or "zr.offload/1" */
  const char *version; /* of the component, free text */
  const void *api;     /* zr_strategy_api, zr_communicator_api, zr_optimizer_api or zr_offload_api, by kind */

  /* [control] Creates an instance. On success the host owns *self and passes it to destroy() once. config is the
   * component's TOML table and is valid until create() returns; host lives as long as the process. */
  zr_code (*create)(const zr_host *host, const zr_config *config, void **self, zr_error *error);

  /* [control] Destroys an instance. Accepts NULL. */
  void (*destroy)(void *self);

  /* [any] Returns a table of optional functions by id ("zr.communicator.plan/1", "acme.fused_clip/1"); NULL for an
   * unknown id. Tables are static: they live as long as the process. The function itself may be NULL. */
  const void *(*extension)(const char *id);
  const zr_key *const *keys; /* the schema of the component's TOML table; NULL if n_keys is 0 */
  uint32_t n_keys, rsv;

  /* Texts for `zeroth plugins`: UTF-8, one line each, or NULL. */
  const char *description; /* what it is, no full stop */
  const char *url;         /* of its documentation or its source */
  const char *license;     /* SPDX expression: "MIT" */
} zr_component;

/* The plug-ins of one library. Static: it lives as long as the process. */
typedef struct zr_module {
  uint32_t size;
  uint16_t built_minor; /* ZR_ABI_MINOR: the headers that the library was built with */
  uint16_t need_minor;  /* ZR_TARGET_MINOR: the lowest minor version of a host that can load the library */
  const char *name, *vendor, *version;
  const char *build; /* compiler and flags, free text */
  const zr_component *const *components;
  uint32_t n_components, rsv;
  zr_code (*startup)(zr_error *error); /* [control] called before the first create(); or NULL */
  void (*shutdown)(void); /* [control] called after the last destroy(); or NULL. Both may be called again. */
} zr_module;

/* For ZR_SIZE_0_9. */
enum {
  zr_component_size_0_9 = 104, /* bytes */
  zr_module_size_0_9 = 72      /* bytes */
};

#ifdef __cplusplus
extern "C" {
#endif
/* [control] The only exported function. It is pure: the host may call it before any other, and any number of times. It
 * never returns NULL. */
ZR_EXPORT const zr_module *zr_module_v1(uint32_t host_minor);
#ifdef __cplusplus
}
#endif

/* Data symbols, called tags, by which the host identifies a library without running it. All are in the section "zrabi":
 *   zr_tag_abi_0_9        the version of the host that it needs: ZR_TAG(ZR_ABI_TAG);
 *   zr_tag_kind_ROLE_1    per kind and revision that it contains: ZR_TAG(kind_optimizer_1);
 *   zr_tag_id_ROLE_ID     per component: ZR_ID_TAG(optimizer, "acme.lion"). A library with one component is named
 *                         zr_ROLE_ID.so and needs no such tag; the name of one with several begins with zr_ and with no
 *                         role;
 *   zr_tag_several_hosts  its communicators connect ranks on several hosts: ZR_TAG(several_hosts). communicator =
 *                         "auto" chooses only such a library for the device of a job whose ranks are on several hosts;
 *   zr_tag_draft_0_9      it includes a header of zr/abi/draft of that version, which defines this tag. */

/* Part of ZR_ABI_TAG. */
#define ZR_JOIN_TAG(minor) abi_0_##minor
/* Part of ZR_ABI_TAG. */
#define ZR_JOIN(minor) ZR_JOIN_TAG(minor)
/* The name of the tag for the version that the library needs: for ZR_TAG. */
#define ZR_ABI_TAG ZR_JOIN(ZR_TARGET_MINOR)
/* Defines the tag zr_tag_NAME. Once per library, at namespace scope. */
#define ZR_TAG(name) ZR_TAG_SYMBOL(name)
/* Defines the tag of a component. role: strategy, communicator, optimizer or offload; id: a string. */
#define ZR_ID_TAG(role, id) ZR_ID_TAG_NUMBERED(role, id, __COUNTER__)
/* Part of ZR_ID_TAG. */
#define ZR_ID_TAG_NUMBERED(role, id, number) ZR_ID_TAG_SYMBOL(role, id, number)
#ifdef __cplusplus
/* Part of ZR_TAG. */
#define ZR_TAG_SYMBOL(name)                                                                 \
  extern "C" ZR_EXPORT __attribute__((section("zrabi"))) const unsigned char zr_tag_##name; \
  extern "C" __attribute__((used)) const unsigned char zr_tag_##name = 1
/* Part of ZR_ID_TAG. */
#define ZR_ID_TAG_SYMBOL(role, id, number)                                   \
  extern "C" ZR_EXPORT __attribute__((section("zrabi")))                     \
  const unsigned char zr_id_tag_##number __asm__("zr_tag_id_" #role "_" id); \
  extern "C" __attribute__((used)) const unsigned char zr_id_tag_##number = 1
#else
/* Part of ZR_TAG. */
#define ZR_TAG_SYMBOL(name) ZR_EXPORT __attribute__((section("zrabi"), used)) const unsigned char zr_tag_##name = 1
/* Part of ZR_ID_TAG. */
#define ZR_ID_TAG_SYMBOL(role, id, number)          \
  ZR_EXPORT __attribute__((section("zrabi"), used)) \
  const unsigned char zr_id_tag_##number __asm__("zr_tag_id_" #role "_" id) = 1
#endif
#endif
