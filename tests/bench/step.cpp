// Compares a training step of two ranks under every strategy with plain libtorch steps that use libtorch's fused AdamW.
// Both run in the same processes in alternation, each strategy right after a plain step; one engine exists at a time,
// or two where they are compared. `bench_step ROWS.json` starts its two ranks itself. It uses at most 12 GB, and at
// most half of the machine's available memory; STEP_BENCH_GB sets another limit. A model that needs more is replaced by
// a smaller one.
#include <ATen/Parallel.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iostream>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "bench/ranks.hpp"
#include "bench/row.hpp"
#include "gpt/model.hpp"
#include "zr/engine.hpp"

namespace {

// The models S and M of tests/bench/peers, 10.8 and 85.4 million parameters, and one between them for small machines.
struct Size {
  std::string name;
  gpt::Shape shape;
  int64_t samples;
  int rounds;
  double parameters() const {
    const auto width = static_cast<double>(shape.width);
    return static_cast<double>(shape.layers) * 12 * width * width + 512 * width;
  }
  // Bytes of both ranks: weights, gradients and two optimizer states, buckets and an all-gather buffer, of two models
  // at a time; and activations, libtorch and its allocator.
  double bytes() const { return 2 * (2 * 20 * parameters() + 0.5e9); }
};
const Size kSmall{"", {6, 384, 6, 256, 0}, 4, 24};
const Size kLarge[] = {{"_85m", {12, 768, 12, 256, 0}, 2, 6}, {"_26m", {8, 512, 8, 256, 0}, 2, 12}};
constexpr double kMostBytes = 12e9;

constexpr int kWarm = 3;

struct Side {
  std::string name, overrides;
  double target;
  std::string row = "step_" + name;
};
const std::string kCopied = "communicator.share_weights=false";
const std::vector<Side> kSides{
    {"zero0", "", 0.97},
    {"zero1", kCopied, 0.97},
    {"zero2", kCopied, 0.96},
    {"zero3", kCopied, 0.92},
    {"zero1_shared", "communicator.share_weights=true", 0.97},
    {"zero2_shared", "communicator.share_weights=true", 0.97},
    {"zero3_shared", "communicator.share_weights=true", 0.97},
    // All interception of an unmodified model, without any gathers.
    {"zero3_persistent", "communicator.share_weights=false strategy.zero3.persistence_threshold=1000000000", 0.99,
     "interception"}};

// A step without Zeroth: backward, then one fused update over all parameters.
class Plain {
 public:
  explicit Plain(const gpt::Shape& shape) : model_(shape) {
    for (auto& p : model_->parameters()) {
      params_.push_back(p);
      means_.push_back(torch::zeros_like(p));
      squares_.push_back(torch::zeros_like(p));
      steps_.push_back(torch::zeros({}));
    }
  }
  void step(const torch::Tensor& bytes, const torch::Tensor& next) {
    model_->loss(bytes, next).backward();
    const torch::NoGradGuard no_grad;
    std::vector<torch::Tensor> grads;
    for (auto& p : params_) grads.push_back(p.grad());
    for (auto& s : steps_) s += 1;
    at::_fused_adamw_(params_, grads, means_, squares_, {}, steps_, 1e-3, 0.9, 0.999, 0.01, 1e-8, false, false);
    for (auto& p : params_) p.mutable_grad() = torch::Tensor();
  }

 private:
  gpt::Model model_;
  std::vector<torch::Tensor> params_, means_, squares_, steps_;
};

class Sharded {
 public:
  Sharded(const std::string& toml, const Side& side, const gpt::Shape& shape)
      : program_(toml, overrides(side)), model_(shape), engine_(program_, *model_) {}
  void step(const torch::Tensor& bytes, const torch::Tensor& next) {
    engine_.backward(model_->loss(bytes, next));
    engine_.step();
  }
  void backward(const torch::Tensor& bytes, const torch::Tensor& next) { engine_.backward(model_->loss(bytes, next)); }
  zr::Engine& engine() { return engine_; }

 private:
  static std::vector<std::string> overrides(const Side& side) {
    std::vector<std::string> all{"strategy=" + side.name.substr(0, 5), "job.name=bench_" + side.name,
                                 "train.steps=1000000"};
    std::istringstream words(side.overrides);
    for (std::string word; words >> word;) all.push_back(word);
    return all;
  }
  zr::Program program_;
  gpt::Model model_;
  zr::Engine engine_;
};

// Prints on rank 0 which part of a measurement begins, and the time that the rest takes.
class Announcer {
 public:
  Announcer(const Size& size, bool speaks) : size_(size), speaks_(speaks) {}
  // `step` is the time of a plain step in milliseconds.
  void plan(double step, std::size_t parts) {
    parts_ = parts;
    const double rounds = size_.rounds + kWarm;
    std::ostringstream text;
    text.precision(3);
    text << size_.parameters() / 1e6 << " million parameters, about " << size_.bytes() / 1e9 << " GB of memory, ";
    say(text.str() + "about " + minutes(step * 2.1 * rounds * static_cast<double>(parts)));
    start_ = std::chrono::steady_clock::now();
  }
  void part(const std::string& name) {
    const std::chrono::duration<double, std::milli> spent = std::chrono::steady_clock::now() - start_;
    const double left = spent.count() / static_cast<double>(done_) * static_cast<double>(parts_ - done_);
    say(std::to_string(done_ + 1) + " of " + std::to_string(parts_) + ": " + name + size_.name +
        (done_ ? ", " + minutes(left) + " left" : ""));
    ++done_;
  }

