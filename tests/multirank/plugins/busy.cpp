// Zero2 that, at the begin of a step, also writes to each of its buffers, and waits for a completion of its own thread;
// with `fails`, it fails in bind().
#include <thread>

#include "zr/flat_shards.hpp"

namespace {

class Busy : public zr::FlatStrategy<Busy, zr::GradientMemory::double_buffered> {
 public:
  static constexpr zr_key keys[] = {zr::key_bytes("bucket_bytes", "\"16MiB\"", 65536, 1e15, "as of zero2"),
                                    zr::key_bool("fails", "false", "whether bind() fails")};
  Busy(const zr::Config& config, const zr::Host& host)
      : FlatStrategy(config.integer("bucket_bytes")), host_(host), fails_(config.boolean("fails")) {}
  void bind(const zr_plan_in& in, const zr::Binding& bound) {
    if (fails_) throw zr::PluginError(ZR_INVALID, "bind() fails on purpose");
    for (uint32_t i = 0; i < bound.n_buffers; ++i) buffers_.push_back(bound.buffers[i]);
    FlatStrategy::bind(in, bound);
  }
  void event(uint32_t kind, const zr_use& use) {
    if (kind == ZR_STEP_BEGIN) begin();
    FlatStrategy::event(kind, use);
  }

 private:
  void begin() {
    constexpr int64_t kStride = 1 << 20;  // bytes
    for (const zr_view& buffer : buffers_)
      for (int64_t at = 0; at < buffer.count * zr::size_of(buffer.dtype); at += kStride)
        static_cast<char*>(buffer.data)[at] = 0;
    const zr::Done done(host_);
    std::thread resolver([&] { done.resolve(); });
    done.wait();
    resolver.join();
  }

  zr::Host host_;
  bool fails_;
  std::vector<zr_view> buffers_;
};

}  // namespace

ZR_STRATEGY(Busy, "busy", "tests", "1.0.0");
