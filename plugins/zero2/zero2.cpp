// ZeRO-2: like ZeRO-1, but a gradient is kept only until its bucket is full and has been sent to its owners.
#include "zr/local_flat_strategy.hpp"

namespace {

class Zero2 : public zr::LocalFlatStrategy<Zero2, zr::GradientMemory::double_buffered> {
 public:
  static constexpr const char* description = "ZeRO stage 2: optimizer states and gradients are sharded";
  static constexpr const char* license = "Apache-2.0";
  static constexpr uint32_t flags = uint32_t{ZR_STRATEGY_STREAMS} | ZR_STRATEGY_LOCAL_GRADS;
  static constexpr uint64_t device_types = zr::kAnyDevice;
  static constexpr zr_key keys[] = {zr::key_bytes("bucket_bytes", "\"16MiB\"", 65536, 1e15,
                                                  "size of a bucket of gradients (two in use at a time) or weights")};
  explicit Zero2(const zr::Config& config) : LocalFlatStrategy(config.integer("bucket_bytes")) {}
};

}  // namespace

ZR_STRATEGY(Zero2, "zero2", "zeroth", "1.0.0");
