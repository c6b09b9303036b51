// AdamW's update of 64 M parameters (a GPT block of width 2304) with the plug-in, compared with the memory traffic
// alone and with libtorch's AdamW. adamw_step [rows.json]
//
// The plug-in and the traffic use memory as the host allocates it: in huge pages if the kernel has them. libtorch uses
// tensors that it allocates itself, as in a user's program; "libtorch, our memory" runs libtorch's kernel on our
// memory, to separate the effect of the arithmetic from that of the pages (both run at memory speed). bf16: fp32
// masters and a rounded copy; libtorch makes the copy in a second pass because it has no fused version.
#include <ATen/Parallel.h>
#include <ATen/ops/_fused_adamw.h>
#include <sys/mman.h>
#include <torch/torch.h>

#include <chrono>
#include <functional>
#include <numeric>
#include <thread>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "bench/row.hpp"
#include "contract/optimizer_under_test.hpp"

namespace {

constexpr int64_t kWidth = 2304, kTile = 1 << 20, kRounds = 9;
constexpr int64_t kLine = 32;  // elements: a cache line of 16-bit weights
const std::vector<int64_t> kTensors = {kWidth, kWidth, 3 * kWidth* kWidth, 3 * kWidth, kWidth* kWidth,     kWidth,
                                       kWidth, kWidth, 4 * kWidth* kWidth, 4 * kWidth, 4 * kWidth* kWidth, kWidth};
constexpr double kLr = 1e-3, kBeta1 = 0.9, kBeta2 = 0.999, kEps = 1e-8, kDecay = 0.01;

/// Memory in huge pages if the kernel has them; every page is touched.
template <class T>
T* memory(int64_t count) {
  const std::size_t bytes = static_cast<std::size_t>(count) * sizeof(T);
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) throw std::bad_alloc();
  madvise(at, bytes, MADV_HUGEPAGE);
  std::memset(at, 0, bytes);
  return static_cast<T*>(at);
}

struct Streams {
  float *weight, *grad, *exp_avg, *exp_avg_sq;
  uint16_t* bf16;
};
Streams streams_of(int64_t count) {
  Streams s{memory<float>(count), memory<float>(count), memory<float>(count), memory<float>(count),
            memory<uint16_t>(count)};
  for (int64_t i = 0; i < count; ++i) {
    s.weight[i] = 1e-3f * static_cast<float>(i % 97 + 1);
    s.grad[i] = 1e-4f * static_cast<float>(i % 89 - 44);
  }
  return s;
}

/// The same reads and writes as the update, almost no arithmetic. Compiled for this machine.
void traffic(const Streams& s, int64_t begin, int64_t end, bool bf16) {
  float* __restrict w = s.weight;
  const float* __restrict g = s.grad;
  float* __restrict m = s.exp_avg;
  float* __restrict v = s.exp_avg_sq;
  const auto block = [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const float t = g[i] * 1e-9f;
      w[i] += t;
      m[i] += t;
      v[i] += t;
    }
  };
  if (!bf16) return block(begin, end);
  for (int64_t i = begin; i < end; i += 32) {  // 64 bytes of 16-bit weights
    block(i, i + 32);
#if defined(__SSE2__)
    float* to = reinterpret_cast<float*>(s.bf16 + i);
    for (int64_t j = 0; j < 16; j += 4) _mm_stream_ps(to + j, _mm_load_ps(w + i + j));
  }
  _mm_sfence();
#else
    std::memcpy(s.bf16 + i, w + i, 64);
  }
#endif
}

/// A slice of one tensor, as the engine passes it to the optimizer.
struct Tile {
  int64_t at, count;  // in the flat streams
  int64_t first;      // in its tensor
  const int64_t* shape;
};
using Share = std::vector<Tile>;

/// One share per thread, with the same number of elements in each: otherwise the largest share decides, not the kernel.
std::vector<Share> shares_of_all(int64_t threads) {
  const int64_t all = std::accumulate(kTensors.begin(), kTensors.end(), int64_t{0});
  const auto begin_of = [&](int64_t thread) { return all * thread / threads / kLine * kLine; };
  std::vector<Share> shares(threads);
  int64_t start = 0;  // of the tensor
  for (const int64_t& elements : kTensors) {
    for (int64_t thread = 0; thread < threads; ++thread) {
      const int64_t end = std::min(start + elements, thread + 1 < threads ? begin_of(thread + 1) : all);
      for (int64_t at = std::max(start, begin_of(thread)); at < end; at += kTile) {
        shares[thread].push_back({at, std::min(kTile, end - at), at - start, &elements});
      }
    }
    start += elements;
  }
  return shares;
}

/// Calls fn(tile) for all tiles, each share on a thread of its own.
void on_threads(const std::vector<Share>& shares, const std::function<void(const Tile&)>& fn) {
  const auto run = [&](const Share& share) {
    for (const Tile& tile : share) fn(tile);
  };
  std::vector<std::thread> others;
  for (std::size_t i = 1; i < shares.size(); ++i) others.emplace_back(run, std::cref(shares[i]));
  run(shares[0]);
  for (std::thread& other : others) other.join();
}

