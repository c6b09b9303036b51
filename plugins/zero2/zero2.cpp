// ZeRO-2: as ZeRO-1, but no gradient stays longer than it takes to fill its bucket and send it to its owners.
#include <optional>

#include "zr/flat_shards.hpp"
#include "zr/strategy.hpp"

namespace {

class Zero2 : public zr::Strategy<Zero2> {
 public:
  static constexpr zr_key keys[] = {
      zr::key_bytes("bucket_bytes", "\"16MiB\"", 65536, 1e15,
                    "gradients, two buckets at a time, and weights travel in buckets of this size")};
  explicit Zero2(const zr::Config& config) : bucket_bytes_(config.integer("bucket_bytes")) {}

  void plan(const zr_plan_in& in, zr::Plan& plan) const { zr::FlatShards(in, bucket_bytes_, kGradients).plan(plan); }
  void bind(const zr_plan_in& in, const zr::Bound& bound) {
    shards_.emplace(in, bucket_bytes_, kGradients);
    shards_->bind(bound);
  }
  zr_view grad_place(uint32_t param, int64_t& first, uint32_t) { return shards_->gradients().place(param, first); }
  void grad_ready(uint32_t param, int64_t first, int64_t count, uint32_t micro) {
    shards_->gradients().ready(param, first, count, micro);
  }
  void event(uint32_t kind, uint32_t) {
    if (kind == ZR_BACKWARD_END) shards_->gradients().backward_end();
  }
  void grads_finish() {}
  void updated() { shards_->gather_weights(); }

 private:
  static constexpr auto kGradients = zr::GradientMemory::rooms;
  int64_t bucket_bytes_;
  std::optional<zr::FlatShards> shards_;
};

}  // namespace

ZR_STRATEGY(Zero2, "zero2", "zeroth", "1.0.0");
