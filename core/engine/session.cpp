#include "engine/session.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/directory.hpp"
#include "base/dtype.hpp"
#include "base/error.hpp"
#include "base/log.hpp"
#include "base/process_exit.hpp"
#include "base/text.hpp"
#include "engine/model_seed.hpp"
#include "job/all_gather.hpp"

namespace zr::host::engine {

namespace {
// Rank 0 locks the run folder; if this fails, all ranks throw.
std::shared_ptr<run::RunLog> make_recorder(const job::StartedJob& job) {
  std::shared_ptr<run::RunLog> recorder;
  run_on_all_ranks(checkpoint_comm_of(job.setup.control), [&] {
    recorder = std::make_shared<run::RunLog>(job.config(), job.setup.engine, job.world(), job.rank());
  });
  return recorder;
}

std::shared_ptr<run::StopSignal> make_stop_signal(const job::StartedJob& job, const RefreshState* before) {
  if (before) return before->stop_signal;
  return std::make_shared<run::StopSignal>(job.setup.control,
                                           job.config().checkpoint().on_signal == config::OnSignal::save);
}

std::optional<ActivationOffload> make_activations(const job::StepContext& context, state::ShardedState& state) {
  const int tier = context.plan.placement.activations;
  if (tier == 0) return std::nullopt;
  return std::optional<ActivationOffload>(std::in_place, context, state.tier(tier));
}
}  // namespace

Session::Session(job::Setup setup, model::Model& model, std::unique_ptr<RefreshState> before)
    : job_(std::move(setup), model, before ? before->trace : nullptr),
      recorder_(before ? before->recorder : make_recorder(job_)),
      stop_signal_(make_stop_signal(job_, before.get())),
      progress_(config(), plan().input.parameters.size()),
      buffers_(model, config().train().buffers),
      budget_(job_.context, job_.plugins.communicator.get(), progress_),
      state_(job_.context, job_.host, job_.plugins.tiers, job_.trace.get()),
      weights_(job_.context, state_),
      activations_(make_activations(job_.context, state_)),
      step_timer_(job_.context, state_, *recorder_, job_.trace.get(),
                  activations_ ? &activations_->activations() : nullptr),
      monitor_(job_.context, {state_, weights_, *recorder_, step_timer_, progress_}),
      step_sync_(job_.context, state_.slices(), state_.disk_buffers(), state_.device_updates()),
      local_(job_.context, state_),
      gradients_(job_.context, state_.disk_buffers()),
      update_(job_.context, state_),
      skips_(job_.context),
      checkpointer_(job_.context, parts()),
      tensors_(job_.context, parts()),
      refresh_(job_.context, parts(), checkpointer_),
      swap_(job_.context, parts()) {
  gradients_.check_non_finite(progress_.loss_scale().checks_gradients());
  update_.allow_early({step_sync_, gradients_, monitor_, weights_, progress_}, job_.trace.get());
  step_sync_.norm().use_pool(config().job().device.value != config::kCpuDevice);
  if (job_.device) step_sync_.norm().use_device(norm_on_device(job_.context));
  model.forget_peak();
  seed_model(job_.context, progress_);
  step_timer_.restart_clock();
  checkpointer_.prepare_saves(!before, stop_signal_->enabled());
  before ? refresh_.continue_from(*before) : checkpointer_.load_initial();
  if (!before) accept();
}

Session::~Session() {
  const bool failed = failed_ || has_failed() || std::uncaught_exceptions() > exceptions_;
  checkpointer_.close();               // waits for the background save
  if (refresh_.handed_over()) return;  // the next session continues the job
  // If something fails after the last step, such as the last save, the record of the steps is still complete. If it
  // fails before the first one, no row of metrics.jsonl tells what the run was.
  recorder_->settle_rows();
  recorder_->record_failure(failed);
  if (!failed || progress_.done() || recorder_->steps_made() == 0) try {
      write_summary();
    } catch (const EnvironmentError& failure) {
      log(ZR_LOG_ERROR, failure.what());
      note_unwritten_file();
    } catch (const std::exception& failure) {
      log(ZR_LOG_ERROR, failure.what());
    }
  stop_signal_->disable();
  job_.setup.control->leave(progress_.step(), failed);
}

TrainingParts Session::parts() {
  return {state_, progress_, buffers_, monitor_, gradients_, step_timer_, *recorder_, job_.name, update_, local_};
}

// Called when every check has passed: creates this run's folder.
void Session::accept() {
  const checkpoint::CheckpointComm comm = checkpoint_comm_of(job_.setup.control);
  run_on_all_ranks(comm, [&] {
    if (rank() == 0) recorder_->accept();
  });
  if (job_.trace) {
    const std::string folder = comm.broadcast(recorder_->folder());
    run_on_all_ranks(
        comm, [&] { job_.trace->open(Directory::open(folder, true).create(fmt::format("trace-{}.json", rank()))); });
  }
  if (progress_.step() < progress_.steps()) return;
  if (rank() == 0)
    log(ZR_LOG_INFO,
        fmt::format(
            "nothing is left to train: {} steps are done, and train.steps is {} ({}); raise train.steps to continue",
            progress_.step(), progress_.steps(), config().train().steps.origin.text()));
  write_totals();
}

int64_t Session::micro_index() const { return engine::micro_index(job_.context, progress_); }
uint64_t Session::generator_seed(int64_t key) const { return engine::generator_seed(job_.context, key); }

void Session::begin_backward(Loss loss, double weight) {
  progress_.check_backward();
  if (!progress_.within_step()) job_.comm.set_step(progress_.current_step());  // of the first step, or after a load
  if (progress_.at_boundary())
    fail_user(fmt::format(
        "engine.backward() was called {} times without engine.step(); call engine.step() after every backward",
        progress_.accumulation() + 1));
  if (!(weight >= 0) || !std::isfinite(weight))
    fail_user(fmt::format("engine.backward(loss, weight): the weight is {}, but it must be finite and at least 0",
                          shortest(weight)));
  if (weight > 0 && (weight < std::numeric_limits<float>::min() || weight > std::numeric_limits<float>::max()))
    fail_user(
        fmt::format("engine.backward(loss, weight): the weight is {}, but it must be 0 or between 1.2e-38 and 3.4e38 "
                    "(the range of fp32); multiply the weights of all micro-batches of the step by the same factor",
                    shortest(weight)));
  if (plan().input.weight_dtype == ZR_F16 && weight > 0 && (weight < 0x1p-10 || weight > 0x1p15))
    fail_user(
        fmt::format("engine.backward(loss, weight): the weight is {}, but with train.dtype = \"fp16\" it must be 0 or "
                    "between 0.001 and 32768, because it scales the gradients; divide the weights of all micro-batches "
                    "by the same number, such as the mean number of tokens",
                    shortest(weight)));
  budget_.check(BudgetCheck::forward);
  step_timer_.lap(run::Phase::forward);
  job_.context.model.check_bindings();
  monitor_.publish_replacements();
  const auto micro = static_cast<uint32_t>(progress_.micro());
  if (micro == 0) {  // before anything changes, because the optimizer may reject the step
    step_ = &reduced_step_;
    if (local_.begin_step(progress_.updates() + 1, progress_.param_steps(), progress_.param_local_steps()))
      step_ = &local_step_;
  }
  progress_.begin_micro(std::move(loss), weight);
  job_.context.model.hide_gradients(false);
  weights_.set_phase(ZR_BACKWARD, progress_.micro());
  const bool final =
      progress_.micro() + 1 == progress_.accumulation() && !update_.edits_gradients() && step_->may_begin_early();
  step_sync_.begin_micro_step(final);
  gradients_.begin(micro, weight > 0, step_->destination());
  try {
    if (final) update_.begin_early();
  } catch (...) {
    fail_backward();
    throw;
  }
}

void Session::fail_backward() {
  if (!progress_.in_backward() || !gradients_.cancel()) return;
  update_.cancel_early();
  job_.context.model.hide_gradients(true);
  progress_.cancel_micro();
  weights_.set_phase(ZR_FORWARD, progress_.next_micro());
}

void Session::end_backward() {
  try {
    job_.context.model.finish_gradients();
  } catch (...) {
    fail_backward();
    throw;
  }
  step_timer_.lap(run::Phase::backward);
  gradients_.end();
  job_.context.model.hide_gradients(true);
  progress_.end_micro();
  weights_.set_phase(ZR_FORWARD, progress_.next_micro());
  step_timer_.lap(run::Phase::reduce);
  if (!progress_.at_boundary()) seed_model(job_.context, progress_);
  budget_.check(BudgetCheck::backward);
}

bool Session::step() {
  const job::StepContext& context = job_.context;
  progress_.check_backward();
  if (progress_.micro() == 0)
    fail_user("engine.step() was called before engine.backward(loss); call engine.backward(loss) first");
  context.model.check_scopes("engine.step()");  // before anything changes, on every micro-step
  if (!progress_.at_boundary()) return false;
  monitor_.publish_replacements();
  if (!update_.allows_early()) state_.check_tiers();  // else end_early() does, whose failure is reported on all ranks
  const double rate = update_.learning_rate(progress_.updates());  // before anything changes
  try {
    complete_step(rate);
  } catch (...) {
    progress_.step_failed();
    update_.step_failed();
    throw;
  }
  budget_.check(BudgetCheck::step);
  return true;
}

void Session::complete_step(double rate) {
  const job::StepContext& context = job_.context;
  update_.read_ahead();
  context.finish_gradients(step_->use_flags());
  step_timer_.lap(run::Phase::reduce);

  update_.end_early();
  step_timer_.lap(run::Phase::optimizer);
  const bool averaged = average_gradients();
  const GlobalStats global = exchange_statistics();
  if (global.non_finite > 0 && config().train().nonfinite == config::NonFiniteRule::stop)
    skips_.stop(global, progress_);
  const double divisor = averaged ? 1 : global.divisor * progress_.loss_scale().value();  // M S in docs/engine.md
  const double norm = std::sqrt(global.sum_of_squares) / divisor;
  const double clip = config().train().gradient_clipping;
  const double scale = clip > 0 ? std::min(1.0, clip / (norm + 1e-6)) : 1.0;
  progress_.set_grad_mul(static_cast<float>(step_->factor(scale) / divisor));
  progress_.set_gradients_local(step_->is_local());
  progress_.set_learning_rate(rate);
  step_timer_.lap(run::Phase::step_sync);

  if (offload::DiskBackedBuffers* disk_buffers = state_.disk_buffers()) disk_buffers->step_end();
  const bool any_touched = std::ranges::any_of(global.touched, [](char touched) { return touched != 0; });
  const bool applied = global.non_finite == 0 && any_touched;
  applied ? update_weights(global, rate, norm) : update_.skip();
  context.report_event(ZR_STEP_END, step_->use_flags());
  step_timer_.lap(run::Phase::gather);
  if (!any_touched) reject_step();

  progress_.complete_step(global.loss, norm, applied);
  context.comm.set_step(progress_.current_step());
  monitor_.clear_saved_hashes();
  job_.name.record_step(progress_.step());
  finish_step(global, rate);
  checkpointer_.save_if_due(global);
  if (progress_.done()) recorder_->settle_rows();
}

// An exception of the program's function drops the step on all ranks, because other ranks may have edited their parts.
bool Session::average_gradients() {
  if (!update_.edits_gradients()) return false;
  const StepSync::Totals totals = step_sync_.totals(progress_.weights(), gradients_.touched());
  const double divisor = totals.divisor * progress_.loss_scale().value();
  const bool rejected = !(totals.weight > 0) || !std::isfinite(totals.weight) || !std::isfinite(divisor);
  if (rejected) return false;  // by exchange_statistics()
  const std::exception_ptr failure = exception_of([&] { update_.edit_gradients(divisor, totals.touched); });
  const std::vector<char> failed = job::all_gather(job_.comm, static_cast<char>(failure ? 1 : 0), "edited gradients");
  const auto first = std::find(failed.begin(), failed.end(), 1);
  if (first == failed.end()) return true;
  drop_step();
  if (failure) std::rethrow_exception(failure);
  throw PeerFailedError(
      fmt::format("engine.step(): the function passed to engine.edit_gradients() failed on rank {} in step {}; the "
                  "model is unchanged; see that rank's error",
                  first - failed.begin(), progress_.step() + 1));
}

GlobalStats Session::exchange_statistics() {
  if (!update_.early_failed()) monitor_.collect_writes();
  const int64_t samples = progress_.accumulation() * config().train().micro_batch;
  StepSync::LocalStats own{
      progress_.losses(),     progress_.weights(),           progress_.tokens() ? progress_.tokens() : samples,
      &gradients_.touched(),  gradients_.first_non_finite(), stop_signal_->received(),
      checkpointer_.failed(), update_.early_failed(),        monitor_.take_collected()};
  step_->add_to(own);
  own.digest = monitor_.next_digest();
  const GlobalStats global = step_sync_.exchange(own);
  if (global.masters_changed) local_.masters_changed();
  update_.check_early(global.failed_rank);
  monitor_.digest().compare(global.digests, job_.comm, progress_.step() + 1);
  if (global.weight > 0 && std::isfinite(global.weight)) return global;
  drop_step();
  fail_user(
      fmt::format("engine.step(): the weights passed to engine.backward(loss, weight) for step {} add up to {} over "
                  "all ranks and micro-batches, but the sum must be finite and above 0; the model is unchanged; pass a "
                  "weight above 0 for at least one micro-batch, or skip the step on all ranks",
                  progress_.step() + 1, shortest(global.weight)));
}

void Session::update_weights(const GlobalStats& global, double rate, double norm) {
  progress_.begin_update(global.touched);
  const float grad_mul = progress_.grad_mul();
  const int64_t number = progress_.updates() + 1;
  step_->update({grad_mul, number, norm, rate, progress_.param_steps(), global.touched});
  progress_.updated();
  step_->updated(number);
  monitor_.digest().updated(global.touched);
  step_timer_.lap(run::Phase::optimizer);
  monitor_.publish_weights(false, step_->use_flags());
  std::vector<uint32_t> changed;
  for (uint32_t param = 0; param < global.touched.size(); ++param)
    if (global.touched[param]) changed.push_back(param);
  job_.context.model.values_replaced(changed);
}

void Session::set_accumulation(int accumulation) {
  const std::string call = fmt::format("engine.set_accumulation({})", accumulation);
  if (accumulation < 1) fail_user(call + ": a step has at least one micro-batch per rank; pass 1 or more");
  if (progress_.within_step())
    fail_user(call + " was called within a step; call it after the engine.step() that ends the step");
  const plan::PlanInput& planned = plan().input;
  if (accumulation > 1 && planned.accumulation == 1 && !planned.accumulates_locally)
    fail_user(call +
              ": the memory plan has no sums over micro-batches, because train.gradient_accumulation is 1 "
              "and gradients.reduce is \"each_micro_step\"; set train.gradient_accumulation to 2 or more in the "
              "configuration and call engine.set_accumulation(1) before the first step, or set gradients.reduce = "
              "\"last_micro_step\"");
  if (accumulation == progress_.accumulation()) return;
  progress_.set_accumulation(accumulation);
  gradients_.set_accumulation(accumulation);
  update_.forget_order();
}

void Session::drop_step() {
  job_.context.report_event(ZR_STEP_END, step_->use_flags());
  if (offload::DiskBackedBuffers* disk_buffers = state_.disk_buffers()) disk_buffers->step_end();
  progress_.drop_micro_steps();
  seed_model(job_.context, progress_);
  step_timer_.restart_clock();
}

// No micro-batch on any rank gave a gradient. Nothing was updated; the next backward begins the same step again.
void Session::reject_step() {
  progress_.drop_micro_steps();
  seed_model(job_.context, progress_);
  std::string names;
  const auto& parameters = plan().input.parameters;
  const bool all_frozen = std::ranges::all_of(parameters, [](const plan::Parameter& p) { return p.frozen; });
  for (std::size_t i = 0; i < std::min<std::size_t>(parameters.size(), 3); ++i)
    names += fmt::format("{}{}'", i ? ", '" : "'", parameters[i].name);
  fail_user(fmt::format(
      "engine.step(): in step {}, no parameter of this engine's model ({}{}) got a gradient on any rank{}",
      progress_.step() + 1, names, parameters.size() > 3 ? ", ..." : "",
      all_frozen ? ", because all parameters were frozen (requires_grad = false) when the engine was created; "
                   "call requires_grad_(true) and then engine.refresh()"
                 : "; compute the loss with this model, without detach() or torch::NoGradGuard between the "
                   "parameters and the loss, and unfreeze the parameters that it uses"));
}

void Session::finish_step(const GlobalStats& global, double rate) {
  step_timer_.step(global, rate, progress_);
  LossScale& scale = progress_.loss_scale();
  global.non_finite > 0 ? scale.step_skipped() : scale.step_applied();
  if (global.non_finite > 0) skips_.report(global, progress_);
  gradients_.check_non_finite(scale.checks_gradients());
  progress_.end_step(int64_t{progress_.accumulation()} * config().train().micro_batch * world());
  if (scale.skip_limit_reached()) skips_.fail_too_many_skips(global, progress_);
  seed_model(job_.context, progress_);
  const int64_t step = progress_.step(), steps = progress_.steps();
  if (step == steps + 1 && rank() == 0)
    log(ZR_LOG_INFO, fmt::format("step {} is past train.steps = {} ({}); raise train.steps, or call engine.finish() "
                                 "after the last step to write the weights hash to summary.json",
                                 step, steps, config().train().steps.origin.text()));
  if (step != steps && !global.stop) return;
  if (!progress_.updated_in_run() && rank() == 0)
    log(ZR_LOG_WARN, fmt::format("no step of this run updated the weights, because gradients were not finite (skipped "
                                 "steps: {}); check the data, {}",
                                 progress_.steps_of_run(), skips_.remedy()));
  write_totals();
}

void Session::finish() {
  update_.before_access("engine.finish()");
  checkpointer_.wait_for_save();
  write_totals();
}

void Session::write_summary() {
  if (monitor_.written_parameter()) recorder_->clear_hash();
  const WeightDigest& digest = monitor_.digest();
  recorder_->set_digest({digest.bytes(), digest.optimizer_bytes(), digest.cycles()});
  recorder_->finish(job_.ledger, step_timer_.overlap(gradients_, step_sync_.norm(), &update_));
}

double Session::mean(double value) {
  double sum = 0;
  for (const double other : job::all_gather(job_.comm, value, "mean")) sum += other;
  return sum / world();
}

void Session::validation(double loss) {
  recorder_->validation(progress_.step(), loss);
  step_timer_.restart_clock();
}

void Session::evaluation(bool begins) {
  if (!begins) buffers_.end_evaluation();
  progress_.check_complete();
  if (begins) monitor_.publish_replacements();
  if (begins)
    step_timer_.exclude([&] {
      monitor_.compare_weights();
      buffers_.begin_evaluation(job_.comm);
    });
  weights_.set_phase(begins ? ZR_EVAL : ZR_FORWARD, progress_.next_micro());
  job_.context.report_event(begins ? ZR_EVAL_BEGIN : ZR_EVAL_END);
  if (!begins) monitor_.publish_replacements();
  if (!begins) step_timer_.restart_clock();
}

RefreshState Session::hand_over(ParameterChange change) {
  RefreshState state = refresh_.hand_over(std::move(change), step_sync_.norm(), update_);
  state.recorder = recorder_;
  state.trace = job_.trace;
  state.stop_signal = stop_signal_;
  return state;
}

void Session::return_weights(zr_dtype dtype) {
  const job::StepContext& context = job_.context;
  progress_.check_complete();
  if (progress_.within_step())
    fail_user(
        fmt::format("engine.release() was called within a step, after {} of its engine.backward() calls; call it after "
                    "engine.step()",
                    progress_.micro() + progress_.in_backward()));
  context.model.check_scopes("engine.release()");
  checkpointer_.wait_for_save();
  monitor_.compare();
  const auto count = static_cast<uint32_t>(plan().input.parameters.size());
  const plan::PlanInput& input = plan().input;
  // Parameters that keep fp32 are not converted to the dtype of the others.
  const auto target = [&](uint32_t param) { return dtype == ZR_F32 ? dtype : input.dtype_of(param); };
  const auto converts = [&](uint32_t param) { return target(param) != input.dtype_of(param); };
  std::vector<void*> memory(count, nullptr);
  std::string problem;
  try {
    for (uint32_t param = 0; param < count; ++param)
      memory[param] =
          context.model.reserve_parameter(param, target(param), converts(param) || weights_.is_sharded(param));
  } catch (const std::exception& error) {
    const std::string reason(error.what(), std::strcspn(error.what(), "\n"));
    problem = fmt::format("rank {} cannot allocate memory for the full model: {}", rank(), reason);
  }
  problem.resize(400);
  for (const std::string& rank_problem : job_.comm.all_gather_bytes(problem, "memory for the full model")) {
    if (!rank_problem[0]) continue;
    context.model.cancel_reserved_parameters();
    fail_environment(
        fmt::format("engine.release(): {}; the engine is unchanged; free memory, raise memory.device_budget, or read "
                    "single parameters with engine.get()",
                    rank_problem.substr(0, rank_problem.find('\0'))));
  }
  for (uint32_t param = 0; param < count; ++param) {
    if (!memory[param]) continue;
    if (converts(param)) {
      tensors_.read(param, state::LogicalTensor::value, "", static_cast<float*>(memory[param]));
    } else {
      const auto bytes = static_cast<std::size_t>(input.parameters[param].count * size_of(target(param)));
      weights_.with_full(param, [&](const void* full) { std::memcpy(memory[param], full, bytes); });
    }
  }
  if (dtype != input.weight_dtype) context.model.convert_buffers(dtype);
  job_.comm.barrier("weights returned to the model");  // a peer may still read what this rank is about to free
}

}  // namespace zr::host::engine
