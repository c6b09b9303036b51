// LAMB: Adam whose update of each tensor is scaled to the norm of the tensor (You et al. 2020, algorithm 2).
#include <algorithm>
#include <cmath>

#include "kernel.hpp"
#include "zr/partial_sums.hpp"

namespace {

constexpr double kBelowOne = 1 - 0x1p-53;

class Lamb : public zr::SummingOptimizer<Lamb> {
 public:
  static constexpr const char* description =
      "LAMB: AdamW with a learning rate per tensor from the norms of weights and update";
  static constexpr const char* license = "Apache-2.0";
  static constexpr zr_key keys[] = {
      zr::per_group(zr::key_float("beta1", "0.9", 0, kBelowOne, "decay per update of the running mean of gradients")),
      zr::per_group(
          zr::key_float("beta2", "0.999", 0, kBelowOne, "decay per update of the running mean of squared gradients")),
      zr::per_group(zr::key_float("eps", "1e-6", 0, 1, "added to the square root in the denominator")),
      zr::per_group(zr::key_float("weight_decay", "0.01", 0, zr::kNoBound,
                                  "weight decay: this fraction of the weight is added to the direction of the update")),
      zr::per_group(zr::key_float("min_trust_ratio", "0.01", 0, zr::kNoBound,
                                  "lower bound of the ratio of the norms of a tensor and its update")),
      zr::per_group(zr::key_float("max_trust_ratio", "10", 0, zr::kNoBound, "upper bound of that ratio")),
      zr::per_group(zr::key_bool("adapt", "true", "scale the update by that ratio; false: Adam's update, for biases")),
  };
  static constexpr bool rounds = true;

  explicit Lamb(const zr::Config& config)
      : beta1_(config.number("beta1")),
        beta2_(config.number("beta2")),
        eps_(config.number("eps")),
        weight_decay_(config.number("weight_decay")),
        min_ratio_(config.number("min_trust_ratio")),
        max_ratio_(config.number("max_trust_ratio")),
        adapts_(config.boolean("adapt")),
        moments_(ZR_CHOOSE(lamb_moments)),
        update_(ZR_CHOOSE(lamb_update)) {
    if (min_ratio_ > max_ratio_)
      throw zr::PluginError(ZR_INVALID, "min_trust_ratio is larger than max_trust_ratio: lower it");
  }

  static void describe(const zr_param&, zr::Description& description) {
    description.slots = {zr::slot("exp_avg"), zr::slot("exp_avg_sq")};
  }
  static void passes(const zr_param&, std::vector<uint32_t>& sums) { sums = {2}; }

  void add_up(const zr::Update& u) const { moments_(constants(u, 0), run(u), u.sums->block, u.sums->partial); }

  void update(const zr::Update& u) const {
    const double weights = std::sqrt(u.sums->totals[0]), direction = std::sqrt(u.sums->totals[1]);
    const bool scales = adapts_ && weights > 0 && direction > 0;
    const double ratio = scales ? std::clamp(weights / direction, min_ratio_, max_ratio_) : 1;
    update_(constants(u, u.lr * ratio), run(u));
  }

 private:
  LambConstants constants(const zr::Update& u, double rate) const {
    const double step = static_cast<double>(u.step);
    LambConstants c;
    c.mul = u.mul;
    c.beta1 = static_cast<float>(beta1_);
    c.gain1 = static_cast<float>(1 - beta1_);
    c.beta2 = static_cast<float>(beta2_);
    c.gain2 = static_cast<float>(1 - beta2_);
    c.unbias1 = static_cast<float>(1 / (1 - std::pow(beta1_, step)));
    c.unbias2 = static_cast<float>(1 / std::sqrt(1 - std::pow(beta2_, step)));
    c.eps = static_cast<float>(eps_);
    c.weight_decay = static_cast<float>(weight_decay_);
    c.rate = static_cast<float>(rate);
    return c;
  }
  static AdamWRun run(const zr::Update& u) {
    return {u.weight, u.grad, u.slot(0), u.slot(1), u.count, u.out, u.out_dtype, u.streams};
  }

  double beta1_, beta2_, eps_, weight_decay_, min_ratio_, max_ratio_;
  bool adapts_;
  decltype(ZR_CHOOSE(lamb_moments)) moments_;
  decltype(ZR_CHOOSE(lamb_update)) update_;
};

}  // namespace

ZR_OPTIMIZER(Lamb, "lamb", "zeroth", "0.1.0");
