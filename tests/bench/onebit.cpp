// The arithmetic of an exchange of 1-bit Adam over 64 M elements, as one of two ranks, compared with loops that read
// and write the same memory. onebit [rows.json]
#include <chrono>
#include <functional>
#include <thread>
#include <vector>

#include "../../plugins/optimizers/onebit_adam/kernel.hpp"
#include "bench/row.hpp"

namespace {

constexpr int64_t kBlocks = 64 << 10, kElements = kBlocks * onebit::kBlock, kWords = onebit::words_of(onebit::kBlock);
constexpr int kRounds = 9, kRanks = 2;
constexpr double kTarget = 0.75;

double seconds(const std::function<void()>& fn) {
  const auto begin = std::chrono::steady_clock::now();
  fn();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Calls fn(first, end) for ranges of blocks, one per thread.
void for_each_range(int64_t blocks, int threads, const std::function<void(int64_t, int64_t)>& fn) {
  std::vector<std::thread> others;
  for (int t = 1; t < threads; ++t) others.emplace_back(fn, blocks * t / threads, blocks * (t + 1) / threads);
  fn(0, blocks / threads);
  for (std::thread& other : others) other.join();
}

// Reads memory without arithmetic on floats, which compilers would not vectorize.
uint32_t read(const void* memory, int64_t words) {
  const auto* __restrict word = static_cast<const uint32_t*>(memory);
  uint32_t bits = 0;
  for (int64_t i = 0; i < words; ++i) bits ^= word[i];
  return bits;
}
void change(void* memory, int64_t words) {
  auto* __restrict word = static_cast<uint32_t*>(memory);
  for (int64_t i = 0; i < words; ++i) word[i] ^= 1;
}
void write(void* memory, int64_t words, uint32_t bits) {
  auto* __restrict word = static_cast<uint32_t*>(memory);
  for (int64_t i = 0; i < words; ++i) word[i] = bits;
}

// Kept by both: what a rank has for all elements, and for the half that it serves.
struct Memory {
  std::vector<float> gradient = std::vector<float>(kElements), carry = gradient,
                     error = std::vector<float>(kElements / kRanks);
  std::vector<uint32_t> sent = std::vector<uint32_t>(kBlocks * kWords), received = sent;
  Memory() {
    uint32_t state = 1;
    for (float& x : gradient)
      x = static_cast<float>(static_cast<int32_t>(state = state * 1664525 + 1013904223)) * 1e-9f;
  }
};

struct Kernels {
  decltype(ZR_CHOOSE(onebit_compress)) compress = ZR_CHOOSE(onebit_compress);
  decltype(ZR_CHOOSE(onebit_serve)) serve = ZR_CHOOSE(onebit_serve);
  decltype(ZR_CHOOSE(onebit_decode)) decode = ZR_CHOOSE(onebit_decode);
};

void exchange(const Kernels& kernels, Memory& m, int threads) {
  const onebit::Factors factors{1, 0.1f, 0.9f, false};
  for_each_range(kBlocks, threads, [&](int64_t first, int64_t end) {
    for (int64_t i = first; i < end; ++i)
      kernels.compress(factors, m.gradient.data() + i * onebit::kBlock, m.carry.data() + i * onebit::kBlock,
                       onebit::kBlock, m.sent.data() + i * kWords);
  });
  const int64_t part = kBlocks / kRanks * kWords;  // what each rank has sent for the served half
  for_each_range(kBlocks / kRanks, threads, [&](int64_t first, int64_t end) {
    for (int64_t i = first; i < end; ++i)
      kernels.serve(m.received.data() + i * kWords, part, kRanks, m.error.data() + i * onebit::kBlock, onebit::kBlock,
                    m.sent.data() + i * kWords);
  });
  for_each_range(kBlocks, threads, [&](int64_t first, int64_t end) {
    for (int64_t i = first; i < end; ++i)
      kernels.decode(m.sent.data() + i * kWords, factors.beta1, m.gradient.data() + i * onebit::kBlock,
                     m.carry.data() + i * onebit::kBlock, onebit::kBlock);
  });
}

// The same memory, block by block, without arithmetic.
uint32_t streams(Memory& m, int threads) {
  std::vector<uint32_t> bits(static_cast<std::size_t>(threads) * 16);
  const auto mix = [&](int64_t first) -> uint32_t& {
    return bits[static_cast<std::size_t>(first > 0 ? threads - 1 : 0) * 16];
  };
  for_each_range(kBlocks, threads, [&](int64_t first, int64_t end) {
    for (int64_t i = first; i < end; ++i) {
      mix(first) ^= read(m.gradient.data() + i * onebit::kBlock, onebit::kBlock);
      change(m.carry.data() + i * onebit::kBlock, onebit::kBlock);
      write(m.received.data() + i * kWords, kWords, 1);
    }
  });
  for_each_range(kBlocks / kRanks, threads, [&](int64_t first, int64_t end) {
    for (int64_t i = first; i < end; ++i) {
      for (int rank = 0; rank < kRanks; ++rank)
        mix(first) ^= read(m.received.data() + (i + rank * kBlocks / kRanks) * kWords, kWords);
      change(m.error.data() + i * onebit::kBlock, onebit::kBlock);
      write(m.sent.data() + i * kWords, kWords, 1);
    }
  });
  for_each_range(kBlocks, threads, [&](int64_t first, int64_t end) {
    for (int64_t i = first; i < end; ++i) {
      mix(first) ^= read(m.sent.data() + i * kWords, kWords);
      write(m.gradient.data() + i * onebit::kBlock, onebit::kBlock, 1);
      change(m.carry.data() + i * onebit::kBlock, onebit::kBlock);
    }
  });
  return bits[0];
}

}  // namespace

int main(int argc, char** argv) {
  const Kernels kernels;
  Memory ours, theirs;
  std::vector<zr::bench::Row> rows;
  for (const int threads : {1, 2}) {
    std::vector<double> own, moved;
    for (int round = -1; round < kRounds; ++round) {
      ours.received = ours.sent;  // what a peer with the same gradients sends
      uint32_t bits = 0;
      const double took = seconds([&] { exchange(kernels, ours, threads); }),
                   streamed = seconds([&] { bits = streams(theirs, threads); });
      asm volatile("" : : "r"(bits));
      if (round < 0) continue;
      own.push_back(took / kElements * 1e9);
      moved.push_back(streamed / kElements * 1e9);
    }
    rows.push_back(zr::bench::compare("onebit_exchange_" + std::to_string(threads) + "t", "ns/param", own,
                                      "same memory, no arithmetic", moved, kTarget));
    zr::bench::print(rows.back());
  }
  if (argc > 1) zr::bench::append(argv[1], rows);
}
