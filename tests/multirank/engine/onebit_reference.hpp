// 1-bit Adam on N ranks in one process, written from docs/optimizers.md and docs/numerics.md. It shares no code with
// the engine or the plug-in. Real: float, or double for the same formula without roundings to fp32.
#pragma once

#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "multirank/parity/models.hpp"

namespace onebit_reference {

inline constexpr std::size_t kBlock = 1024;

/// What a test can choose; all else is the default of the keys.
struct Options {
  int ranks = 1, accumulation = 1;
  int64_t freeze_step = 2;
  double lr = 0.05;
  at::ScalarType dtype = torch::kFloat;
  bool weighted = false;  // micro-batch m has the weight m + 1
};

template <class Real>
struct Parameter {
  std::vector<Real> master, m, v, server_error;
  std::vector<std::vector<Real>> carry;  // by rank
  int64_t updates = 0, exact_updates = 0;
  bool compresses = false;
};

/// One update, from the local sums of gradients, by rank.
template <class Real>
class Update {
 public:
  Update(const Options& options, int64_t number, double weight) : o_(options), number_(number), weight_(weight) {}

  void operator()(Parameter<Real>& p, const std::vector<std::vector<float>>& local,
                  const std::vector<float>& reduced) const {
    ++p.updates;
    const double t = static_cast<double>(p.updates);
    const bool exact = number_ <= o_.freeze_step;
    if (exact) ++p.exact_updates;
    const double n = static_cast<double>(p.exact_updates);
    const double correction = p.exact_updates > 0 ? std::sqrt(1 - std::pow(0.999, n)) : 1;
    const Real rate = static_cast<Real>(o_.lr * correction / (1 - std::pow(0.9, t)));
    const Real eps = static_cast<Real>(1e-8 * correction), decay = static_cast<Real>(1 - o_.lr * 0.01);
    if (exact)
      warm_up(p, reduced);
    else
      compressed(p, local);
    for (std::size_t i = 0; i < p.master.size(); ++i) {
      const Real root = std::sqrt(p.v[i]), step = p.m[i] * rate, denominator = root + eps, kept = p.master[i] * decay;
      const Real change = step / denominator;
      p.master[i] = kept - (exact || p.v[i] > 0 ? change : Real(0));
    }
  }

 private:
  static Real constant(double value) { return static_cast<Real>(value); }

  void warm_up(Parameter<Real>& p, const std::vector<float>& reduced) const {
    const Real k = constant(1 / weight_), beta1 = constant(0.9), gain1 = constant(1 - 0.9), beta2 = constant(0.999),
               gain2 = constant(1 - 0.999);
    for (std::size_t i = 0; i < p.master.size(); ++i) {
      const Real g = static_cast<Real>(reduced[i]) * k;
      const Real kept1 = p.m[i] * beta1, new1 = g * gain1;
      p.m[i] = kept1 + new1;
      const Real kept2 = p.v[i] * beta2, part2 = g * gain2, new2 = part2 * g;
      p.v[i] = kept2 + new2;
    }
  }

  static Real scale_of(const Real* values, std::size_t n) {
    double lanes[16] = {};
    for (std::size_t i = 0; i < n; ++i) lanes[i % 16] = lanes[i % 16] + std::fabs(static_cast<double>(values[i]));
    double sum = 0;
    for (const double lane : lanes) sum = sum + lane;
    return static_cast<Real>(sum / static_cast<double>(n));
  }

  // Returns signs times scales; leaves in `values` what they miss.
  static std::vector<Real> compress(std::vector<Real>& values) {
    std::vector<Real> result(values.size());
    for (std::size_t block = 0; block < values.size(); block += kBlock) {
      const std::size_t n = std::min(kBlock, values.size() - block);
      const Real scale = scale_of(values.data() + block, n);
      for (std::size_t i = block; i < block + n; ++i) {
        result[i] = values[i] >= 0 ? scale : -scale;
        values[i] = values[i] - result[i];
      }
    }
    return result;
  }

  void compressed(Parameter<Real>& p, const std::vector<std::vector<float>>& local) const {
    const Real k = constant(o_.ranks / weight_), beta1 = constant(0.9), gain1 = constant(1 - 0.9);
    if (!p.compresses) {
      p.compresses = true;
      p.server_error.assign(p.master.size(), 0);
      std::vector<Real> carry(p.master.size());
      for (std::size_t i = 0; i < carry.size(); ++i) carry[i] = p.m[i] * beta1;
      p.carry.assign(static_cast<std::size_t>(o_.ranks), carry);
    }
    std::vector<Real> mean(p.master.size(), 0);
    for (std::size_t r = 0; r < p.carry.size(); ++r) {
      for (std::size_t i = 0; i < mean.size(); ++i) {
        const Real g = static_cast<Real>(local[r][i]) * k, part = g * gain1;
        p.carry[r][i] = p.carry[r][i] + part;
      }
      const std::vector<Real> sent = compress(p.carry[r]);
      for (std::size_t i = 0; i < mean.size(); ++i) mean[i] = mean[i] + sent[i];
    }
    for (std::size_t i = 0; i < mean.size(); ++i) {
      const Real average = mean[i] / static_cast<Real>(o_.ranks);
      mean[i] = average + p.server_error[i];
    }
    p.m = compress(mean);
    p.server_error = mean;
    for (std::vector<Real>& carry : p.carry)
      for (std::size_t i = 0; i < carry.size(); ++i) {
        const Real part = p.m[i] * beta1;
        carry[i] = carry[i] + part;
      }
  }