void ours(const zr::testing::OptimizerUnderTest& adamw, const Streams& s, const Tile& tile, bool bf16) {
  using zr::testing::view_of;
  zr_step job{};
  job.size = sizeof job;
  job.grad_mul = 1;
  job.step = 2;
  zr_view slots[] = {view_of(s.exp_avg + tile.at, tile.count), view_of(s.exp_avg_sq + tile.at, tile.count)};
  zr_update_slice slice{};
  slice.size = sizeof slice;
  slice.name = "weight";
  slice.shape = tile.shape;
  slice.ndim = 1;
  slice.first = slice.grad_first = tile.first;
  slice.count = slice.grad_count = tile.count;
  slice.step = 2;
  slice.lr = kLr;
  const zr_view master = view_of(s.weight + tile.at, tile.count);
  slice.weight = bf16 ? view_of(s.bf16 + tile.at, tile.count, ZR_BF16) : master;
  slice.master = bf16 ? master : zr_view{};
  slice.grad = view_of(s.grad + tile.at, tile.count);
  slice.slots = slots;
  adamw.step(job, {&slice});
}

struct Tensors {
  std::vector<torch::Tensor> weight, grad, exp_avg, exp_avg_sq, bf16, steps;
  std::unique_ptr<torch::optim::AdamW> optimizer;
  Tensors(const Streams& s, bool in_our_memory) {
    int64_t at = 0;
    for (const int64_t elements : kTensors) {
      const auto tensor = [&](auto* stream, torch::ScalarType type) {
        const torch::Tensor blob = torch::from_blob(stream + at, {elements}, type);
        return in_our_memory ? blob : blob.clone();
      };
      weight.push_back(tensor(s.weight, torch::kFloat32));
      grad.push_back(tensor(s.grad, torch::kFloat32));
      exp_avg.push_back(tensor(s.exp_avg, torch::kFloat32));
      exp_avg_sq.push_back(tensor(s.exp_avg_sq, torch::kFloat32));
      bf16.push_back(tensor(s.bf16, torch::kBFloat16));
      steps.push_back(torch::ones({}));
      at += elements;
    }
    const auto options = torch::optim::AdamWOptions(kLr).betas({kBeta1, kBeta2}).eps(kEps).weight_decay(kDecay);
    optimizer = std::make_unique<torch::optim::AdamW>(weight, options);
    for (std::size_t i = 0; i < kTensors.size(); ++i) {
      weight[i].mutable_grad() = grad[i];
      auto state = std::make_unique<torch::optim::AdamWParamState>();
      state->step(1);
      state->exp_avg(exp_avg[i]);
      state->exp_avg_sq(exp_avg_sq[i]);
      optimizer->state()[weight[i].unsafeGetTensorImpl()] = std::move(state);
    }
  }
  void copy_out() {
    for (std::size_t i = 0; i < kTensors.size(); ++i) bf16[i].copy_(weight[i]);
  }
  void fused() {
    at::_fused_adamw_(weight, grad, exp_avg, exp_avg_sq, {}, steps, kLr, kBeta1, kBeta2, kDecay, kEps, false, false);
  }
  void step(bool fused_kernel, bool narrow_too) {
    if (fused_kernel) {
      fused();
    } else {
      optimizer->step();
    }
    if (narrow_too) copy_out();
  }
};

double seconds(const std::function<void()>& fn) {
  const auto start = std::chrono::steady_clock::now();
  fn();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

struct Variant {
  std::string name;
  double target;
  std::function<void()> run;
};

std::vector<zr::bench::Row> measure(const zr::testing::OptimizerUnderTest& adamw, const Streams& s, Tensors& theirs,
                                    Tensors& shared, bool bf16, int threads) {
  const std::vector<Share> shares = shares_of_all(threads);
  const double count = static_cast<double>(std::accumulate(kTensors.begin(), kTensors.end(), int64_t{0}));
  at::set_num_threads(threads);
  const std::vector<Variant> variants = {
      {"", 0, [&] { on_threads(shares, [&](const Tile& tile) { ours(adamw, s, tile, bf16); }); }},
      {"same streams, no math", 0.90,
       [&] { on_threads(shares, [&](const Tile& tile) { traffic(s, tile.at, tile.at + tile.count, bf16); }); }},
      {"at::_fused_adamw_", 1.05, [&] { theirs.step(true, bf16); }},
      {"libtorch, our memory", 1, [&] { shared.step(true, bf16); }},
      {"torch::optim::AdamW", 4, [&] { theirs.step(false, bf16); }}};
  std::vector<std::vector<double>> times(variants.size());
  for (int64_t round = -1; round < kRounds; ++round) {  // the first warms up
    for (std::size_t i = 0; i < variants.size(); ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));  // OpenMP's threads keep spinning for a while
      const double ns = seconds(variants[i].run) / count * 1e9;
      if (round >= 0) times[i].push_back(ns);
    }
  }
  const std::string name = std::string("adamw_step_") + (bf16 ? "bf16_" : "fp32_") + std::to_string(threads) + "t";
  std::vector<zr::bench::Row> rows;
  for (std::size_t i = 1; i < variants.size(); ++i) {
    rows.push_back(zr::bench::compare(name, "ns/param", times[0], variants[i].name, times[i], variants[i].target));
    zr::bench::print(rows.back());
  }
  return rows;
}

}  // namespace

int main(int argc, char** argv) {
  torch::NoGradGuard no_grad;
  const Streams s = streams_of(std::accumulate(kTensors.begin(), kTensors.end(), int64_t{0}));
  Tensors theirs(s, false), shared(s, true);
  const zr::testing::OptimizerUnderTest adamw(
      ZR_BUILD_DIR "/plugins", "adamw",
      {{"beta1", kBeta1}, {"beta2", kBeta2}, {"eps", kEps}, {"weight_decay", kDecay}});
  std::vector<zr::bench::Row> rows;
  for (const bool bf16 : {false, true}) {
    for (const int threads : {1, 2}) {
      for (zr::bench::Row& row : measure(adamw, s, theirs, shared, bf16, threads)) rows.push_back(std::move(row));
    }
  }
  if (argc > 1) zr::bench::append(argv[1], rows);
}
