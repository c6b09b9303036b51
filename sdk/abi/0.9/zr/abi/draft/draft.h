/* Headers of zr/abi/draft may change in every minor version. A library that includes one gets the tag zr_tag_draft_0_9,
 * and loads only on a host of exactly that version. When a draft is stabilised it moves to zr/abi and keeps its ids and
 * values. Each header says what the host does with it in this version. */
#ifndef ZR_ABI_DRAFT_H
#define ZR_ABI_DRAFT_H
#include "zr/abi/base.h"

/* Weak, because several files of one library may include a draft header. A host defines ZR_NO_DRAFT_TAG. */
#ifdef ZR_NO_DRAFT_TAG
#elif defined(__cplusplus)
extern "C" ZR_EXPORT __attribute__((section("zrabi"), weak)) const unsigned char zr_tag_draft_0_9;
extern "C" __attribute__((used)) const unsigned char zr_tag_draft_0_9 = 1;
#else
ZR_EXPORT __attribute__((section("zrabi"), weak, used)) const unsigned char zr_tag_draft_0_9 = 1;
#endif
#ifndef ZR_NO_DRAFT_TAG
/* The tag has this version. */
ZR_STATIC_ASSERT(ZR_ABI_MINOR == 9, "the tag of the draft headers has their version");
/* Drafts work with one version only. */
ZR_STATIC_ASSERT(ZR_TARGET_MINOR == ZR_ABI_MINOR,
                 "draft headers work only with the host of their version: do not set "
                 "ZR_TARGET_MINOR to an older one");
#endif
#endif
