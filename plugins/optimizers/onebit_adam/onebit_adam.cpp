// 1-bit Adam (Tang et al. 2021): AdamW until the variance is stable; from then on the variance is frozen, and ranks
// exchange their momentum as signs and scales, with error feedback.
#include <optional>
#include <vector>

#include "../adamw/hyperparameters.hpp"
#include "exchange.hpp"
#include "zr/abi/draft/optimizer_shapes.h"
#include "zr/local_gradients.hpp"

namespace {

class OneBitAdam : public zr::Optimizer<OneBitAdam> {
 public:
  static constexpr const char* description = "1-bit Adam: after a warm-up, compressed momentum instead of gradients";
  static constexpr const char* license = "Apache-2.0";
  using H = AdamWHyperparameters;
  static constexpr zr_key keys[] = {
      H::kBeta1, H::kBeta2, H::kEps, H::kWeightDecay,
      zr::key_int(
          "freeze_step", "1000", 1, 1e15,
          "number of updates with exact AdamW; later ones use the variance of this one, and communicate signs")};
  static constexpr uint32_t needs = ZR_OPT_NEEDS_LOCAL_GRADS | ZR_OPT_NEEDS_COMM;
  static constexpr bool rounds = true;
  static constexpr bool ignores_norm = true;
  static constexpr zr_slot slots[] = {zr::slot("exp_avg"), zr::slot("exp_avg_sq", ZR_F32, ZR_SLOT_UNSHARDED),
                                      zr::slot("carry", ZR_F32, ZR_SLOT_RANK_PRIVATE | ZR_SLOT_UNSHARDED),
                                      zr::slot("server_error", ZR_F32, ZR_SLOT_RANK_PRIVATE)};

  OneBitAdam(const zr::Config& config, const zr::Host& host)
      : host_(host),
        hyperparameters_(config),
        freeze_step_(config.integer("freeze_step")),
        exact_(ZR_CHOOSE(adamw)),
        compressed_(ZR_CHOOSE(onebit_update)) {}

  uint32_t gradients(int64_t step) const { return step > freeze_step_ ? ZR_GRADS_LOCAL : ZR_GRADS_REDUCED; }
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
  }

  void update(const zr::Update& u) const {
    AdamWRun run{u.weight, u.grad, nullptr, u.slot(1), u.count, u.out, u.out_dtype, u.streams};
    if (u.slice.slots[0].count > 0) run.exp_avg = u.slot(0);
    if (u.job.step <= freeze_step_) return exact_(hyperparameters_.constants(u.mul, u.step, u.lr), run);
    compressed_(frozen_constants(u), run);
  }

 private:
  // The second moment has had at most freeze_step_ updates.
  AdamWConstants frozen_constants(const zr::Update& u) const {
    AdamWConstants c = hyperparameters_.constants(1, u.step, u.lr);
    const H& h = hyperparameters_;
    const double correction = std::sqrt(1 - std::pow(h.beta2, static_cast<double>(std::min(u.step, freeze_step_))));
    c.rate = static_cast<float>(u.lr * correction / (1 - std::pow(h.beta1, static_cast<double>(u.step))));
    c.eps = static_cast<float>(h.eps * correction);
    return c;
  }

  zr::Host host_;
  AdamWHyperparameters hyperparameters_;
  int64_t freeze_step_;
  decltype(ZR_CHOOSE(adamw)) exact_;
  decltype(ZR_CHOOSE(onebit_update)) compressed_;
  onebit::Kernels kernels_;
  std::optional<zr::Comm> comm_;
  std::optional<zr::Tasks> tasks_;
};

}  // namespace

ZR_OPTIMIZER(OneBitAdam, "onebit_adam", "zeroth", "0.1.0");
