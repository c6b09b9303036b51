// One step of each optimizer that is not elementwise (lion, lamb, adafactor, adamw8bit) over 64 M parameters, compared
// with loops that read and write the same memory without arithmetic, all passes included; and muon compared with its
// matrix products alone. optimizer_step [rows.json]
#include <omp.h>

#include <chrono>
#include <oneapi/dnnl/dnnl.hpp>

#include "bench/row.hpp"
#include "contract/tensor_problem.hpp"

namespace {

using zr::testing::OptimizerUnderTest;
using zr::testing::Tensor;

constexpr int64_t kRows = 28672, kColumns = 2304, kSliceBlocks = 64 * 1024;  // elements per slice, rounded up to blocks
constexpr int kRounds = 7;

double seconds(const std::function<void()>& fn) {
  const auto start = std::chrono::steady_clock::now();
  fn();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Reads memory without arithmetic on floats, which compilers would not vectorize.
void read(const void* memory, int64_t bytes) {
  const auto* __restrict words = static_cast<const uint32_t*>(memory);
  uint32_t bits = 0;
  for (int64_t i = 0; i < bytes / 4; ++i) bits ^= words[i];
  asm volatile("" : : "r"(bits));
}
// Reads and writes it.
void change(void* memory, int64_t bytes) {
  auto* __restrict words = static_cast<uint32_t*>(memory);
  for (int64_t i = 0; i < bytes / 4; ++i) words[i] ^= 1;
}

// What a pass of an optimizer moves for elements [first, first + count).
struct Traffic {
  std::vector<std::pair<char*, int64_t>> read, changed;  // address and bytes per element
};
void move(const Traffic& traffic, int64_t first, int64_t count) {
  constexpr int64_t kPart = 2048;  // elements: all streams advance together, as in an optimizer
  for (int64_t at = first; at < first + count; at += kPart) {
    const int64_t n = std::min(kPart, first + count - at);
    for (const auto& [memory, bytes] : traffic.read) read(memory + at * bytes, n * bytes);
    for (const auto& [memory, bytes] : traffic.changed) change(memory + at * bytes, n * bytes);
  }
}

std::vector<Traffic> traffic_of(const std::string& id, Tensor& t) {
  const std::pair<char*, int64_t> weight{reinterpret_cast<char*>(t.weight.data()), 4},
      grad{reinterpret_cast<char*>(t.grad.data()), 4};
  const auto state = [&](std::size_t i, int64_t bytes) { return std::pair(t.states[i].data(), bytes); };
  if (id == "lion") return {{{grad}, {weight, state(0, 4)}}};
  if (id == "lamb") return {{{weight, grad}, {state(0, 4), state(1, 4)}}, {{state(0, 4), state(1, 4)}, {weight}}};
  if (id == "adafactor") return {{{weight, grad}, {}}, {{grad}, {}}, {{grad}, {weight}}};
  return {{{grad}, {weight, state(0, 1), state(1, 1)}}};
}

std::vector<zr::bench::Row> compare_with_traffic(const std::string& folder, const std::string& id, double target_1t,
                                                 double target_2t) {
  const OptimizerUnderTest optimizer(folder, id);
  Tensor t(optimizer, {kRows, kColumns});
  t.step = 2;
  const std::vector<Traffic> traffic = traffic_of(id, t);
  const int64_t blocks = (kSliceBlocks + t.block - 1) / t.block;
  std::vector<zr::bench::Row> rows;
  for (const int threads : {1, 2}) {
    std::vector<double> ours, theirs;
    for (int round = -1; round < kRounds; ++round) {
      const double step = seconds([&] { t.run(optimizer, blocks, threads); }),
                   moves = seconds([&] {
                     for (const Traffic& pass : traffic)
                       t.for_each_slice(blocks, threads, [&](int64_t first, int64_t n) { move(pass, first, n); });
                   });
      // An even number of changes restores the values: states stay valid.
      for (const Traffic& pass : traffic)
        t.for_each_slice(blocks, threads, [&](int64_t first, int64_t n) { move(pass, first, n); });
      if (round < 0) continue;
      ours.push_back(step / static_cast<double>(t.count) * 1e9);
      theirs.push_back(moves / static_cast<double>(t.count) * 1e9);
    }
    rows.push_back(zr::bench::compare(id + "_step_fp32_" + std::to_string(threads) + "t", "ns/param", ours,
                                      "same memory, no arithmetic", theirs, threads == 1 ? target_1t : target_2t));
    zr::bench::print(rows.back());
  }
  return rows;
}

// The products of the Newton-Schulz iterations of an m x n matrix, m <= n.
class Products {
 public:
  Products(int64_t m, int64_t n) : x_(m * n), y_(m * n), gram_(m * m), other_(m * m) {
    const auto matrix = [&](int64_t rows, int64_t columns, std::vector<float>& memory, bool transposed = false) {
      const dnnl::memory::desc desc =
          transposed ? dnnl::memory::desc({columns, rows}, dnnl::memory::data_type::f32, {1, columns})
                     : dnnl::memory::desc({rows, columns}, dnnl::memory::data_type::f32, {columns, 1});
      return dnnl::memory(desc, engine_, memory.data());
    };
    add(matrix(m, n, x_), matrix(m, n, x_, true), matrix(m, m, gram_));
    add(matrix(m, m, gram_), matrix(m, m, gram_), matrix(m, m, other_));
    add(matrix(m, m, other_), matrix(m, n, x_), matrix(m, n, y_));
    operations = 4.0 * static_cast<double>(m * m) * static_cast<double>(n) + 2.0 * static_cast<double>(m * m * m);
  }
  void run(int iterations) {
    for (int i = 0; i < iterations; ++i)
      for (const auto& [product, arguments] : products_) product.execute(stream_, arguments);
    stream_.wait();
  }
  double operations;  // of one iteration

 private:
  void add(const dnnl::memory& src, const dnnl::memory& weights, const dnnl::memory& dst) {
    products_.emplace_back(
        dnnl::matmul(dnnl::matmul::primitive_desc({src.get_desc(), weights.get_desc(), dst.get_desc()}, engine_)),
        std::unordered_map<int, dnnl::memory>{{DNNL_ARG_SRC, src}, {DNNL_ARG_WEIGHTS, weights}, {DNNL_ARG_DST, dst}});
  }
  dnnl::engine engine_{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream_{engine_};
  std::vector<float> x_, y_, gram_, other_;
  std::vector<std::pair<dnnl::matmul, std::unordered_map<int, dnnl::memory>>> products_;
};

// Operations per second of multiplications and additions in registers, on one core.
double peak() {
#if defined(__AVX512F__)
  constexpr int kLanes = 16;
#else
  constexpr int kLanes = 8;
#endif
  constexpr int kChains = 10;
  constexpr int64_t kTimes = 20000000;
  typedef float Lanes __attribute__((vector_size(kLanes * 4)));
  const Lanes x = Lanes{} + 0.999F, y = Lanes{} + 1e-3F;
  Lanes a{}, b{}, c{}, d{}, e{}, f{}, g{}, h{}, k{}, l{};  // independent: none waits for another
  const double time = seconds([&] {
    Lanes a2 = a, b2 = b, c2 = c, d2 = d, e2 = e, f2 = f, g2 = g, h2 = h, k2 = k, l2 = l;
    for (int64_t i = 0; i < kTimes; ++i) {
      a2 = a2 * x + y, b2 = b2 * x + y, c2 = c2 * x + y, d2 = d2 * x + y, e2 = e2 * x + y;
      f2 = f2 * x + y, g2 = g2 * x + y, h2 = h2 * x + y, k2 = k2 * x + y, l2 = l2 * x + y;
    }
    a = a2 + b2 + c2 + d2 + e2 + f2 + g2 + h2 + k2 + l2;
  });
  asm volatile("" : : "m"(a));
  return 2.0 * kChains * kLanes * static_cast<double>(kTimes) / time;
}

std::vector<zr::bench::Row> compare_muon() {
  constexpr int64_t kM = 1024, kN = 4096;
  constexpr int kIterations = 5;
  omp_set_num_threads(1);
  const OptimizerUnderTest muon(ZR_BUILD_DIR "/plugins", "muon");
  Tensor t(muon, {kM, kN});
  Products products(kM, kN);
  std::vector<double> ours, theirs, rates, peaks;
  for (int round = -1; round < kRounds; ++round) {
    const double step = seconds([&] { t.run(muon); }), alone = seconds([&] { products.run(kIterations); });
    const double top = peak();
    if (round < 0) continue;
    ours.push_back(step * 1e3);
    theirs.push_back(alone * 1e3);
    rates.push_back(kIterations * products.operations / alone / 1e9);
    peaks.push_back(top / 1e9);
  }
  std::vector<zr::bench::Row> rows{
      zr::bench::compare("muon_step_fp32_1t", "ms", ours, "its matrix products", theirs, 0.85),
      zr::bench::compare("muon_products_fp32_1t", "GFLOP/s", rates, "peak of one core", peaks, 0, false)};
  for (const zr::bench::Row& row : rows) zr::bench::print(row);
  return rows;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string plugins = ZR_BUILD_DIR "/plugins";
  std::vector<zr::bench::Row> rows;
  const auto add = [&](std::vector<zr::bench::Row> more) { rows.insert(rows.end(), more.begin(), more.end()); };
  add(compare_with_traffic(ZR_BUILD_DIR "/tests/bench_plugins", "lion", 0.85, 0.85));
  add(compare_with_traffic(plugins, "lamb", 0.85, 0.85));
  add(compare_with_traffic(plugins, "adafactor", 0.85, 0.85));
  add(compare_with_traffic(plugins, "adamw8bit", 0.5, 0.6));
  add(compare_muon());
  if (argc > 1) zr::bench::append(argv[1], rows);
}
