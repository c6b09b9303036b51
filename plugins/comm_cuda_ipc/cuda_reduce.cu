#include <algorithm>
#include <type_traits>

#include "cuda_calls.hpp"
#include "cuda_reduce.hpp"

namespace peer {

namespace {

constexpr int kThreads = 256;
constexpr int kVectorBytes = 16;
constexpr int64_t kMaxBlocks = 4096;

struct Reduction {
  const void* addresses[kMaxReduceAddresses];  // n sources, then n_outs outs
  int32_t n, n_outs;
  int64_t first, count;
  bool accumulate, vectors;  // vectors: all addresses permit vector loads and stores

  __host__ __device__ const void* source(int32_t i) const { return addresses[i]; }
  __host__ __device__ void* out(int32_t i) const { return const_cast<void*>(addresses[n + i]); }
};
static_assert(sizeof(Reduction) <= 4096, "the parameters of a kernel");

// Elements of one load: at most 8, because more would not fit the registers of every GPU.
template <class T>
constexpr int kPerVector = sizeof(T) == 1 ? 8 : kVectorBytes / static_cast<int>(sizeof(T));
template <class T>
struct alignas(kPerVector<T> * sizeof(T)) Vector {
  static constexpr int kElements = kPerVector<T>;
  T element[kElements];
};
// The elements of a vector of In, as Out; fp32 from bf16 or fp16 takes two vectors.
template <class In, class Out>
struct alignas(kPerVector<In> * sizeof(In)) Result {
  Out element[Vector<In>::kElements];
};

// Only sums of floating-point numbers use vectors: without them the other kernels take less time to compile.
template <class In, class Op>
constexpr bool kUsesVectors = std::is_floating_point_v<typename In::Accumulated>&& std::is_same_v<Op, zr::SumOp>;

// Reduces what complete vectors contain; returns the number of elements.
template <class In, class Out, class Op>
__device__ int64_t reduce_vectors(const Reduction& r, int64_t thread, int64_t threads) {
  using Source = typename In::Stored;
  using Sum = typename In::Accumulated;
  using Stored = typename Out::Stored;
  constexpr int kElements = Vector<Source>::kElements;
  const int64_t done = r.count / kElements * kElements;
  for (int64_t at = thread * kElements; at < done; at += threads * kElements) {
    Sum sum[kElements];
    auto x = *reinterpret_cast<const Vector<Source>*>(static_cast<const Source*>(r.source(0)) + r.first + at);
    if (r.accumulate) {
      const auto held =
          *reinterpret_cast<const Result<Source, Stored>*>(static_cast<const Stored*>(r.out(0)) + r.first + at);
#pragma unroll
      for (int i = 0; i < kElements; ++i) sum[i] = Op::apply(Out::upcast(held.element[i]), In::upcast(x.element[i]));
    } else {
#pragma unroll
      for (int i = 0; i < kElements; ++i) sum[i] = Op::first(In::upcast(x.element[i]));
    }
    for (int32_t s = 1; s < r.n; ++s) {
      x = *reinterpret_cast<const Vector<Source>*>(static_cast<const Source*>(r.source(s)) + r.first + at);
#pragma unroll
      for (int i = 0; i < kElements; ++i) sum[i] = Op::apply(sum[i], In::upcast(x.element[i]));
    }
    Result<Source, Stored> result;
#pragma unroll
    for (int i = 0; i < kElements; ++i) result.element[i] = Out::downcast(sum[i]);
    for (int32_t o = 0; o < r.n_outs; ++o)
      *reinterpret_cast<Result<Source, Stored>*>(static_cast<Stored*>(r.out(o)) + r.first + at) = result;
  }
  return done;
}

template <class In, class Out, class Op>
__global__ void __launch_bounds__(kThreads) reduce_kernel(const __grid_constant__ Reduction r) {
  using Source = typename In::Stored;
  using Sum = typename In::Accumulated;
  using Stored = typename Out::Stored;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * kThreads;
  int64_t done = 0;
  if constexpr (kUsesVectors<In, Op>)
    if (r.vectors) done = reduce_vectors<In, Out, Op>(r, thread, threads);
  for (int64_t at = done + thread; at < r.count; at += threads) {
    const auto source = [&](int32_t s) { return In::upcast(static_cast<const Source*>(r.source(s))[r.first + at]); };
    Sum sum = r.accumulate ? Op::apply(Sum(Out::upcast(static_cast<const Stored*>(r.out(0))[r.first + at])), source(0))
                           : Op::first(source(0));
    for (int32_t s = 1; s < r.n; ++s) sum = Op::apply(sum, source(s));
    for (int32_t o = 0; o < r.n_outs; ++o) static_cast<Stored*>(r.out(o))[r.first + at] = Out::downcast(sum);
  }
}

bool is_aligned(const void* address, int64_t bytes) { return reinterpret_cast<uintptr_t>(address) % bytes == 0; }

template <class In, class Out, class Op>
void launch(Reduction& r, cudaStream_t stream) {
  constexpr int64_t kElements = Vector<typename In::Stored>::kElements;
  const int64_t in = sizeof(typename In::Stored), out = sizeof(typename Out::Stored);
  r.vectors = kUsesVectors<In, Op>;
  for (int i = 0; i < r.n; ++i)
    r.vectors &= is_aligned(static_cast<const char*>(r.source(i)) + r.first * in, kVectorBytes);
  for (int i = 0; i < r.n_outs; ++i)
    r.vectors &= is_aligned(static_cast<char*>(r.out(i)) + r.first * out, kVectorBytes);
  const int64_t work = r.vectors ? (r.count + kElements - 1) / kElements : r.count;
  const int64_t blocks = std::min(kMaxBlocks, (work + kThreads - 1) / kThreads);
  check(cuda_calls::launch(reduce_kernel<In, Out, Op>, static_cast<uint32_t>(blocks), kThreads, stream, r),
        "reduction");
}

template <class In, class Out>
void launch_as(uint32_t reduce, Reduction& r, cudaStream_t stream) {
  if (reduce == ZR_SUM) return launch<In, Out, zr::SumOp>(r, stream);
  if (reduce == ZR_MIN) return launch<In, Out, zr::MinOp>(r, stream);
  launch<In, Out, zr::MaxOp>(r, stream);
}

}  // namespace

void cuda_reduce(const zr::ReduceKind& kind, const void* const* sources, int n, void* const* outs, int n_outs,
                 int64_t first, int64_t count, cudaStream_t stream) {
  Reduction r{};
  std::copy(sources, sources + n, r.addresses);
  std::copy(outs, outs + n_outs, r.addresses + n);
  r.n = n;
  r.n_outs = n_outs;
  r.first = first;
  r.count = count;
  r.accumulate = kind.accumulate;
  switch (kind.src) {
    case ZR_F32: return launch_as<zr::F32Element, zr::F32Element>(kind.reduce, r, stream);
    case ZR_F64: return launch_as<zr::F64Element, zr::F64Element>(kind.reduce, r, stream);
    case ZR_BF16:
      if (kind.dst == ZR_F32) return launch_as<zr::Bf16Element, zr::F32Element>(kind.reduce, r, stream);
      return launch_as<zr::Bf16Element, zr::Bf16Element>(kind.reduce, r, stream);
    case ZR_F16:
      if (kind.dst == ZR_F32) return launch_as<zr::F16Element, zr::F32Element>(kind.reduce, r, stream);
      return launch_as<zr::F16Element, zr::F16Element>(kind.reduce, r, stream);
    case ZR_I8: return launch_as<zr::IntElement<int8_t>, zr::IntElement<int8_t>>(kind.reduce, r, stream);
    case ZR_U8: return launch_as<zr::IntElement<uint8_t>, zr::IntElement<uint8_t>>(kind.reduce, r, stream);
    case ZR_I32: return launch_as<zr::IntElement<int32_t>, zr::IntElement<int32_t>>(kind.reduce, r, stream);
    default: return launch_as<zr::IntElement<int64_t>, zr::IntElement<int64_t>>(kind.reduce, r, stream);
  }
}

}  // namespace peer
