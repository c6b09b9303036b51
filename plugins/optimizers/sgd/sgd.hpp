// SGD without the library around it: D is the class that the library exports.
#pragma once

#include "kernel.hpp"
#include "zr/optimizer.hpp"

template <class D>
class SgdOptimizer : public zr::Optimizer<D> {
 public:
  static constexpr const char* description = "gradient descent with momentum and weight decay";
  static constexpr const char* license = "Apache-2.0";
  static constexpr zr_key keys[] = {
      zr::key_float("momentum", "0", 0, zr::kNoBound, "momentum factor; 0: no momentum buffer"),
      zr::key_float("dampening", "0", -zr::kNoBound, 1,
                    "fraction of the gradient that is not added to the momentum buffer"),
      zr::key_bool("nesterov", "false", "use Nesterov momentum; needs momentum above 0 and dampening 0"),
      zr::per_group(
          zr::key_float("weight_decay", "0", 0, zr::kNoBound, "fraction of the weight that is added to its gradient")),
  };
  static constexpr zr_slot slots[] = {zr::slot("momentum_buffer")};
  static constexpr bool rounds = true;
  static constexpr bool ignores_norm = true;  // update() does not read Update::job.grad_norm

  explicit SgdOptimizer(const zr::Config& config)
      : momentum_(config.number("momentum")),
        dampening_(config.number("dampening")),
        weight_decay_(config.number("weight_decay")),
        nesterov_(config.boolean("nesterov")),
        kernel_(ZR_CHOOSE(sgd)) {
    if (nesterov_ && (momentum_ == 0 || dampening_ != 0)) {
      throw zr::PluginError(ZR_INVALID,
                            "nesterov = true needs momentum above 0 and dampening = 0: set those, or nesterov = false");
    }
  }
  uint32_t n_slots() const { return has_buffer() ? 1 : 0; }

  void update(const zr::Update& u) const {
    kernel_(constants(u.mul, u.step, u.lr),
            {u.weight, u.grad, has_buffer() ? u.slot(0) : nullptr, u.count, u.out, u.out_dtype, u.streams});
  }

 protected:
  bool has_buffer() const { return momentum_ != 0; }

  /// mul: factor of the reduced gradient; step: of the parameter.
  SgdConstants constants(float mul, int64_t step, double lr) const {
    SgdConstants c;
    c.mul = mul;
    c.weight_decay = static_cast<float>(weight_decay_);
    c.momentum = static_cast<float>(momentum_);
    c.gain = static_cast<float>(1 - dampening_);
    c.lr = static_cast<float>(lr);
    c.decays = weight_decay_ != 0;
    c.first = step == 1;
    c.nesterov = nesterov_;
    return c;
  }

 private:
  double momentum_, dampening_, weight_decay_;
  bool nesterov_;
  decltype(ZR_CHOOSE(sgd)) kernel_;
};
