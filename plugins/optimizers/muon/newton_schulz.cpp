#include "newton_schulz.hpp"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>
#include <oneapi/dnnl/dnnl.hpp>

#include "zr/float_cast.hpp"
#include "zr/round_up.hpp"

namespace muon {

namespace {
using dnnl::memory;

// Jordan et al. 2024: the polynomial a x + b x^3 + c x^5 moves singular values in (0, 1] towards 1.
constexpr float kA = 3.4445F, kB = -4.7750F, kC = 2.0315F;
constexpr int kLanes = 16;  // of the norm: element i is in lane i % 16

const dnnl::engine& cpu() {
  static const dnnl::engine& engine = *new dnnl::engine(dnnl::engine::kind::cpu, 0);  // never destroyed
  return engine;
}

// dst = scale src weights + sum dst.
class Product {
 public:
  Product(const memory::desc& src, const memory::desc& weights, const memory::desc& dst, float scale, float sum)
      : src_(src, cpu(), nullptr), weights_(weights, cpu(), nullptr), dst_(dst, cpu(), nullptr) {
    dnnl::primitive_attr attributes;
    if (scale != 1) attributes.set_output_scales(0, {scale});
    if (sum != 0) {
      dnnl::post_ops after;
      after.append_sum(sum);
      attributes.set_post_ops(after);
    }
    const dnnl::matmul::primitive_desc primitive(dnnl::matmul::desc(src, weights, dst), attributes, cpu());
    scratchpad_ = primitive.query_s64(dnnl::query::memory_consumption_s64);
    product_ = dnnl::matmul(primitive);
  }
  int64_t scratchpad_bytes() const { return scratchpad_; }
  void run(dnnl::stream& stream, void* src, void* weights, void* dst) {
    src_.set_data_handle(src);
    weights_.set_data_handle(weights);
    dst_.set_data_handle(dst);
    product_.execute(stream, {{DNNL_ARG_SRC, src_}, {DNNL_ARG_WEIGHTS, weights_}, {DNNL_ARG_DST, dst_}});
  }

 private:
  memory src_, weights_, dst_;
  int64_t scratchpad_ = 0;
  dnnl::matmul product_;
};

float rounded_to_bf16(float value) { return zr::from_bf16(zr::to_bf16(value)); }

// Memory at a cache line: the kernel that a library chooses may depend on the alignment.
class Buffer {
 public:
  explicit Buffer(int64_t bytes) : bytes_(zr::round_up(std::max<int64_t>(bytes, 1), kLine)) {
    data_.reset(std::aligned_alloc(kLine, static_cast<std::size_t>(bytes_)));
    if (!data_) throw std::bad_alloc();
  }
  void* data() const { return data_.get(); }
  int64_t bytes() const { return bytes_; }
  void copy_from(const Buffer& other) { std::memcpy(data(), other.data(), static_cast<std::size_t>(bytes_)); }

 private:
  static constexpr int64_t kLine = 64;  // bytes
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  int64_t bytes_;
  std::unique_ptr<void, Free> data_;
};

// oneDNN uses as many threads as OpenMP allows the calling thread: one, because other threads update other matrices.
class OneThread {
 public:
  OneThread() : before_(omp_get_max_threads()) { omp_set_num_threads(1); }
  ~OneThread() { omp_set_num_threads(before_); }
  OneThread(const OneThread&) = delete;

 private:
  int before_;
};
}  // namespace

class NewtonSchulz::Workspace {
 public:
  // `type`: of the operands and results in memory.
  Workspace(memory::data_type type, int64_t m, int64_t n)
      : rows(m),
        columns(n),
        matrix(m * n * 4),
        stream(cpu()),
        x(bytes_of(type, m * n)),
        next(bytes_of(type, m * n)),
        gram(bytes_of(type, m * m)),
        polynomial(bytes_of(type, m * m)),
        gram_of(row_major(type, m, n), transposed(type, m, n), row_major(type, m, m), 1, 0),
        square(row_major(type, m, m), row_major(type, m, m), row_major(type, m, m), kC, kB),
        apply(row_major(type, m, m), row_major(type, m, n), row_major(type, m, n), 1, kA) {}

  int64_t bytes() const {
    return matrix.bytes() + x.bytes() + next.bytes() + gram.bytes() + polynomial.bytes() + gram_of.scratchpad_bytes() +
           square.scratchpad_bytes() + apply.scratchpad_bytes();
  }

  const int64_t rows, columns;
  Buffer matrix;  // fp32
  dnnl::stream stream;
  Buffer x, next, gram, polynomial;  // of `type`
  Product gram_of, square, apply;

