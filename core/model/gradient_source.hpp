// The gradients that autograd computes for a model.
#pragma once

#include <cstdint>
#include <functional>

#include "zr/abi/base.h"

namespace zr::host::model {

/// Training thread; a gradient that arrived may also be read and dropped by the thread that Arrived is called on.
class GradientSource {
 public:
  virtual ~GradientSource() = default;
  /// Called on an autograd thread, one at a time, when a parameter's gradient of this backward has arrived; [use].
  using Arrived = std::function<void(uint32_t param)>;
  virtual void on_gradient(Arrived arrived) = 0;  // replaces the previous callback; empty: none
  /// If the model is on a device and its gradients are delivered in host memory, they arrive when they have been copied
  /// there, and computed() is called before, on an autograd thread, when autograd has enqueued the computation of one.
  /// Replaces the previous callback.
  virtual void on_gradient_computed(std::function<void(uint32_t)> computed) = 0;
  /// Whether gradients of a model on a device arrive on a thread of the model, while autograd continues; otherwise in
  /// an order and at times that are the same on all ranks. Between backwards.
  virtual void deliver_on_thread(bool on) = 0;
  /// Waits until the gradients of this backward have arrived. Training thread, after backward.
  virtual void finish_gradients() = 0;
  /// Drops gradients that have been computed and not arrived.
  virtual void drop_computed_gradients() = 0;
  /// The gradient that arrived, until it is dropped; without data unless it is fp32 and contiguous in host memory.
  virtual zr_view gradient(uint32_t param) = 0;
  /// Copies elements [first, first + dst.count) of the gradient that arrived into dst, rounding to its dtype.
  virtual void copy_gradient(uint32_t param, int64_t first, const zr_view& dst) = 0;
  /// Adds elements [first, first + dst.count) of the gradient that arrived to dst, in fp32, and rounds the results to
  /// its dtype.
  virtual void add_gradient(uint32_t param, int64_t first, const zr_view& dst) = 0;
  /// Frees the gradient that arrived.
  virtual void drop_gradient(uint32_t param) = 0;
  /// `hidden`: sets .grad() of all trained parameters to a placeholder whose use throws an error with the remedy;
  /// otherwise clears it.
  virtual void hide_gradients(bool hidden) = 0;
};

}  // namespace zr::host::model
