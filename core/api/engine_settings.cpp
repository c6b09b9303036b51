// zr::Engine: what a program sets from C++ instead of in the configuration, and lists.
#include <algorithm>
#include <cmath>

#include "api/engine_state.hpp"
#include "base/text.hpp"

namespace zr {

StepResult Engine::last_step() const {
  const host::engine::TrainingProgress& progress = state_->session_for("last_step").progress();
  return {progress.step(),      !progress.last_step_applied(), progress.loss(),
          progress.grad_norm(), progress.learning_rate(),      progress.loss_scale().value()};
}

void Engine::on_step(std::function<void(const StepResult&)> callback) {
  state_->session_for("on_step");
  if (!callback) host::fail_user("engine.on_step(callback): the function is empty; pass a function to call");
  state_->program_settings.callbacks.push_back(std::move(callback));
}

void Engine::set_lr(double rate) {
  state_->collective("set_lr", host::shortest(rate), [&](host::engine::Session& session, const State::Call& call) {
    session.update().before_access(call.text());  // the learning rate of the step is fixed
    if (!(rate >= 0) || !std::isfinite(rate))
      host::fail_user(call.text() + ": a learning rate must be finite and at least 0");
    state_->program_settings.schedule = [rate](int64_t) { return rate; };
    state_->apply_schedule();
  });
}

void Engine::set_schedule(std::function<double(int64_t)> rate) {
  state_->collective("set_schedule", rate ? "function" : "",
                     [&](host::engine::Session& session, const State::Call& call) {
                       session.update().before_access(call.text());
                       state_->program_settings.schedule = std::move(rate);
                       state_->apply_schedule();
                     });
}

void Engine::set_accumulation(int accumulation) {
  state_->collective("set_accumulation", std::to_string(accumulation),
                     [&](host::engine::Session& session, const State::Call&) {
                       session.set_accumulation(accumulation);
                       state_->program_settings.accumulation = accumulation;
                     });
}

void Engine::edit_gradients(GradientEdit edit) {
  state_->collective(
      "edit_gradients", edit ? "function" : "", [&](host::engine::Session& session, const State::Call& call) {
        if (session.progress().within_step())
          host::fail_user(call.text() +
                          " was called within a step; call it after the engine.step() that ends the step");
        if (edit && session.plan().input.exchange_plan)
          host::fail_user(call.text() +
                          ": the optimizer needs gradients that are not reduced over ranks, so there is no averaged "
                          "gradient to edit; edit the loss, or choose another optimizer");
        state_->program_settings.edit = std::move(edit);
        state_->apply_edit();
      });
}

std::vector<ParameterInfo> Engine::parameters() const {
  std::vector<ParameterInfo> list;
  for (const host::plan::Parameter& parameter : state_->session_for("parameters").plan().input.parameters)
    list.push_back({parameter.name, parameter.shape, !parameter.frozen, static_cast<int>(parameter.group)});
  return list;
}

std::vector<MemoryUse> Engine::memory() const {
  std::vector<MemoryUse> list;
  for (const host::Ledger::Row& row : state_->session_for("memory").ledger().rows())
    list.push_back({std::string(host::kTierNames[static_cast<std::size_t>(row.tier)]),
                    std::string(host::kMemoryKindNames[static_cast<std::size_t>(row.kind)]), row.planned, row.now,
                    row.peak});
  return list;
}

std::vector<std::string> Engine::slots() const {
  std::vector<std::string> names;
  for (const host::plan::OptimizerDescription& description : state_->session_for("slots").plan().input.descriptions)
    for (const zr_slot& slot : description.slots)
      if (slot.shape == ZR_SLOT_LIKE_PARAM && slot.dtype == ZR_F32 &&
          std::find(names.begin(), names.end(), slot.name) == names.end())
        names.emplace_back(slot.name);
  return names;
}

std::vector<GroupInfo> Engine::groups() const {
  std::vector<GroupInfo> list;
  for (const host::config::GroupConfig& group : state_->session_for("groups").config().groups()) {
    GroupInfo info{group.match, group.lr_scale, {}, group.use};
    for (const host::config::Entry& entry : group.given_values) info.values.emplace_back(entry.key.name, entry.written);
    list.push_back(std::move(info));
  }
  return list;
}

}  // namespace zr