 private:
  static int64_t bytes_of(memory::data_type type, int64_t elements) {
    return elements * (type == memory::data_type::bf16 ? 2 : 4);
  }
  static memory::desc row_major(memory::data_type type, int64_t m, int64_t n) { return {{m, n}, type, {n, 1}}; }
  // The transposed of a row-major matrix.
  static memory::desc transposed(memory::data_type type, int64_t m, int64_t n) { return {{n, m}, type, {1, n}}; }
};

namespace {
// Whether oneDNN has matrix products of this type for this processor. oneDNN caches what it creates.
template <class Workspace>
bool is_supported(memory::data_type type) {
  try {
    const OneThread one_thread;
    const Workspace workspace(type, 16, 16);
    return true;
  } catch (const dnnl::error&) {
    return false;
  }
}

// Whether the processor has bf16 products. With AVX-512 alone, oneDNN emulates them, which is slower than fp32.
bool has_bf16_instructions() {
  constexpr auto kBf16 = static_cast<unsigned>(dnnl::cpu_isa::avx512_core_bf16);
  return (static_cast<unsigned>(dnnl::get_effective_cpu_isa()) & kBf16) == kBf16;
}
}  // namespace

NewtonSchulz::NewtonSchulz(const zr::Host& host, Precision precision, int iterations)
    : host_(host), precision_(precision), iterations_(iterations) {
  static const bool has_bf16 = has_bf16_instructions() && is_supported<Workspace>(memory::data_type::bf16),
                    has_fp32 = is_supported<Workspace>(memory::data_type::f32);
  if (!has_fp32) throw zr::PluginError(ZR_UNSUPPORTED, "oneDNN has no matrix products for this processor");
  stores_bf16_ = precision == Precision::bf16 && has_bf16;
}

NewtonSchulz::~NewtonSchulz() { count_memory(-bytes_); }

// Once per process, at the first update.
void NewtonSchulz::report_missing_instructions() const {
  static std::once_flag reported;
  if (!emulates_bf16()) return;
  std::call_once(reported, [this] {
    host_.log(ZR_LOG_INFO,
              "optimizer.muon.precision = \"bf16\": this processor has no bf16 matrix products, so muon rounds to bf16 "
              "and multiplies in fp32, which is slower than precision = \"fp32\"");
  });
}

// Counts the memory as `other` in the host's ledger.
void NewtonSchulz::count_memory(int64_t bytes) const {
  const auto* memory = host_.find<zr_memory_service>();
  if (memory && bytes != 0) memory->account(host_.abi(), "other: muon workspaces", bytes);
}

NewtonSchulz::Workspace* NewtonSchulz::take(int64_t rows, int64_t columns) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    Pool& pool = pools_[{rows, columns}];
    if (!pool.idle.empty()) {
      Workspace* workspace = pool.idle.back().release();
      pool.idle.pop_back();
      return workspace;
    }
    pool.idle.reserve(++pool.made);  // so that give() does not allocate
  }
  report_missing_instructions();
  const OneThread one_thread;  // a kernel is made for a number of threads
  auto workspace =
      std::make_unique<Workspace>(stores_bf16_ ? memory::data_type::bf16 : memory::data_type::f32, rows, columns);
  count_memory(workspace->bytes());
  const std::lock_guard<std::mutex> lock(mutex_);
  bytes_ += workspace->bytes();
  return workspace.release();
}

void NewtonSchulz::give(Workspace* workspace) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  pools_.find({workspace->rows, workspace->columns})->second.idle.emplace_back(workspace);
}

float* NewtonSchulz::matrix(Workspace& workspace) { return static_cast<float*>(workspace.matrix.data()); }

// Divides `count` elements by max(their Frobenius norm, least_norm). In bf16, the elements, the norm and the quotients
// are rounded to bf16.
void NewtonSchulz::normalize(float* matrix, int64_t count, double least_norm) const {
  const bool rounds = precision_ == Precision::bf16;
  double lanes[kLanes] = {};
  for (int64_t i = 0; i < count; ++i) {
    if (rounds) matrix[i] = rounded_to_bf16(matrix[i]);
    const double value = matrix[i];
    lanes[i % kLanes] += value * value;
  }
  double squares = 0;
  for (const double lane : lanes) squares += lane;
  const double norm = std::max(std::sqrt(squares), least_norm);
  if (rounds) {
    const float divisor = rounded_to_bf16(static_cast<float>(norm));
    for (int64_t i = 0; i < count; ++i) matrix[i] = rounded_to_bf16(matrix[i] / divisor);
  } else {
    const float scale = static_cast<float>(1 / norm);
    for (int64_t i = 0; i < count; ++i) matrix[i] *= scale;
  }
}

// Rounds a result that a processor without bf16 products has calculated in fp32.
void NewtonSchulz::round_result(void* result, int64_t count) const {
  if (!emulates_bf16()) return;
  auto* const values = static_cast<float*>(result);
  for (int64_t i = 0; i < count; ++i) values[i] = rounded_to_bf16(values[i]);
}

void NewtonSchulz::run(Workspace& w, double least_norm) const {
  const OneThread one_thread;
  const int64_t count = w.rows * w.columns, gram_count = w.rows * w.rows;
  float* const matrix = static_cast<float*>(w.matrix.data());
  normalize(matrix, count, least_norm);
  if (stores_bf16_)
    std::transform(matrix, matrix + count, static_cast<uint16_t*>(w.x.data()),
                   [](float value) { return zr::to_bf16(value); });
  else
    std::copy(matrix, matrix + count, static_cast<float*>(w.x.data()));
  for (int i = 0; i < iterations_; ++i) {
    w.gram_of.run(w.stream, w.x.data(), w.x.data(), w.gram.data());
    w.stream.wait();
    round_result(w.gram.data(), gram_count);
    w.polynomial.copy_from(w.gram);
    w.square.run(w.stream, w.gram.data(), w.gram.data(), w.polynomial.data());
    w.stream.wait();
    round_result(w.polynomial.data(), gram_count);
    w.next.copy_from(w.x);
    w.apply.run(w.stream, w.polynomial.data(), w.x.data(), w.next.data());
    w.stream.wait();
    round_result(w.next.data(), count);
    std::swap(w.x, w.next);
  }
  if (stores_bf16_) {
    const auto* const halves = static_cast<const uint16_t*>(w.x.data());
    std::transform(halves, halves + count, matrix, [](uint16_t value) { return zr::from_bf16(value); });
  } else {
    const auto* const floats = static_cast<const float*>(w.x.data());
    std::copy(floats, floats + count, matrix);
  }
}

}  // namespace muon
