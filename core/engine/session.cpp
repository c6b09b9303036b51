#include "engine/session.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/dtype.hpp"
#include "base/failure.hpp"
#include "base/log.hpp"
#include "base/text.hpp"
#include "update/schedule.hpp"

namespace zr::host {

namespace {
using Clock = std::chrono::steady_clock;

// A generator state from three numbers, by the finaliser of SplitMix64.
uint64_t mix(uint64_t a, uint64_t b, uint64_t c) {
  uint64_t x = a;
  for (const uint64_t y : {b, c}) {
    x += 0x9e3779b97f4a7c15u + y;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    x ^= x >> 31;
  }
  return x;
}

// Every rank's value, in rank order.
template <class T>
std::vector<T> all_gather(CommRuntime& comm, const T& mine, const char* label) {
  static_assert(std::is_trivially_copyable_v<T>);
  std::vector<T> values;
  for (const std::string& bytes :
       comm.all_gather_bytes(std::string(reinterpret_cast<const char*>(&mine), sizeof mine), label)) {
    T value;
    std::memcpy(&value, bytes.data(), sizeof value);
    values.push_back(value);
  }
  return values;
}
}  // namespace

void Session::lap(Phase phase) {
  const auto now = Clock::now();
  recorder_->add(phase, std::chrono::duration<double>(now - mark_).count());
  const TierWaits waits = tier_waits();
  recorder_->add_waits(phase, waits.read - waited_.read, waits.write - waited_.write);
  waited_ = waits;
  if (trace_) trace_->span("training", std::string(kPhaseNames[static_cast<std::size_t>(phase)]), mark_, now);
  mark_ = now;
}

void Session::restart_clock() {
  mark_ = step_start_ = Clock::now();
  waited_ = tier_waits();
}

void Session::call(zr_code code, const zr_error& error, const std::string& who) {
  if (code == ZR_OK) return;
  if (const auto failure = comm_ ? comm_->take_failure() : nullptr) std::rethrow_exception(failure);
  if (const auto failure = host_.take_failure()) std::rethrow_exception(failure);
  check(code, error, who);
}

void Session::reseed() {
  model_.seed(mix(static_cast<uint64_t>(config().integer("train.seed")), static_cast<uint64_t>(step_),
                  static_cast<uint64_t>(micro_index())));
}

void Session::begin_backward(double loss, double weight) {
  check_backward();
  if (micro_ == accumulation_)
    fail_user("engine.backward() was called " + std::to_string(accumulation_ + 1) +
              " times without engine.step(); call engine.step() after every backward");
  if (!(weight >= 0) || !std::isfinite(weight))
    fail_user("engine.backward(loss, weight): the weight is " + shortest(weight) +
              ", but must be a finite number of at least 0");
  if (weight > 0 && (weight < std::numeric_limits<float>::min() || weight > std::numeric_limits<float>::max()))
    fail_user("engine.backward(loss, weight): the weight is " + shortest(weight) +
              ", but must be 0 or an fp32 number from 1.2e-38 to 3.4e38; scale the weights of the step alike");
  if (plan_.input.weight_dtype == ZR_F16 && weight > 0 && (weight < 0x1p-10 || weight > 0x1p15))
    fail_user(
        "engine.backward(loss, weight): the weight is " + shortest(weight) +
        ", but with train.dtype = \"fp16\" it must be 0 or from 0.001 to 32768, as it scales the gradients; divide "
        "the weights of all micro-batches by one number, such as the mean number of tokens");
  lap(Phase::forward);
  model_.verify();
  in_backward_ = true;
  gradients_summed_ = false;
  model_.hide_gradients(false);
  weight_flow_->set_phase(ZR_BACKWARD);
  losses_.push_back(loss);
  weights_.push_back(weight);
  if (micro_ + 1 == accumulation_) step_sync_->norm().expect();
  gradients_->begin(static_cast<uint32_t>(micro_), weight > 0);
}

void Session::fail_backward() {
  if (!in_backward_ || !gradients_->cancel()) return;
  weight_flow_->set_phase(ZR_FORWARD);
  model_.hide_gradients(true);
  losses_.pop_back();
  weights_.pop_back();
  in_backward_ = false;
}

void Session::end_backward() {
  lap(Phase::backward);
  gradients_->end();
  weight_flow_->set_phase(ZR_FORWARD);
  model_.hide_gradients(true);
  in_backward_ = false;
  lap(Phase::reduce);
  if (++micro_ < accumulation_) reseed();
}

void Session::check_complete() const {
  if (incomplete_)
    fail_user("the checkpoint that was loaded last was not whole, so the weights are none: load another one");
}

// Gradients of half a backward are in the buckets, and nobody knows which.
void Session::check_backward() const {
  check_complete();
  if (in_backward_)
    fail_user(
        "the last engine.backward() ended with an exception, so that its gradients are incomplete; end the job, or "
        "make a new engine");
}

bool Session::step() {
  check_backward();
  if (micro_ == 0) fail_user("engine.step() was called without engine.backward(loss) before it");
  model_.check_scopes("engine.step()");  // before anything changes, on every micro-step
  if (micro_ < accumulation_) return false;
  CallError error;
  for (const auto& tier : tiers_)
    if (tier && tier->failed())
      fail_environment(tier->failure() + "; what stands there is not whole: end the job and go on from its last " +
                       "checkpoint");
  states_->read_ahead(slices_);
  const int64_t communication_before = recorded_communication_;
  if (const auto* optimizer = optimizer_->api<zr_optimizer_api>(); optimizer->phase) {
    uint32_t grads = ZR_GRADS_REDUCED;
    call(optimizer->phase(optimizer_->self(), updates_ + 1, &grads, &error), error, optimizer_->who("phase"));
    if (grads != ZR_GRADS_REDUCED)
      fail_bug(optimizer_->who("phase") + " wants local gradients, a need it has not declared");
  }
  call(strategy_->api<zr_strategy_api>()->grads_finish(strategy_->self(), &error), error,
       strategy_->who("grads_finish"));
  lap(Phase::reduce);

  take_written();
  const GlobalStats global = step_sync_->exchange(
      {losses_, weights_, tokens_ ? tokens_ : accumulation_ * config().integer("train.micro_batch"),
       &gradients_->touched(), gradients_->first_non_finite(), stop_signal_ ? StopSignal::received() : 0,
       saver_->failed(), weight_digest_->next()});
  weight_digest_->compare(global.digests, *comm_, step_ + 1);
  if (!(global.weight > 0) || !std::isfinite(global.weight)) abandon_step(global);
  const double divisor = global.weight * loss_scale_.value();  // M S
  const double norm = std::sqrt(global.sum_of_squares) / divisor;
  const double clip = config().number("train.gradient_clipping");
  const double scale = clip > 0 ? std::min(1.0, clip / (norm + 1e-6)) : 1.0;
  grad_mul_ = static_cast<float>(scale / divisor);
  const double rate = learning_rate(config(), updates_);
  lap(Phase::step_sync);

  if (disk_buffers_) disk_buffers_->step_end();
  const bool reached = reaches(global);
  const bool applied_before = applied_;
  applied_ = global.non_finite == 0 && reached;
  if (applied_) {
    std::vector<double> rates(global.touched.size());
    for (std::size_t i = 0; i < rates.size(); ++i) {
      rates[i] = rate * group_rates_[plan_.input.parameters[i].group];
      param_steps_[i] += global.touched[i] ? 1 : 0;
    }
    update_weights({grad_mul_, updates_ + 1, norm, &param_steps_, &rates, &global.touched});
    ++updates_;
    weight_digest_->updated(global.touched);
    lap(Phase::optimizer);
    notify_updated();
  }
  call(strategy_->api<zr_strategy_api>()->event(strategy_->self(), ZR_STEP_END, 0, &error), error,
       strategy_->who("event"));
  lap(Phase::gather);
  if (!reached) {
    applied_ = applied_before;
    reject_step();
  }

  write_tiers();
  comm_->note_step(++step_);
  saved_weights_.clear();
  name_.at_step(step_);
  micro_ = 0;
  gradients_summed_ = true;
  last_ = {global.loss, norm};
  finish_step(global, rate, communication_before);
  save_if_due(global);
  return true;
}

bool Session::reaches(const GlobalStats& global) const {
  return std::any_of(global.touched.begin(), global.touched.end(), [](char touched) { return touched != 0; });
}

// No micro-batch of any rank gave a gradient. Nothing was updated; the next backward begins the same step again.
void Session::reject_step() {
  micro_ = 0;
  losses_.clear();
  weights_.clear();
  tokens_ = 0;
  reseed();
  std::string names;
  const auto& parameters = plan_.input.parameters;
  const bool all_frozen =
      std::all_of(parameters.begin(), parameters.end(), [](const Parameter& p) { return p.frozen; });
  for (std::size_t i = 0; i < std::min<std::size_t>(parameters.size(), 3); ++i)
    names += (i ? ", '" : "'") + parameters[i].name + "'";
  fail_user("engine.step(): step " + std::to_string(step_ + 1) + " gave no parameter of this engine's model (" + names +
            (parameters.size() > 3 ? ", ..." : "") + ") a gradient on any rank" +
            (all_frozen ? ", because all of them were frozen (requires_grad false) when the engine was made; call "
                          "requires_grad_(true) and then engine.refresh()"
                        : "; compute the loss with this model, without detach() or torch::NoGradGuard between the "
                          "parameters and the loss, and unfreeze the parameters that it uses"));
}

// OptimizerStates on disk are on their way while those in memory are worked on.
void Session::update_weights(const UpdateInput& input) {
  UpdateInput staged = input;
  staged.staged = true;
  const auto work = [&](const std::vector<UpdateSlice>& all, const UpdateInput& how) {
    const auto in_memory = [&](const std::vector<UpdateSlice>& slices) {
      update(*optimizer_, granularity_, pool_, plan_, slices, how);
    };
    disk_buffers_ ? disk_buffers_->update(all, *input.touched, in_memory) : in_memory(all);
  };
  work(direct_, input);
  work(staged_, staged);
  states_->pass(slices_, *input.touched, [&](const std::vector<UpdateSlice>& slices) { work(slices, staged); });
}

// What tiers moved.
void Session::write_tiers() {
  std::vector<TierRow> rows;
  for (const auto& tier : tiers_)
    if (tier) rows.push_back({tier->info().id, tier->info().tier, tier->read_bytes(), tier->written_bytes()});
  recorder_->set_tiers(std::move(rows));
}

// Since the start, by this thread.
TierWaits Session::tier_waits() const {
  TierWaits all = states_ ? states_->waits() : TierWaits{};
  if (activations_) {
    all.read += activations_->counts().read_wait;
    all.write += activations_->counts().write_wait;
  }
  if (disk_buffers_) {
    all.read += disk_buffers_->waits().read;
    all.write += disk_buffers_->waits().write;
  }
  return all;
}

void Session::finish_step(const GlobalStats& global, double rate, int64_t communication_before) {
  recorded_communication_ = 0;
  for (const int64_t bytes : all_gather(*comm_, comm_->volume().total() - excluded_communication_, "wire count"))
    recorded_communication_ += bytes;
  const Model::Temporaries temporaries = model_.temporaries();
  ledger_.observe(Tier::device, MemoryKind::activations, "activations and temporaries", temporaries.held,
                  temporaries.peak);
  lap(Phase::step_sync);
  const double seconds = std::chrono::duration<double>(mark_ - step_start_).count();
  step_start_ = mark_;
  recorder_->step({step_, last_.loss, last_.grad_norm, rate, global.tokens, seconds * 1e3,
                   static_cast<double>(global.tokens) / seconds, recorded_communication_ - communication_before,
                   global.non_finite > 0, plan_.input.weight_dtype == ZR_F16 ? loss_scale_.value() : 0},
                  ledger_.peak(Tier::device));
  global.non_finite > 0 ? loss_scale_.skipped() : loss_scale_.made();
  if (global.non_finite > 0) report_skip(global);
  gradients_->watch(loss_scale_.watches());
  losses_.clear();
  weights_.clear();
  tokens_ = 0;
  samples_ += config().integer("train.global_batch");
  if (loss_scale_.gives_up()) give_up(global);
  reseed();
  const int64_t steps = config().integer("train.steps");
  if (step_ == steps + 1 && rank() == 0)
    log(ZR_LOG_INFO, "step " + std::to_string(step_) + " is past train.steps = " + std::to_string(steps) + " (" +
                         config().origin("train.steps").text() +
                         "); raise train.steps, or call engine.finish() after the last step, so that summary.json " +
                         "has its weights hash");
  if (step_ != steps && !global.stop) return;
  if (updates_ == updates_before_ && rank() == 0)
    log(ZR_LOG_WARN, "no step of this run updated the weights, as gradients were not finite (steps skipped: " +
                         std::to_string(step_ - begun_) + "); look at the data, " + remedy_for_skips());
  write_totals();
}

std::string Session::remedy_for_skips() const {
  return std::string("lower optimizer.lr or set train.gradient_clipping") +
         (plan_.input.weight_dtype == ZR_F16 ? ", or set train.dtype = \"bf16\", which has fp32's range" : "");
}

void Session::report_skip(const GlobalStats& global) {
  constexpr int64_t kLines = 10, kSteps = 100;
  ++skips_;
  if (skip_lines_ >= kLines && step_ - last_skip_line_ < kSteps) return;
  const auto name = [&](int64_t param) {
    return "'" + plan_.input.parameters[static_cast<std::size_t>(param)].name + "'";
  };
  std::string text = "step " + std::to_string(step_) + " skipped, weights unchanged: ";
  text += global.non_finite_rank >= 0 ? "the gradient of " + name(global.first_local_param) +
                                            " is not finite on rank " + std::to_string(global.non_finite_rank)
                                      : "the reduced gradient of " + name(global.first_param) + " is not finite";
  if (global.loss_rank >= 0) text += "; the loss of rank " + std::to_string(global.loss_rank) + " is not finite either";
  if (plan_.input.weight_dtype == ZR_F16) text += "; the loss scale is now " + shortest(loss_scale_.value());
  if (const int64_t silent = skips_ - skips_reported_ - 1; silent > 0)
    text += "; " + std::to_string(silent) + " more skipped since the last such line";
  if (++skip_lines_ == kLines)
    text +=
        "; from here on one such line per " + std::to_string(kSteps) + " steps at most, see `skipped` in metrics.jsonl";
  skips_reported_ = skips_;
  last_skip_line_ = step_;
  if (rank() == 0) log(ZR_LOG_WARN, text);
}

void Session::give_up(const GlobalStats& global) const {
  const int64_t skips = loss_scale_.skips_in_a_row();
  const auto name = [&](int64_t param) {
    return "'" + plan_.input.parameters[static_cast<std::size_t>(param)].name + "'";
  };
  std::string text = "gradients were not finite in " + std::to_string(skips) +
                     (skips == 1 ? " step" : " steps in a row") + ", as many as train.max_skipped_steps (" +
                     config().origin("train.max_skipped_steps").text() + ") allows: ";
  text += global.non_finite_rank >= 0
              ? name(global.first_local_param) + " was the first parameter that overflowed, on rank " +
                    std::to_string(global.non_finite_rank)
              : name(global.first_param) +
                    " was the first parameter whose sum over ranks and "
                    "micro-batches overflowed, no rank's own gradient did";
  if (global.loss_rank >= 0)
    text += "; the loss of rank " + std::to_string(global.loss_rank) + " was not finite either";
  text += "; the weights are those after step " + std::to_string(step_ - skips);
  const bool fp16 = plan_.input.weight_dtype == ZR_F16;
  if (fp16) text += ", the loss scale came to " + shortest(loss_scale_.value());
  fail_user(text + "; look at the data of that rank, " + remedy_for_skips());
}

void Session::notify_updated() {
  CallError error;
  call(strategy_->api<zr_strategy_api>()->updated(strategy_->self(), &error), error, strategy_->who("updated"));
  weight_samples_.remember();
}

// Before weights leave the engine, for a file or a hash: what was written to them since the last step is compared.
void Session::compare_weights() {
  take_written();
  weight_digest_->compare(all_gather(*comm_, weight_digest_->next(), "digests of weights"), *comm_, step_);
}

void Session::finish() {
  settle();
  write_totals();
}

void Session::write_totals() {
  const std::string hash = weights_hash();
  CommVolume all, mine = comm_->volume();
  mine += earlier_communication_;
  for (const CommVolume& other : all_gather(*comm_, mine, "wire count")) all += other;
  recorder_->set_totals(hash, all);
  restart_clock();
}

void Session::write_summary() {
  if (!model_.written().empty() || !stored_full_.empty() || !weight_samples_.changed().empty())
    recorder_->forget_hash();
  recorder_->set_digest({weight_digest_->bytes(), weight_digest_->optimizer_bytes(), weight_digest_->cycles()});
  recorder_->finish(ledger_, overlap());
}

double Session::mean(double value) {
  double sum = 0;
  for (const double other : all_gather(*comm_, value, "mean")) sum += other;
  return sum / world();
}

void Session::validation(double loss) {
  recorder_->validation(step_, loss);
  restart_clock();
}

void Session::evaluation(bool begins) {
  if (!begins) model_buffers_.end_evaluation();
  check_complete();
  if (begins) {
    const int64_t before = comm_->volume().total();
    model_buffers_.begin_evaluation(*comm_);
    excluded_communication_ += comm_->volume().total() - before;
  }
  weight_flow_->set_phase(begins ? ZR_EVAL : ZR_FORWARD);
  CallError error;
  call(strategy_->api<zr_strategy_api>()->event(strategy_->self(), begins ? ZR_EVAL_BEGIN : ZR_EVAL_END, 0, &error),
       error, strategy_->who("event"));
  if (!begins) restart_clock();
}

}  // namespace zr::host
