// A program that computes on two streams of the simulated accelerator.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/torch.h>

#include <optional>
#include <sstream>
#include <string>

#include "zr/engine.hpp"

namespace engine_tests {

/// Makes another stream current. On the CPU, there is no stream.
inline std::optional<c10::StreamGuard> on_another_stream() {
  constexpr auto kSim = c10::DeviceType::PrivateUse1;
  if (!c10::impl::hasDeviceGuardImpl(kSim)) return std::nullopt;
  return std::optional<c10::StreamGuard>(std::in_place, c10::impl::VirtualGuardImpl(kSim).getStreamFromGlobalPool(
                                                            c10::impl::VirtualGuardImpl(kSim).getDevice()));
}

/// Calls compute() on another stream, which waits for `input`; the current one waits for the result.
template <class Function>
torch::Tensor compute_aside(const torch::Tensor& input, const Function& compute) {
  if (input.device().is_cpu()) return compute();
  const c10::impl::VirtualGuardImpl guard(input.device().type());
  const c10::Stream main = guard.getStream(input.device());
  const auto follow = [](const c10::Stream& earlier, const c10::Stream& later) {
    c10::Event event(earlier.device_type());
    event.record(earlier);
    event.block(later);
  };
  const auto side = on_another_stream();
  follow(main, side->current_stream());
  guard.recordDataPtrOnStream(input.storage().data_ptr(), side->current_stream());
  torch::Tensor result = compute();
  guard.recordDataPtrOnStream(result.storage().data_ptr(), main);
  follow(side->current_stream(), main);
  return result;
}

/// Uses one activation on two streams, in either order: backward reads it first on the stream that used it last.
/// Returns the hash of the weights and the gradient norms.
inline std::string use_an_activation_on_two_streams(const zr::Program& program) {
  torch::manual_seed(1);
  const auto wide = [] { return torch::nn::Linear(64, 64); };
  torch::nn::Sequential first(wide(), torch::nn::Tanh());
  torch::nn::Linear one = wide(), other = wide();
  torch::nn::ModuleList all(first, one, other);
  zr::Engine engine(program, *all);
  const torch::Tensor x = torch::linspace(-1, 1, 8 * 64).reshape({8, 64}).to(engine.device());
  std::ostringstream line;
  line.precision(17);
  const auto loss = [&] {  // keeps no activation
    const torch::Tensor shared = first->forward(x);
    torch::Tensor direct, aside;
    const bool aside_first = engine.step_index() % 2 == 1;
    if (!aside_first) direct = one->forward(shared);
    aside = compute_aside(shared, [&] { return other->forward(shared); });
    if (aside_first) direct = one->forward(shared);
    return (direct + aside).square().mean();
  };
  while (!engine.done()) {
    engine.backward(loss());
    engine.step();
    line << " " << engine.last_step().gradient_norm;
  }
  return engine.weights_hash() + line.str();
}

}  // namespace engine_tests
