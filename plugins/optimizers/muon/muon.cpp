// Muon: momentum whose matrix is orthogonalized before each update (Jordan et al. 2024). For matrices only.
#include <algorithm>
#include <cmath>
#include <memory>
#include <string>

#include "newton_schulz.hpp"
#include "zr/abi/draft/optimizer_shapes.h"
#include "zr/optimizer.hpp"

namespace {

constexpr double kBelowOne = 1 - 0x1p-53;
// Operations of a matrix product in the time that an elementwise optimizer takes for one element; the unit of costs.
constexpr double kOperationsPerElement = 25;

// The formula of at::lerp.
float lerp(float from, float to, float share) {
  return share < 0.5F ? from + share * (to - from) : to - (to - from) * (1 - share);
}

class Muon : public zr::Optimizer<Muon> {
 public:
  static constexpr const char* description = "Muon: momentum of matrices, orthogonalized";
  static constexpr const char* license = "Apache-2.0";
  static constexpr zr_key keys[] = {
      zr::per_group(
          zr::key_float("momentum", "0.95", 0, kBelowOne, "decay per update of the running mean of gradients")),
      zr::per_group(zr::key_bool("nesterov", "true", "use the gradient once more beside the momentum (Nesterov)")),
      zr::per_group(zr::key_float("weight_decay", "0.1", 0, zr::kNoBound,
                                  "decoupled weight decay: an update multiplies the weight by 1 - lr x weight_decay")),
      zr::per_group(zr::key_float("eps", "1e-7", 0, 1, "lower bound of the norm by which the momentum is divided")),
      zr::per_group(zr::key_text("adjust_lr", "\"original\"", "original|match_rms_adamw",
                                 "factor of the learning rate for an m x n matrix: sqrt(max(1, m/n)), or 0.2 "
                                 "sqrt(max(m, n)), with which learning rates of AdamW work")),
      zr::key_int("iterations", "5", 1, 100, "Newton-Schulz iterations per update"),
      zr::key_text("precision", "\"fp32\"", "fp32|bf16",
                   "number format of the operands and results of the matrix products"),
  };

  Muon(const zr::Config& config, const zr::Host& host)
      : momentum_(config.number("momentum")),
        nesterov_(config.boolean("nesterov")),
        weight_decay_(config.number("weight_decay")),
        eps_(config.number("eps")),
        matches_adamw_(config.text("adjust_lr") == std::string("match_rms_adamw")),
        iterations_(static_cast<int>(config.integer("iterations"))),
        newton_schulz_(std::make_shared<muon::NewtonSchulz>(
            host, config.text("precision") == std::string("bf16") ? muon::Precision::bf16 : muon::Precision::fp32,
            iterations_)) {}

  void describe(const zr_param& param, zr::Description& description) const {
    if (param.flags & ZR_PARAM_FROZEN) return;
    if (param.ndim != 2) {
      throw zr::PluginError(ZR_UNSUPPORTED, std::string("'") + param.name + "' has " + std::to_string(param.ndim) +
                                                (param.ndim == 1 ? " dimension" : " dimensions") +
                                                ", but muon updates matrices only: add a group of [[optimizer.groups]] "
                                                "with use = \"adamw\" that matches it");
    }
    description.granularity = ZR_TENSORWISE;
    description.slots = {zr::slot("momentum_buffer")};
    const double rows = static_cast<double>(std::min(param.shape[0], param.shape[1])),
                 columns = static_cast<double>(std::max(param.shape[0], param.shape[1]));
    const double operations = iterations_ * (4 * rows * rows * columns + 2 * rows * rows * rows);
    description.cost = static_cast<double>(param.count) + operations / kOperationsPerElement;
  }

  void update(const zr::Update& u) const {
    const int64_t rows = u.slice.shape[0], columns = u.slice.shape[1];
    const bool transposes = rows > columns;
    struct Return {
      muon::NewtonSchulz& to;
      muon::NewtonSchulz::Workspace* workspace;
      ~Return() { to.give(workspace); }
    } taken{*newton_schulz_, newton_schulz_->take(std::min(rows, columns), std::max(rows, columns))};
    float* const x = muon::NewtonSchulz::matrix(*taken.workspace);
    add_momentum(u, x, transposes);
    newton_schulz_->run(*taken.workspace, eps_);
    const double m = static_cast<double>(rows), n = static_cast<double>(columns);
    const double factor = matches_adamw_ ? 0.2 * std::sqrt(std::max(m, n)) : std::sqrt(std::max(1.0, m / n));
    const float decay = static_cast<float>(1 - u.lr * weight_decay_), rate = static_cast<float>(u.lr * factor);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < columns; ++c) {
        const int64_t i = r * columns + c;
        u.weight[i] = u.weight[i] * decay - rate * x[transposes ? c * rows + r : i];
      }
  }

 private:
  // Updates the momentum and writes the direction to `x`, transposed if the matrix has more rows than columns.
  void add_momentum(const zr::Update& u, float* x, bool transposes) const {
    const int64_t rows = u.slice.shape[0], columns = u.slice.shape[1];
    const float momentum = static_cast<float>(momentum_), gain = static_cast<float>(1 - momentum_);
    float* buffer = u.slot(0);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < columns; ++c) {
        const int64_t i = r * columns + c;
        const float g = u.grad[i] * u.mul, b = lerp(buffer[i], g, gain);
        buffer[i] = b;
        x[transposes ? c * rows + r : i] = nesterov_ ? lerp(g, b, momentum) : b;
      }
  }

  double momentum_;
  bool nesterov_;
  double weight_decay_, eps_;
  bool matches_adamw_;
  int iterations_;
  std::shared_ptr<muon::NewtonSchulz> newton_schulz_;
};

}  // namespace

ZR_OPTIMIZER(Muon, "muon", "zeroth", "0.1.0");
