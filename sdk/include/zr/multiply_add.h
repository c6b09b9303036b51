/* For ZR_MODULE and ZR_MODULE_C: shows the host how the compiler compiled a multiplication followed by an addition. */
#ifndef ZR_MULTIPLY_ADD_H
#define ZR_MULTIPLY_ADD_H
#include "zr/abi/base.h"

/* The type of the function that zr_tag_multiply_add points to: returns a * b + c. */
typedef float (*zr_multiply_add)(float a, float b, float c);

#ifdef __cplusplus
/* Part of ZR_MULTIPLY_ADD_TAG. */
#define ZR_MULTIPLY_ADD_LINKAGE extern "C"
#else
/* Part of ZR_MULTIPLY_ADD_TAG. */
#define ZR_MULTIPLY_ADD_LINKAGE extern
#endif
/* Defines zr_tag_multiply_add, a pointer to a function that returns a * b + c. `zeroth plugins` calls it and warns
 * about an optimizer whose product is not rounded before the addition: compiled without -ffp-contract=off for a machine
 * with fused multiply-add, an optimizer gives other results there. It covers the flags of the file that it is in. */
#define ZR_MULTIPLY_ADD_TAG                                                         \
  static float zr_multiply_and_add(float a, float b, float c) { return a * b + c; } \
  ZR_FAST_MATH_TAG                                                                  \
  ZR_MULTIPLY_ADD_LINKAGE ZR_EXPORT const zr_multiply_add zr_tag_multiply_add;      \
  const zr_multiply_add zr_tag_multiply_add = zr_multiply_and_add

/* Part of ZR_MULTIPLY_ADD_TAG: defines zr_tag_fast_math in files that are compiled with -ffast-math or -Ofast. */
#ifdef __FAST_MATH__
#define ZR_FAST_MATH_TAG ZR_TAG(fast_math);
#else
#define ZR_FAST_MATH_TAG
#endif
#endif
