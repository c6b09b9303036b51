// ZeRO-1: every rank has all weights; optimizer states, and the reduced gradients that the optimizer reads, are sharded
// over the ranks.
#include "zr/flat_shards.hpp"

namespace {

class Zero1 : public zr::FlatStrategy<Zero1, zr::GradientMemory::full> {
 public:
  static constexpr const char* description = "ZeRO stage 1: optimizer states are sharded";
  static constexpr const char* license = "Apache-2.0";
  static constexpr uint32_t flags = ZR_STRATEGY_STREAMS;
  static constexpr uint64_t device_types = zr::kAnyDevice;
  static constexpr zr_key keys[] = {
      zr::key_bytes("bucket_bytes", "\"16MiB\"", 65536, 1e15, "size of a bucket of gradients or weights")};
  explicit Zero1(const zr::Config& config) : FlatStrategy(config.integer("bucket_bytes")) {}
};

}  // namespace

ZR_STRATEGY(Zero1, "zero1", "zeroth", "1.0.0");
