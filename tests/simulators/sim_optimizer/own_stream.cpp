// Plain SGD that updates memory of the simulated device on a stream of its own, which the tests can make late.
#include <chrono>
#include <optional>
#include <thread>

#include "device_kernels/on_device.hpp"
#include "sgd/device_kernel.hpp"
#include "sgd/kernel.hpp"
#include "sim_stream.hpp"
#include "zr/optimizer.hpp"

namespace {

class OwnStreamSgd : public zr::Optimizer<OwnStreamSgd>, public device_kernels::OnDevice {
 public:
  static constexpr zr_key keys[] = {
      zr::key_int("late_ms", "0", 0, 1000, "milliseconds by which each update on the stream is late"),
      zr::key_bool("waits", "true", "let the stream of the engine wait for the update"),
  };
  static constexpr bool rounds = true;

  explicit OwnStreamSgd(const zr::Config& config)
      : late_(config.integer("late_ms")), waits_(config.boolean("waits")), kernel_(ZR_CHOOSE(sgd)) {}

  void update(const zr::Update& u) const {
    kernel_(constants(u.mul, u.lr), {u.weight, u.grad, nullptr, u.count, u.out, u.out_dtype, u.streams});
  }
  static void update_on_device(const zr::DeviceUpdate<OwnStreamSgd>& u) {
    const OwnStreamSgd& own = u.group(0);
    if (!own.stream_) own.stream_.emplace(u.host, u.stream);
    own.stream_->follow(u.stream);
    sim::enqueue(own.stream_->native(), "late", [late = own.late_] { std::this_thread::sleep_for(late); });
    device_kernels::in_batches<SgdBatch>(
        u.size(),
        [&](uint32_t i, SgdSlice& to) {
          to = {device_kernels::arrays_of(u.slice(i)), nullptr, constants(u.job.grad_mul, u.slice(i).lr)};
          return true;
        },
        [&](const SgdBatch& batch) { sgd_on_device(batch, u.device, own.stream_->native()); });
    if (own.waits_) own.stream_->precede(u.stream);
  }

 private:
  static SgdConstants constants(float mul, double lr) {
    SgdConstants c{};
    c.mul = mul;
    c.lr = static_cast<float>(lr);
    return c;
  }

  const std::chrono::milliseconds late_;
  const bool waits_;
  const decltype(ZR_CHOOSE(sgd)) kernel_;
  mutable std::optional<zr::OwnStream> stream_;  // made by the first update on a device
};

}  // namespace

ZR_OPTIMIZER(OwnStreamSgd, "own_stream", "tests", "1.0.0");
