// The exchange of 1-bit Adam: this rank's momentum to the ranks that serve its blocks, and the common momentum back,
// both as signs and scales.
#pragma once

#include <cstdint>
#include <vector>

#include "kernel.hpp"
#include "zr/collective.hpp"
#include "zr/local_gradients.hpp"

namespace onebit {

/// The kernels for this machine.
struct Kernels {
  decltype(ZR_CHOOSE(onebit_compress)) compress = ZR_CHOOSE(onebit_compress);
  decltype(ZR_CHOOSE(onebit_serve)) serve = ZR_CHOOSE(onebit_serve);
  decltype(ZR_CHOOSE(onebit_decode)) decode = ZR_CHOOSE(onebit_decode);
};

/// A parameter of the exchange.
struct Parameter {
  const zr_local_gradient* gradient;
  Factors factors;
};

/// The sizes for zr_exchange_plan.
void plan_exchange(zr_exchange_plan& plan);

/// Replaces the gradients by the common momentum. Uses the host's threads. Throws zr::PluginError.
void exchange(const zr::Comm& comm, const zr::Tasks& tasks, const Kernels& kernels,
              const std::vector<Parameter>& parameters, const zr_view& scratch);

}  // namespace onebit
