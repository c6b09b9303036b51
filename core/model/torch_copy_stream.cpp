#include "model/torch_copy_stream.hpp"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/TensorOptions.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <chrono>
#include <thread>

#include "base/error.hpp"
#include "base/log.hpp"
#include "base/text.hpp"
#include "model/torch_device_memory.hpp"

namespace zr::host::model {

namespace {
class TorchPinnedMemory final : public PinnedMemory {
 public:
  explicit TorchPinnedMemory(at::Tensor bytes) : bytes_(std::move(bytes)) {}
  char* data() const override { return static_cast<char*>(bytes_.data_ptr()); }
  at::Tensor part(int64_t offset, int64_t bytes) const { return bytes_.narrow(0, offset, bytes); }

 private:
  const at::Tensor bytes_;
};

// The part of pinned memory as a tensor of bytes.
at::Tensor bytes_in(const PinnedMemory& memory, int64_t offset, int64_t bytes) {
  return static_cast<const TorchPinnedMemory&>(memory).part(offset, bytes);
}

class CopyMark final : public CopyStream::Mark {
 public:
  explicit CopyMark(const c10::Stream& stream) : event_(stream.device_type()) { event_.record(stream); }
  void wait() override { event_.synchronize(); }

 private:
  c10::Event event_;
};
}  // namespace

std::unique_ptr<PinnedMemory> allocate_pinned(int64_t bytes) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  try {
    return std::make_unique<TorchPinnedMemory>(at::empty({bytes}, at::TensorOptions(at::kByte).pinned_memory(true)));
  } catch (const c10::Error& failure) {
    fail_environment(
        "cannot allocate " + bytes_text(bytes) +
        " of pinned host memory: " + first_line(failure.what_without_backtrace()) +
        "; raise the limit of locked memory (ulimit -l), or set offload.overlap = false, which needs less");
  }
}

TorchCopyStream::TorchCopyStream(TorchDeviceMemory& memory, c10::Stream computation)
    : memory_(memory),
      computation_(computation),
      stream_(c10::impl::VirtualGuardImpl(computation.device_type()).getNewStream(computation.device())) {}

// A stream that waits for a peer which is lost never ends. Nothing needs its copies then, because the job has failed;
// libtorch keeps their pinned memory until they are complete.
TorchCopyStream::~TorchCopyStream() {
  using namespace std::chrono;
  constexpr auto kLimit = seconds(4);  // as long as communicators wait when they close
  const auto end = steady_clock::now() + kLimit;
  try {
    while (!stream_.query()) {
      if (steady_clock::now() > end) {
        log(ZR_LOG_WARN,
            "closing does not wait for copies to host memory that do not end (" + stream_.device().str() + ")");
        return;
      }
      std::this_thread::sleep_for(milliseconds(1));
    }
  } catch (const std::exception& failure) {  // of the device
    log(ZR_LOG_ERROR, first_line(failure.what()));
  }
}

void TorchCopyStream::follow_computation() {
  memory_.flush();
  follow(computation_, stream_);
}

void TorchCopyStream::lead_computation() {
  memory_.flush();
  follow(stream_, computation_);
}

void TorchCopyStream::copy(const at::Tensor& from, const at::Tensor& to) const {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const c10::StreamGuard scope(stream_);
  to.copy_(from, /*non_blocking=*/true);
}

void TorchCopyStream::to_host(const void* from, const PinnedMemory& to, int64_t offset, int64_t bytes) {
  copy(tensor_over(const_cast<void*>(from), {bytes}, at::kByte, stream_.device()), bytes_in(to, offset, bytes));
}

void TorchCopyStream::to_device(const PinnedMemory& from, int64_t offset, void* to, int64_t bytes) {
  copy(bytes_in(from, offset, bytes), tensor_over(to, {bytes}, at::kByte, stream_.device()));
}

std::unique_ptr<CopyStream::Mark> TorchCopyStream::mark() { return std::make_unique<CopyMark>(stream_); }

}  // namespace zr::host::model
