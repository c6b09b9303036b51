// The arithmetic of SGD for one element, for the loops on the CPU and on devices. docs/numerics.md, section
// 9, has the order of operations; no product is contracted with an addition (-ffp-contract=off, -fmad=false).
#pragma once

#include "zr/float_cast.hpp"

struct SgdConstants {  // computed in double, rounded once
  float mul;           // factor of the reduced gradient
  float weight_decay, momentum;
  float gain;  // 1 - dampening
  float lr;
  bool decays;  // weight_decay is not zero
  bool first;   // first update: the buffer becomes the gradient
  bool nesterov;
};

/// The gradient with weight decay.
ZR_ALWAYS_INLINE float sgd_gradient(const SgdConstants& c, float grad, float weight) {
  const float g = grad * c.mul;
  return c.decays ? g + weight * c.weight_decay : g;
}
/// Without momentum.
ZR_ALWAYS_INLINE void sgd_element(const SgdConstants& c, float grad, float& weight) {
  weight = weight - sgd_gradient(c, grad, weight) * c.lr;
}
/// With momentum. buffer: the element of momentum_buffer.
ZR_ALWAYS_INLINE void sgd_element(const SgdConstants& c, float grad, float& weight, float& buffer) {
  const float d = sgd_gradient(c, grad, weight);
  buffer = c.first ? d : buffer * c.momentum + d * c.gain;
  weight = weight - (c.nesterov ? d + buffer * c.momentum : buffer) * c.lr;
}
