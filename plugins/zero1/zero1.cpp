// ZeRO-1: every rank has all weights; optimizer states, and the reduced gradients that the optimizer reads, are sharded
// over the ranks.
#include "zr/local_flat_strategy.hpp"

namespace {

class Zero1 : public zr::LocalFlatStrategy<Zero1, zr::GradientMemory::full> {
 public:
  static constexpr const char* description = "ZeRO stage 1: optimizer states are sharded";
  static constexpr const char* license = "Apache-2.0";
  static constexpr uint32_t flags = uint32_t{ZR_STRATEGY_STREAMS} | ZR_STRATEGY_LOCAL_GRADS;
  static constexpr uint64_t device_types = zr::kAnyDevice;
  static constexpr zr_key keys[] = {
      zr::key_bytes("bucket_bytes", "\"16MiB\"", 65536, 1e15, "size of a bucket of gradients or weights")};
  explicit Zero1(const zr::Config& config) : LocalFlatStrategy(config.integer("bucket_bytes")) {}
};

}  // namespace

ZR_STRATEGY(Zero1, "zero1", "zeroth", "1.0.0");
