// Session's part in the calls of a program: compared between ranks, undone where they fail, and the last one.
#include <cstring>

#include "base/dtype.hpp"
#include "base/failure.hpp"
#include "base/text.hpp"
#include "engine/session.hpp"

namespace zr::host {

void Session::meet(const std::string& call) { comm_->barrier(call.c_str()); }

void Session::abandon_step(const GlobalStats& global) {
  CallError error;
  call(strategy_->api<zr_strategy_api>()->event(strategy_->self(), ZR_STEP_END, 0, &error), error,
       strategy_->who("event"));
  if (disk_buffers_) disk_buffers_->step_end();
  micro_ = 0;
  losses_.clear();
  weights_.clear();
  tokens_ = 0;
  reseed();
  restart_clock();
  fail_user(
      "engine.step(): the weights that engine.backward(loss, weight) was given for step " + std::to_string(step_ + 1) +
      " add up to " + shortest(global.weight) +
      " over all ranks and micro-batches, but the sum must be above 0 and finite; no weight changed: give at least "
      "one micro-batch a weight above 0, or leave the step out on all ranks");
}

void Session::return_weights(zr_dtype dtype) {
  check_complete();
  if (in_backward_ || micro_ > 0)
    fail_user("engine.release(): was called within a step, after " + std::to_string(micro_ + in_backward_) +
              " of its engine.backward() calls; call it after engine.step()");
  model_.check_scopes("engine.release()");
  settle();
  take_written();
  const auto count = static_cast<uint32_t>(plan_.input.parameters.size());
  const bool converts = dtype != plan_.input.weight_dtype;
  std::vector<void*> memory(count, nullptr);
  std::string problem;
  try {
    for (uint32_t param = 0; param < count; ++param)
      memory[param] = model_.reserve_release(param, dtype, converts || weight_flow_->is_sharded(param));
  } catch (const std::exception& error) {
    problem = error.what();
    problem = "rank " + std::to_string(rank()) +
              " has no memory for the full model: " + problem.substr(0, problem.find('\n'));
  }
  problem.resize(400);
  for (const std::string& said : comm_->all_gather_bytes(problem, "memory for the full model")) {
    if (!said[0]) continue;
    model_.cancel_release();
    fail_environment("engine.release(): " + said.substr(0, said.find('\0')) +
                     "; the engine is unchanged: free memory, raise memory.device_budget, or read single parameters "
                     "with engine.get()");
  }
  for (uint32_t param = 0; param < count; ++param) {
    if (!memory[param]) continue;
    if (converts) {
      read(param, LogicalRole::value, "", static_cast<float*>(memory[param]));
    } else {
      const auto bytes = static_cast<std::size_t>(plan_.input.parameters[param].count * size_of(dtype));
      weight_flow_->with_full(param, [&](const void* full) { std::memcpy(memory[param], full, bytes); });
    }
  }
  if (converts) model_.convert_buffers(dtype);
  comm_->barrier("weights returned to the model");  // a peer may still read what this rank is about to free
}

}  // namespace zr::host
