// ZeRO-2: as ZeRO-1, but no gradient stays longer than it takes to fill its bucket and send it to its owners.
#include "zr/flat_shards.hpp"

namespace {

class Zero2 : public zr::FlatStrategy<Zero2, zr::GradientMemory::double_buffered> {
 public:
  static constexpr zr_key keys[] = {
      zr::key_bytes("bucket_bytes", "\"16MiB\"", 65536, 1e15,
                    "gradients, two buckets at a time, and weights travel in buckets of this size")};
  explicit Zero2(const zr::Config& config) : FlatStrategy(config.integer("bucket_bytes")) {}
};

}  // namespace

ZR_STRATEGY(Zero2, "zero2", "zeroth", "1.0.0");
