// 1-bit Adam (Tang et al. 2021): AdamW until the variance is stable; from then on the variance is frozen, and ranks
// exchange their momentum as signs and scales, with error feedback.
#include <cstdio>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "../adamw/hyperparameters.hpp"
#include "exchange.hpp"
#include "warm_up.hpp"
#include "zr/abi/draft/optimizer_shapes.h"
#include "zr/local_gradients.hpp"
#include "zr/optimizer_globals.hpp"

namespace {

constexpr int32_t kSecondMoment = 1;  // index of the state
constexpr const char* kWarmUpKey = "warm_up";

class OneBitAdam : public zr::Optimizer<OneBitAdam> {
 public:
  static constexpr const char* description = "1-bit Adam: after a warm-up, compressed momentum instead of gradients";
  static constexpr const char* license = "Apache-2.0";
  using H = AdamWHyperparameters;
  static constexpr zr_key keys[] = {
      H::kBeta1, H::kBeta2, H::kEps, H::kWeightDecay,
      zr::key_int("freeze_step", "1000", 0, 1e15,
                  "number of updates with exact AdamW; later ones use the variance of this one, and communicate signs; "
                  "0: until the variance is stable")};
  static constexpr uint32_t needs = ZR_OPT_NEEDS_LOCAL_GRADS | ZR_OPT_NEEDS_COMM;
  static constexpr bool rounds = true;
  static constexpr bool ignores_norm = true;
  static constexpr zr_slot slots[] = {zr::slot("exp_avg"), zr::slot("exp_avg_sq", ZR_F32, ZR_SLOT_UNSHARDED),
                                      zr::slot("carry", ZR_F32, ZR_SLOT_RANK_PRIVATE | ZR_SLOT_UNSHARDED),
                                      zr::slot("server_error", ZR_F32, ZR_SLOT_RANK_PRIVATE)};

  OneBitAdam(const zr::Config& config, const zr::Host& host)
      : host_(host),
        hyperparameters_(config),
        warm_up_(config.integer("freeze_step"), hyperparameters_.beta2),
        exact_(ZR_CHOOSE(adamw)),
        compressed_(ZR_CHOOSE(onebit_update)) {}

  uint32_t gradients(int64_t step, const zr_param_updates* updates) {
    if (!updates) return warm_up_.may_end_before(step) ? ZR_GRADS_LOCAL : ZR_GRADS_REDUCED;
    compresses_ = warm_up_.begin_step(step, *updates);
    return compresses_ ? ZR_GRADS_LOCAL : ZR_GRADS_REDUCED;
  }
  void bind(const zr::Comm& comm) {
    comm_.emplace(comm);
    tasks_.emplace(host_);
  }
  void plan_exchange(zr_exchange_plan& sizes) const { onebit::plan_exchange(sizes); }

  void exchange(const zr::Exchange<OneBitAdam>& given) const {
    if (!comm_) throw zr::PluginError(ZR_STATE, "exchange() without bind()");
    std::vector<onebit::Parameter> parameters;
    for (uint32_t i = 0; i < given.size(); ++i) {
      const AdamWConstants c = given.group(i).hyperparameters_.constants(given.job.grad_mul, 1, 0);
      parameters.push_back({&given[i], {c.mul, c.gain1, c.beta1, (given[i].flags & ZR_LOCAL_BEGINS) != 0}});
    }
    onebit::exchange(*comm_, *tasks_, kernels_, parameters, given.scratch);
    warn_of_new_parameters(given);
  }

  int32_t summed_state(int64_t) const { return warm_up_.needs_sum() ? kSecondMoment : -1; }
  void state_sum(int64_t step, double sum) {
    if (!warm_up_.sum(step, sum) || !is_first_rank()) return;
    char change[32];
    std::snprintf(change, sizeof change, "%+.1f %%", 100 * warm_up_.change());
    host_.log(ZR_LOG_INFO, "optimizer 'onebit_adam': the variance is stable (" + std::string(change) + " in " +
                               std::to_string(warm_up_.interval()) + " updates), so the warm-up ends with update " +
                               std::to_string(step));
  }

  void save_globals(const zr::GlobalSink& save) const {
    if (warm_up_.is_automatic()) save(kWarmUpKey, warm_up_.saved());
  }
  void load_global(const char* key, const void* value, uint64_t bytes) {
    onebit::WarmUp::Saved saved;
    if (std::strcmp(key, kWarmUpKey) != 0 || bytes != sizeof saved)
      throw zr::PluginError(ZR_INVALID, std::string("the value '") + key +
                                            "' has another name or size than in this "
                                            "version");
    std::memcpy(&saved, value, sizeof saved);
    warm_up_.restore(saved);
  }

  void update(const zr::Update& u) const {
    AdamWRun run{u.weight, u.grad, nullptr, u.slot(1), u.count, u.out, u.out_dtype, u.streams};
    if (u.slice.slots[0].count > 0) run.exp_avg = u.slot(0);
    const OneBitAdam& job = first_group();
    const int64_t exact_updates = u.step - job.warm_up_.compressed_updates(u.slice.param);
    if (job.compresses_)
      compressed_(hyperparameters_.constants(1, u.step, exact_updates - 1, u.lr), run);
    else
      exact_(hyperparameters_.constants(u.mul, u.step, exact_updates, u.lr), run);
  }

 private:
  bool is_first_rank() const { return comm_ && comm_->rank() == 0; }

  // Without a second moment a parameter is not trained, except for weight decay.
  void warn_of_new_parameters(const zr::Exchange<OneBitAdam>& given) const {
    constexpr uint32_t kNames = 5;
    std::string names;
    uint32_t n = 0;
    for (uint32_t i = 0; i < given.size(); ++i) {
      if (!warm_up_.is_first_update(given[i].param)) continue;
      if (++n <= kNames) names += std::string(n > 1 ? ", '" : "'") + given[i].name + "'";
    }
    if (n == 0 || !is_first_rank()) return;
    if (n > kNames) names += " and " + std::to_string(n - kNames) + " more";
    host_.log(ZR_LOG_WARN, "optimizer 'onebit_adam': update " + std::to_string(given.job.step) +
                               " is the first with a gradient for " + names +
                               ", but the warm-up has ended: the variance is 0, so only weight decay applies; to train "
                               "it, resume with a larger "
                               "optimizer.onebit_adam.freeze_step: the checkpoint's update + the number of updates of "
                               "another warm-up");
  }

  zr::Host host_;
  AdamWHyperparameters hyperparameters_;
  onebit::WarmUp warm_up_;   // of group 0
  bool compresses_ = false;  // the current step is after the warm-up; of group 0
  decltype(ZR_CHOOSE(adamw)) exact_;
  decltype(ZR_CHOOSE(onebit_update)) compressed_;
  onebit::Kernels kernels_;
  std::optional<zr::Comm> comm_;
  std::optional<zr::Tasks> tasks_;
};

}  // namespace

ZR_OPTIMIZER(OneBitAdam, "onebit_adam", "zeroth", "0.1.0");
