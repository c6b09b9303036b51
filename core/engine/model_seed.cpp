#include "engine/model_seed.hpp"

namespace zr::host::engine {

namespace {
// Mixes three numbers into a generator state with the finaliser of SplitMix64.
uint64_t mix(uint64_t a, uint64_t b, uint64_t c) {
  uint64_t x = a;
  for (const uint64_t y : {b, c}) {
    x += 0x9e3779b97f4a7c15u + y;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    x ^= x >> 31;
  }
  return x;
}
}  // namespace

int64_t micro_index(const job::StepContext& context, const TrainingProgress& progress) {
  return int64_t{progress.micro()} * context.world() + context.rank();
}

void seed_model(const job::StepContext& context, const TrainingProgress& progress) {
  context.model.seed(mix(static_cast<uint64_t>(context.config().train().seed.value),
                         static_cast<uint64_t>(progress.step()),
                         static_cast<uint64_t>(micro_index(context, progress))));
}

uint64_t generator_seed(const job::StepContext& context, int64_t key) {
  constexpr uint64_t kOfNoMicroBatch = ~uint64_t{0};  // no micro-batch has this index
  return mix(static_cast<uint64_t>(context.config().train().seed.value), static_cast<uint64_t>(key), kOfNoMicroBatch);
}

}  // namespace zr::host::engine
