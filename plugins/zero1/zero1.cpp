// ZeRO-1: every rank has all weights; the optimizer's states, and the sums it reads, are cut over the ranks.
#include "zr/flat_shards.hpp"

namespace {

class Zero1 : public zr::FlatStrategy<Zero1, zr::GradientMemory::full> {
 public:
  static constexpr zr_key keys[] = {
      zr::key_bytes("bucket_bytes", "\"16MiB\"", 65536, 1e15, "gradients and weights travel in buckets of this size")};
  explicit Zero1(const zr::Config& config) : FlatStrategy(config.integer("bucket_bytes")) {}
};

}  // namespace

ZR_STRATEGY(Zero1, "zero1", "zeroth", "1.0.0");
