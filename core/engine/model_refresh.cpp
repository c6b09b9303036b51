#include "engine/model_refresh.hpp"

#include <fmt/format.h>

#include <filesystem>

#include "base/error.hpp"
#include "base/hex.hpp"
#include "base/log.hpp"
#include "checkpoint/manifest.hpp"
#include "job/offline_plan.hpp"

namespace zr::host::engine {

namespace {
// Equal on ranks whose models changed in the same way.
std::string digest_of(const std::vector<plan::Parameter>& parameters, const ParameterChange& change) {
  std::string text;
  for (const plan::Parameter& p : parameters) {
    text += fmt::format("{}{}{} {}\n", p.name, p.frozen ? " frozen" : "", change.fresh.count(p.name) ? " fresh" : "",
                        fmt::join(p.shape, " "));
  }
  for (const std::string& line : change.log) text += line + "\n";
  for (const config::Rename& rename : change.renames) text += fmt::format("{} > {}\n", rename.theirs, rename.ours);
  return hex(checkpoint::hash_of(text.data(), static_cast<int64_t>(text.size())));
}
}  // namespace

void ModelRefresh::prepare_change(const std::function<void()>& work) {
  std::exception_ptr error;
  std::string text;
  try {
    work();
  } catch (const std::exception& thrown) {
    error = std::current_exception();
    text = fmt::format("engine.refresh() failed on rank {}: {}", context_.rank(), thrown.what());
  }
  const checkpoint::CheckpointComm comm = checkpoint_comm_of(context_.setup.control);
  std::string first;
  for (const std::string& other : comm.gather(text))
    if (first.empty()) first = other;
  first = comm.broadcast(first);
  if (error) std::rethrow_exception(error);
  if (!first.empty()) throw PeerFailedError(first);
}

bool ModelRefresh::compare_changes(const std::function<std::vector<plan::Parameter>(ParameterChange&)>& look,
                                   ParameterChange& change) {
  if (parts_.progress.within_step())
    fail_user(
        "engine.refresh() was called between engine.backward() and the engine.step() that ends its step; call "
        "engine.refresh() after engine.step()");
  if (parts_.buffers.in_evaluation())
    fail_user("engine.refresh() was called within an Engine::Evaluation; end the evaluation first");
  parts_.progress.check_complete();
  std::vector<plan::Parameter> parameters;
  prepare_change([&] {
    context_.model.check_bindings();
    context_.model.check_scopes("engine.refresh()");
    parameters = look(change);
  });
  bool any = false;
  std::string first;
  const std::string digest = digest_of(parameters, change) + (change.any ? "!" : ".");
  for (const std::string& rank_digest : context_.comm.all_gather_bytes(digest, "engine.refresh()")) {
    if (first.empty()) first = rank_digest;
    any |= rank_digest.back() == '!';
    if (rank_digest.compare(0, rank_digest.size() - 1, first, 0, first.size() - 1) != 0)
      fail_user(
          "engine.refresh(): the model changed differently on the ranks (names, shapes, requires_grad or order of "
          "its parameters, or its buffers); make the same changes on all ranks before the call");
  }
  if (!any) return false;
  // If the job cannot run with the new list, fail before anything changes.
  prepare_change([&] {
    const job::OfflinePlan offline(context_.setup, parameters, context_.world(),
                                   job::ranks_of_hosts(*context_.setup.control));
    const plan::MemoryPlan plan = offline.plan(context_.rank());
    const int64_t budget = context_.config().memory().device_budget;
    if (budget > 0 && plan.budgeted_bytes() > budget)
      fail_user("engine.refresh(): " +
                job::plan_over_budget_text(context_.config(), offline, plan.budgeted_bytes(), ""));
  });
  return true;
}

RefreshState ModelRefresh::hand_over(ParameterChange change, const NormBlocks& norm, const OptimizerUpdate& update) {
  context_.comm.barrier("engine.refresh()");
  RefreshState state;
  state.folder = checkpointer_.save_for_refresh();
  if (context_.rank() == 0)
    for (const std::string& line : change.log) log(ZR_LOG_INFO, "engine.refresh(): " + line);
  state.change = std::move(change);
  state.communication = parts_.step_timer.volume();
  state.overlap = parts_.step_timer.overlap(parts_.gradients, norm, &update);
  state.run = parts_.progress.run();
  handed_over_ = true;
  return state;
}

void ModelRefresh::continue_from(const RefreshState& before) {
  CheckpointLoadOptions options;
  options.strict = false;
  options.renames = before.change.renames;
  checkpointer_.load(before.folder, options, &before.change);
  parts_.progress.continue_run(before.run);
  context_.comm.barrier("engine.refresh()");  // all ranks have read the checkpoint
  parts_.step_timer.continue_from(before.communication, before.overlap);
  std::error_code ignored;
  if (context_.rank() == 0) std::filesystem::remove_all(std::filesystem::path(before.folder).parent_path(), ignored);
}

}  // namespace zr::host::engine