  const Options& o_;
  int64_t number_;
  double weight_;  // the sum of the weights of the step's micro-batches
};

/// A model and its training on all ranks, in fp32, and beside it in double from the same gradients.
class Training {
 public:
  Training(const Options& options, const std::string& model, uint64_t seed)
      : o_(options), model_(parity::make(model, seed)) {
    std::set<const void*> seen;
    for (const auto& item : model_->named_parameters()) {
      if (!item.value().requires_grad() || !seen.insert(item.value().unsafeGetTensorImpl()).second) continue;
      names.push_back(item.key());
      tensors_.push_back(item.value());
      const torch::Tensor flat = item.value().detach().to(torch::kFloat).contiguous().view(-1);
      const std::size_t n = static_cast<std::size_t>(flat.numel());
      Parameter<float> p{{flat.data_ptr<float>(), flat.data_ptr<float>() + n}, {}, {}, {}, {}};
      p.m.assign(n, 0);
      p.v.assign(n, 0);
      Parameter<double> d{{p.master.begin(), p.master.end()}, {}, {}, {}, {}};
      d.m.assign(n, 0);
      d.v.assign(n, 0);
      parameters.push_back(std::move(p));
      doubles.push_back(std::move(d));
    }
    std::set<const void*> cast;
    for (auto& item : model_->named_parameters())
      if (cast.insert(item.value().unsafeGetTensorImpl()).second) item.value().set_data(item.value().to(o_.dtype));
    for (auto& item : model_->named_buffers())
      if (item.value().is_floating_point()) item.value().set_data(item.value().to(o_.dtype));
  }

  /// Trains one step; the first has the index 0.
  void step(int64_t index) {
    const std::size_t ranks = static_cast<std::size_t>(o_.ranks);
    std::vector<std::vector<std::vector<float>>> local(names.size());
    std::vector<std::vector<float>> reduced(names.size());
    std::vector<char> touched(names.size(), 0);
    for (std::size_t i = 0; i < names.size(); ++i) {
      reduced[i].assign(parameters[i].master.size(), 0);
      local[i].assign(ranks, reduced[i]);
    }
    double weight_sum = 0;
    for (int m = 0; m < o_.ranks * o_.accumulation; ++m) {
      const double weight = o_.weighted ? m + 1 : 1;
      const torch::Tensor loss = model_->loss(index, m);
      (weight == 1 ? loss : loss * weight).backward();
      weight_sum = weight_sum + weight;
      for (std::size_t i = 0; i < names.size(); ++i) {
        torch::Tensor& gradient = tensors_[i].mutable_grad();
        if (!gradient.defined()) continue;
        touched[i] = 1;
        const torch::Tensor flat =
            (gradient.is_sparse() ? gradient.to_dense() : gradient).to(torch::kFloat).contiguous().view(-1);
        const float* values = flat.data_ptr<float>();
        std::vector<float>& own = local[i][static_cast<std::size_t>(m) % ranks];
        for (std::size_t e = 0; e < own.size(); ++e) {
          own[e] = own[e] + values[e];
          reduced[i][e] = reduced[i][e] + values[e];
        }
        gradient = torch::Tensor();
      }
    }
    const int64_t number = index + 1;
    for (std::size_t i = 0; i < names.size(); ++i) {
      if (!touched[i]) continue;
      Update<float>(o_, number, weight_sum)(parameters[i], local[i], reduced[i]);
      Update<double>(o_, number, weight_sum)(doubles[i], local[i], reduced[i]);
      const auto n = static_cast<int64_t>(parameters[i].master.size());
      const torch::Tensor master = torch::from_blob(parameters[i].master.data(), {n}).view(tensors_[i].sizes());
      const torch::NoGradGuard no_grad;
      tensors_[i].copy_(master);
    }
  }

  std::vector<std::string> names;
  std::vector<Parameter<float>> parameters;
  std::vector<Parameter<double>> doubles;

 private:
  const Options o_;
  std::shared_ptr<parity::Model> model_;
  std::vector<torch::Tensor> tensors_;
};

}  // namespace onebit_reference
