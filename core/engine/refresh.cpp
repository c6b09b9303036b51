// Session's change of parameters: the old session saves its state to a private checkpoint and hands over what does not
// depend on the parameters; the new session loads it.
#include <filesystem>

#include "base/failure.hpp"
#include "base/log.hpp"
#include "checkpoint/manifest.hpp"
#include "engine/planning.hpp"
#include "engine/session.hpp"

namespace zr::host {

namespace {
// Equal on ranks whose models changed alike.
std::string digest_of(const std::vector<Parameter>& parameters, const ParameterChange& change) {
  std::string text;
  for (const Parameter& p : parameters) {
    text += p.name + (p.frozen ? " frozen" : "") + (change.fresh.count(p.name) ? " fresh" : "");
    for (const int64_t size : p.shape) text += " " + std::to_string(size);
    text += "\n";
  }
  for (const std::string& line : change.log) text += line + "\n";
  for (const Rename& rename : change.renames) text += rename.theirs + " > " + rename.ours + "\n";
  return hex(hash_of(text.data(), static_cast<int64_t>(text.size())));
}
}  // namespace

void Session::prepare_change(const std::function<void()>& work) {
  std::exception_ptr error;
  std::string text;
  try {
    work();
  } catch (const std::exception& thrown) {
    error = std::current_exception();
    text = std::string("engine.refresh() failed on rank ") + std::to_string(rank()) + ": " + thrown.what();
  }
  const CheckpointComm comm = saver_->peers();
  std::string first;
  for (const std::string& other : comm.gather(text))
    if (first.empty()) first = other;
  first = comm.broadcast(first);
  if (error) std::rethrow_exception(error);
  if (!first.empty()) fail_user(first);
}

bool Session::agree_on_change(const std::function<std::vector<Parameter>(ParameterChange&)>& look,
                              ParameterChange& change) {
  if (in_backward_ || micro_ > 0)
    fail_user(
        "engine.refresh() between engine.backward() and the engine.step() that ends its step; call it after a step");
  if (model_buffers_.in_evaluation())
    fail_user("engine.refresh() within an Engine::Evaluation; end the evaluation first");
  check_complete();
  std::vector<Parameter> parameters;
  prepare_change([&] {
    model_.verify();
    model_.check_scopes("engine.refresh()");
    parameters = look(change);
  });
  bool any = false;
  std::string first;
  const std::string mine = digest_of(parameters, change) + (change.any ? "!" : ".");
  for (const std::string& one : comm_->all_gather_bytes(mine, "engine.refresh()")) {
    if (first.empty()) first = one;
    any |= one.back() == '!';
    if (one.compare(0, one.size() - 1, first, 0, first.size() - 1) != 0)
      fail_user(
          "engine.refresh(): the model changed differently on the ranks (names, shapes, requires_grad or order of "
          "its parameters, or its buffers); make the same changes on all ranks before the call");
  }
  if (!any) return false;
  // What the new list makes impossible is an error before anything changes.
  prepare_change([&] {
    const Planner planner(setup_, parameters, world(), control_->local_world() == world());
    const MemoryPlan plan = planner.plan(rank());
    const int64_t budget = config().integer("memory.device_budget");
    if (budget > 0 && plan.bytes() > budget)
      fail_user("engine.refresh(): " + plan_over_budget_text(config(), planner, plan.bytes(), ""));
  });
  return true;
}

RefreshState Session::hand_over(ParameterChange change) {
  comm_->barrier("engine.refresh()");
  settle();
  take_written();
  const CheckpointContents now = present();
  RefreshState all;
  std::string folder = saver_->peers().broadcast(recorder_->folder());  // rank 0 alone knows this run's number
  if (folder.empty()) folder = run_folder(config(), setup_.engine);
  all.folder = saver_->save(folder + "/refresh", now, 0);
  if (rank() == 0)
    for (const std::string& line : change.log) log(ZR_LOG_INFO, "engine.refresh(): " + line);
  all.change = std::move(change);
  all.communication = comm_->volume();
  all.communication += earlier_communication_;
  all.overlap = overlap();
  all.begun = begun_;
  all.updates_before = updates_before_;
  all.stopped = stopped_;
  all.loss = last_.loss;
  all.grad_norm = last_.grad_norm;
  all.recorder = std::move(recorder_);
  all.trace = std::move(trace_);
  all.stop_signal = std::move(stop_signal_);
  return all;
}

void Session::continue_from(const RefreshState& before) {
  LoadOptions how;
  how.strict = false;
  how.renames = before.change.renames;
  refreshed_ = &before.change;
  load(before.folder, how);
  refreshed_ = nullptr;
  begun_ = before.begun;
  updates_before_ = before.updates_before;
  stopped_ = before.stopped;
  last_ = {before.loss, before.grad_norm};
  earlier_communication_ = before.communication;
  overlap_before_ = before.overlap;
  comm_->barrier("engine.refresh()");  // all ranks have read
  excluded_communication_ = comm_->volume().total();
  std::error_code ignored;
  if (rank() == 0) std::filesystem::remove_all(std::filesystem::path(before.folder).parent_path(), ignored);
}

}  // namespace zr::host
