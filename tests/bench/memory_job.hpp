// A job without libtorch: a host session with a model that only allocates memory, 85 M parameters.
#pragma once

#include <algorithm>
#include <chrono>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "api/program_state.hpp"
#include "engine/session.hpp"
#include "support/host_model.hpp"
#include "zr/float_cast.hpp"
#include "zr/program.hpp"

namespace zr::bench {

using zr::host::plan::Parameter;

// 12 layers of width 768, vocabulary 256, context 256.
class Memory final : public zr::testing::HostModel {
 public:
  Memory() {
    const auto add = [&](const std::string& name, std::vector<int64_t> shape) {
      int64_t count = 1;
      for (const int64_t n : shape) count *= n;
      parameters_.push_back({name, {}, std::move(shape), count, false, 0});
      memory_.push_back(nullptr);
    };
    add("wte", {256, 768});
    add("wpe", {256, 768});
    for (int i = 0; i < 12; ++i) {
      const std::string block = "block" + std::to_string(i);
      const auto line = [&](const std::string& name, int64_t in, int64_t out) {
        add(block + name, {out, in});
        add(block + name + ".b", {out});
      };
      line(".ln1", 1, 768);
      line(".qkv", 768, 2304);
      line(".proj", 768, 768);
      line(".ln2", 1, 768);
      line(".up", 768, 3072);
      line(".down", 3072, 768);
    }
  }
  const std::vector<Parameter>& parameters() const override { return parameters_; }
  void read(uint32_t param, float* out) override { std::fill_n(out, parameters_[param].count, 0.01f); }
  void bind(uint32_t param, void* memory, zr_dtype) override { memory_[param] = static_cast<float*>(memory); }
  void on_gradient(Arrived arrived) override { arrived_ = std::move(arrived); }
  void copy_gradient(uint32_t, int64_t, const zr_view& dst) override {
    if (dst.dtype == ZR_BF16)
      std::fill_n(static_cast<uint16_t*>(dst.data), dst.count, zr::to_bf16(gradient));
    else
      std::fill_n(static_cast<float*>(dst.data), dst.count, gradient);
  }
  float gradient = 1e-3f;  // of every element
  void add_gradient(uint32_t, int64_t, const zr_view&) override {}
  /// Delivers all gradients. Computes for `seconds` before them, in proportion to their elements.
  void backward(double seconds = 0) {
    const double per_element = seconds / static_cast<double>(count());
    auto until = std::chrono::steady_clock::now();
    for (auto i = static_cast<uint32_t>(parameters_.size()); i-- > 0;) {
      until += std::chrono::duration_cast<std::chrono::steady_clock::duration>(
          std::chrono::duration<double>(per_element * static_cast<double>(parameters_[i].count)));
      while (std::chrono::steady_clock::now() < until) {
      }
      arrived_(i);
    }
  }
  int64_t count() const {
    int64_t total = 0;
    for (const Parameter& p : parameters_) total += p.count;
    return total;
  }

 private:
  std::vector<Parameter> parameters_;
  std::vector<float*> memory_;
  Arrived arrived_;
};

struct Job {
  Job(const std::string& toml, const std::string& name, std::vector<std::string> overrides)
      : program(toml,
                [&] {
                  overrides.insert(overrides.begin(), {"job.name=bench_" + name, "train.steps=1000000",
                                                       "train.gradient_clipping=1.0", "job.threads=1"});
                  return overrides;
                }()),
        session(program.state()->setup(), model) {}
  double timed(const std::function<void()>& work) {
    session.comm().barrier("start");
    const auto start = std::chrono::steady_clock::now();
    work();
    session.comm().barrier("end");
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
  }
  zr::Program program;
  Memory model;
  zr::host::engine::Session session;
};

}  // namespace zr::bench
