#include <barrier>
#include <memory>
#include <thread>
#include <vector>

#include "cuda_runtime.h"

namespace cuda_on_cpu {

namespace {

constexpr unsigned kWarp = 32;

struct Warp {
  std::barrier<> barrier{kWarp};
  uint64_t values[kWarp] = {};
};
// The block that runs.
struct Block {
  explicit Block(unsigned threads) : barrier(threads), warps(threads / kWarp) {}
  std::barrier<> barrier;
  std::vector<Warp> warps;
};
thread_local Block* block = nullptr;
thread_local bool has_waited = false;  // in this block: then its threads enter the next one together

}  // namespace

void wait_for_block() {
  has_waited = true;
  block->barrier.arrive_and_wait();
}

uint64_t exchange_in_warp(uint64_t value, unsigned from) {
  has_waited = true;
  Warp& warp = block->warps[threadIdx.x / kWarp];
  warp.values[threadIdx.x % kWarp] = value;
  warp.barrier.arrive_and_wait();
  const uint64_t received = warp.values[from];
  warp.barrier.arrive_and_wait();
  return received;
}

void run_grid(unsigned blocks, unsigned threads_of_block, const std::function<void()>& kernel) {
  if (threads_of_block == 0 || threads_of_block % kWarp != 0) std::abort();
  Block shared(threads_of_block);
  std::barrier<> end(threads_of_block);
  std::vector<std::jthread> threads;
  for (unsigned t = 0; t < threads_of_block; ++t)
    threads.emplace_back([&, t] {
      block = &shared;
      threadIdx.x = t;
      blockDim.x = threads_of_block;
      gridDim.x = blocks;
      for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
        has_waited = false;
        kernel();
        if (has_waited) end.arrive_and_wait();
      }
    });
}

}  // namespace cuda_on_cpu
