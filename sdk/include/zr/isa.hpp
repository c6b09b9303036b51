// One kernel source, compiled per instruction set, chosen at run time. In a header that kernel.cpp and the plug-in
// share:
//
//   ZR_KERNEL(void update(const Constants&, float* weight, const float* grad, int64_t count))
//
// In kernel.cpp (KERNELS of zr_add_plugin): `namespace ZR_ISA { void update(...) { a plain loop } }`. In the plug-in,
// once per instance: `auto* update = ZR_CHOOSE(update);`. A kernel must not include a header with ordinary inline
// functions: the linker keeps only one copy of them, possibly one with instructions that this machine does not have.
// The results have the same bits with every instruction set as long as the loop is plain elementwise arithmetic: the
// compiler neither contracts nor reassociates operations.
#pragma once

#if defined(__x86_64__)
// Declares a kernel once per instruction set, in a namespace named after it.
#define ZR_KERNEL(declaration) \
  namespace portable {         \
  declaration;                 \
  }                            \
  namespace avx2 {             \
  declaration;                 \
  }                            \
  namespace avx512 {           \
  declaration;                 \
  }
// The kernel for this machine, see zr::choose().
#define ZR_CHOOSE(kernel) zr::choose(portable::kernel, avx2::kernel, avx512::kernel)
#else
#define ZR_KERNEL(declaration) \
  namespace portable {         \
  declaration;                 \
  }
#define ZR_CHOOSE(kernel) zr::choose(portable::kernel, portable::kernel, portable::kernel)
#endif

#ifndef ZR_ISA  // not in a kernel
#include <cstdlib>
#include <string>

#include "zr/base.hpp"

#pragma GCC visibility push(hidden)
namespace zr {
inline namespace sdk {

/// The kernel for the widest instruction set that this machine has, limited by the environment variable ZR_ISA.
/// [control]
template <class Kernel>
Kernel* choose(Kernel* portable, Kernel* avx2, Kernel* avx512) {
  const char* named = std::getenv("ZR_ISA");
  const std::string widest = named ? named : "avx512";
  if (widest != "portable" && widest != "avx2" && widest != "avx512") {
    throw PluginError(ZR_INVALID, "the environment variable ZR_ISA is \"" + widest +
                                      "\"; set it to portable, avx2 or avx512, or unset it");
  }
#if defined(__x86_64__)
  const bool has512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (widest == "avx512" && has512) return avx512;
  if (widest != "portable" && __builtin_cpu_supports("avx2")) return avx2;
#else
  (void)avx2, (void)avx512;
#endif
  return portable;
}

}  // namespace sdk
}  // namespace zr
#pragma GCC visibility pop
#endif