 private:
  static std::string minutes(double milliseconds) {
    const auto seconds = static_cast<int64_t>(milliseconds / 1e3 + 0.5);
    return std::to_string(seconds / 60) + " min " + std::to_string(seconds % 60) + " s";
  }
  void say(const std::string& text) const {
    if (speaks_) std::cout << "bench_step: " << text << std::endl;
  }
  const Size& size_;
  bool speaks_;
  std::size_t parts_ = 1, done_ = 0;
  std::chrono::steady_clock::time_point start_;
};

// Times steps of both ranks: they start and end together, and the barrier is part of every measurement.
double timed(Sharded& barrier, const std::function<void()>& step) {
  barrier.engine().mean(0);
  const auto start = std::chrono::steady_clock::now();
  step();
  barrier.engine().mean(0);
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

void measure(const std::string& toml, const std::string& rows, const Size& size) {
  std::vector<zr::bench::Row> table;
  const auto bytes = torch::randint(0, 256, {size.samples, size.shape.context}, torch::kLong),
             next = torch::randint(0, 256, {size.samples, size.shape.context}, torch::kLong);
  const bool first_rank = std::string(std::getenv("ZR_RANK")) == "0";
  Announcer announcer(size, first_rank);
  auto plain = std::make_unique<Plain>(size.shape);
  for (const Side& side : kSides) {
    Sharded ours(toml, side, size.shape);
    at::set_num_threads(1);
    const auto plain_step = [&] { return timed(ours, [&] { plain->step(bytes, next); }); };
    if (&side == &kSides[0]) {
      plain_step();
      announcer.plan(plain_step(), kSides.size() + 2);
      announcer.part("plain");
      std::vector<double> a, again;
      for (int round = -kWarm; round < size.rounds; ++round) {
        const double one = plain_step(), other = plain_step();
        if (round >= 0) a.push_back(one), again.push_back(other);
      }
      table.push_back(zr::bench::compare("step_plain_a_a" + size.name, "ms", again, "the same, repeated", a, 0));
    }
    announcer.part(side.name);
    std::vector<double> our_times, plain_times;
    for (int round = -kWarm; round < size.rounds; ++round) {
      const double reference = plain_step(), time = timed(ours, [&] { ours.step(bytes, next); });
      if (round >= 0) plain_times.push_back(reference), our_times.push_back(time);
    }
    table.push_back(zr::bench::compare(side.row + size.name, "ms", our_times, "2 plain processes, fused", plain_times,
                                       side.target));
  }
  plain.reset();
  // Forward and backward with every parameter intercepted but none gathered (shared weights), compared with the same
  // without interception.
  announcer.part("interception_shared");
  Sharded untouched(toml, kSides[2], size.shape), intercepted(toml, kSides[5], size.shape);
  at::set_num_threads(1);
  const auto backward = [&](Sharded& side) {
    const double time = timed(side, [&] { side.backward(bytes, next); });
    side.engine().step();
    return time;
  };
  std::vector<double> intercepted_times, untouched_times;
  for (int round = -kWarm; round < size.rounds; ++round) {
    const double reference = backward(untouched), time = backward(intercepted);
    if (round >= 0) untouched_times.push_back(reference), intercepted_times.push_back(time);
  }
  table.push_back(zr::bench::compare("interception_shared" + size.name, "ms", intercepted_times,
                                     "zero2, no interception", untouched_times, 0.99));
  if (!first_rank) return;
  for (const auto& row : table) zr::bench::print(row);
  zr::bench::append(rows, table);
}

// The bytes that the benchmark may use. The first process decides, because its ranks must agree.
double memory_limit() {
  if (const char* set = std::getenv("STEP_BENCH_GB")) {
    char* end = nullptr;
    const double gigabytes = std::strtod(set, &end);
    if (end == set || *end || !(gigabytes > 0))
      throw std::invalid_argument("STEP_BENCH_GB=" + std::string(set) + ": must be a number greater than 0");
    return gigabytes * 1e9;
  }
  double limit = kMostBytes;
  std::ifstream file("/proc/meminfo");
  for (std::string name, rest; file >> name; std::getline(file, rest))
    if (double kib = 0; name == "MemAvailable:" && file >> kib) limit = std::min(limit, kib * 1024 / 2);
  ::setenv("STEP_BENCH_GB", std::to_string(limit / 1e9).c_str(), 1);
  return limit;
}

// The sizes that fit into `limit` bytes: the small model, and the largest of the large ones.
std::vector<Size> sizes_within(double limit) {
  if (kSmall.bytes() > limit)
    throw std::runtime_error("the smallest model needs " + std::to_string(kSmall.bytes() / 1e9) +
                             " GB, but the limit is " + std::to_string(limit / 1e9) +
                             " GB; end other programs, or raise STEP_BENCH_GB");
  std::vector<Size> sizes{kSmall};
  for (const Size& size : kLarge)
    if (sizes.size() == 1 && size.bytes() <= limit) sizes.push_back(size);
  return sizes;
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<Size> sizes;
  const int code = zr::guarded([&] {
    const double limit = memory_limit();
    sizes = sizes_within(limit);
    if (std::getenv("ZR_WORLD")) return;
    std::cout << "bench_step: limit " << limit / 1e9 << " GB of memory (STEP_BENCH_GB); models of";
    for (const Size& size : sizes) std::cout << (&size == &sizes[0] ? " " : " and ") << size.parameters() / 1e6;
    std::cout << " million parameters, one after the other" << std::endl;
  });
  if (code != 0) return code;
  return zr::bench::on_two_ranks(argc, argv, [&](const std::string& toml, const std::string& rows) {
    for (const Size& size : sizes) measure(toml, rows, size);
  });
}
