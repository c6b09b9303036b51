// Adafactor: the squared gradient of a matrix as one state per row and one per column (Shazeer and Stern 2018).
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>

#include "kernel.hpp"
#include "zr/partial_sums.hpp"

namespace {

constexpr int64_t kLeastBlockRows = 64;  // rows that share a copy of the column state, at least
constexpr int64_t kNormBlock = 1024;     // every block of a parameter is a multiple of it anyway

class Adafactor : public zr::SummingOptimizer<Adafactor> {
 public:
  static constexpr const char* description = "Adafactor: one running mean per row and column of a matrix";
  static constexpr const char* license = "Apache-2.0";
  static constexpr zr_key keys[] = {
      zr::per_group(zr::key_float("beta2_decay", "-0.8", -1, 0,
                                  "weight of the new squared gradient in update t is t to this power")),
      zr::per_group(zr::key_float("eps1", "1.1920928955078125e-07", 0, 1,
                                  "lower bound of the root of the estimated squared gradient, and of the row mean")),
      zr::per_group(zr::key_float("eps2", "1e-3", 0, zr::kNoBound,
                                  "lower bound of the root mean square of a parameter, which scales its updates")),
      zr::per_group(zr::key_float("clip_threshold", "1", 1e-30, zr::kNoBound,
                                  "largest root mean square of an update, before it is scaled")),
      zr::per_group(zr::key_float("weight_decay", "0", 0, zr::kNoBound,
                                  "decoupled weight decay: an update multiplies the weight by 1 - lr x weight_decay")),
  };
  static constexpr bool rounds = true;

  explicit Adafactor(const zr::Config& config)
      : beta2_decay_(config.number("beta2_decay")),
        eps1_(config.number("eps1")),
        eps2_(config.number("eps2")),
        clip_threshold_(config.number("clip_threshold")),
        weight_decay_(config.number("weight_decay")) {}

  static void describe(const zr_param& param, zr::Description& description) {
    if (!is_matrix(param)) {
      description.slots = {zr::slot("variance")};
      return;
    }
    const int64_t columns = param.shape[1];
    int64_t block = std::lcm(columns, kNormBlock);
    block *= (kLeastBlockRows * columns + block - 1) / block;
    block = std::min(block, param.count);
    if (block > std::numeric_limits<uint32_t>::max())
      throw zr::PluginError(ZR_UNSUPPORTED, std::string("parameter ") + param.name +
                                                ": its rows are too long: use another optimizer for it");
    description.slots = {zr::slot_per_block("row_var", static_cast<uint32_t>(columns)),
                         zr::slot_per_column("col_var", static_cast<uint32_t>(block))};
  }
  static void passes(const zr_param& param, std::vector<uint32_t>& sums) {
    if (is_matrix(param))
      sums = {static_cast<uint32_t>(param.shape[1]) + 2, 1};
    else
      sums = {2};
  }

  void add_up(const zr::Update& u) const {
    AdafactorConstants c = constants(u);
    if (!is_matrix(u)) return vector_direction_(c, run(u), u.slot(0), u.sums->block, u.sums->partial);
    if (u.sums->pass == 0) return matrix_means_(c, run(u), matrix(u), u.sums->partial);
    c.row_scale = row_scale(u);
    matrix_direction_(c, run(u), matrix(u), u.sums->totals, static_cast<double>(u.slice.shape[0]), u.sums->partial);
  }

  void update(const zr::Update& u) const {
    AdafactorConstants c = constants(u);
    const double elements = static_cast<double>(elements_of(u));
    const double* totals = u.sums->totals;
    const double weights = is_matrix(u) ? totals[u.slice.shape[1]] : totals[0],
                 direction = is_matrix(u) ? totals[u.slice.shape[1] + 2] : totals[1];
    const double rate = std::min(u.lr, 1 / std::sqrt(static_cast<double>(u.step))) *
                        std::max(eps2_, std::sqrt(weights / elements)) /
                        std::max(1.0, std::sqrt(direction / elements) / clip_threshold_);
    c.rate = static_cast<float>(rate);
    if (!is_matrix(u)) return vector_update_(c, run(u), u.slot(0));
    c.row_scale = row_scale(u);
    matrix_update_(c, run(u), matrix(u));
  }

 private:
  static bool is_matrix(const zr_param& param) { return param.ndim == 2 && param.count > 0; }
  static bool is_matrix(const zr::Update& u) { return u.slice.ndim == 2; }
  static int64_t elements_of(const zr::Update& u) {
    int64_t elements = 1;
    for (int32_t i = 0; i < u.slice.ndim; ++i) elements *= u.slice.shape[i];
    return elements;
  }
  AdafactorConstants constants(const zr::Update& u) const {
    AdafactorConstants c{};
    c.mul = u.mul;
    c.gain = static_cast<float>(std::pow(static_cast<double>(u.step), beta2_decay_));
    c.least = static_cast<float>(eps1_ * eps1_);
    c.decay = static_cast<float>(1 - u.lr * weight_decay_);
    return c;
  }
  // 1 / the mean of the row state; its sum is the last total of pass 0.
  float row_scale(const zr::Update& u) const {
    const double mean = u.sums->totals[u.slice.shape[1] + 1] / static_cast<double>(u.slice.shape[0]);
    return static_cast<float>(1 / std::max(mean, eps1_));
  }
  static AdafactorRun run(const zr::Update& u) { return {u.weight, u.grad, u.count, u.out, u.out_dtype, u.streams}; }
  static AdafactorMatrix matrix(const zr::Update& u) {
    const int64_t columns = u.slice.shape[1];
    return {u.state<float>(0), u.state<float>(1), columns, u.sums->block / columns};
  }

  double beta2_decay_, eps1_, eps2_, clip_threshold_, weight_decay_;
  decltype(ZR_CHOOSE(matrix_means)) matrix_means_ = ZR_CHOOSE(matrix_means);
  decltype(ZR_CHOOSE(matrix_direction)) matrix_direction_ = ZR_CHOOSE(matrix_direction);
  decltype(ZR_CHOOSE(matrix_update)) matrix_update_ = ZR_CHOOSE(matrix_update);
  decltype(ZR_CHOOSE(vector_direction)) vector_direction_ = ZR_CHOOSE(vector_direction);
  decltype(ZR_CHOOSE(vector_update)) vector_update_ = ZR_CHOOSE(vector_update);
};

}  // namespace

ZR_OPTIMIZER(Adafactor, "adafactor", "zeroth", "0.1.0");
