// A tier under test: its functions, and memory for its transfers.
#pragma once

#include <algorithm>
#include <vector>

#include "conform/library.hpp"
#include "conform/rule.hpp"
#include "conform/use.hpp"
#include "zr/abi/offload.h"

namespace zr::conform {

inline constexpr double kTransferSeconds = 5;
enum class TransferKind { write, read };

// A tier and its allocations. The functions with names of the ABI fail the rule if the plug-in returns an error;
// try_...() return its answer.
class TestTier {
 public:
  TestTier(Instance& instance, const Mode& mode)
      : instance_(instance), mode_(mode), api_(instance.api<zr_offload_api>()) {}

  zr_offload_caps caps() const {
    ArgumentMemory arguments(mode_);
    zr_offload_caps* out = arguments.sized(zr_offload_caps{});
    must("caps()", [&](zr_error* error) { return api_.caps(instance_.self(), out, error); });
    zr_offload_caps copy;
    ZR_TAKE(&copy, out);
    return copy;
  }
  /// Before reserve().
  void open() {
    must("open()", [&](zr_error* error) { return api_.open(instance_.self(), error); });
    align_ = std::max<uint64_t>(caps().io_align, 1);
  }
  uint64_t align() const { return align_; }
  /// `bytes` rounded up to whole units of transfers.
  uint64_t whole(uint64_t bytes) const { return (std::max<uint64_t>(bytes, 1) + align_ - 1) / align_ * align_; }
  /// Leaves *id unchanged if the plug-in does.
  Answer try_reserve(uint64_t bytes, uint64_t* id) const {
    ArgumentMemory arguments(mode_);
    const char* tag = arguments.text("masters");
    return call("reserve()", [&](zr_error* error) { return api_.reserve(instance_.self(), bytes, tag, id, error); });
  }
  /// The id of a new allocation.
  uint64_t reserve(uint64_t bytes) const {
    uint64_t id = ~uint64_t{0};
    if (const Answer answer = try_reserve(bytes, &id); !answer.ok()) fail("reserve(", bytes, ") ", answer.said());
    return id;
  }
  /// The tier may use the space of the allocation again.
  void release(uint64_t id) const {
    call_void("release()", [&] { api_.release(instance_.self(), id); });
  }
  /// Without a completion, the transfers are complete when it returns.
  Answer try_transfer(TransferKind kind, const std::vector<zr_transfer>& transfers, Completion* done = nullptr) const {
    ArgumentMemory arguments(mode_);
    const zr_transfer* list = arguments.list(transfers);
    const auto function = kind == TransferKind::write ? api_.write : api_.read;
    return call(kind == TransferKind::write ? "write()" : "read()", [&](zr_error* error) {
      return function(instance_.self(), list, static_cast<uint32_t>(transfers.size()), nullptr,
                      done ? done->abi() : nullptr, error);
    });
  }
  /// Returns when the transfers are complete.
  void transfer(TransferKind kind, const std::vector<zr_transfer>& transfers) const {
    if (const Answer answer = try_transfer(kind, transfers); !answer.ok())
      fail(kind == TransferKind::write ? "write() " : "read() ", answer.said());
  }
  /// Starts transfers with a completion.
  Completion& start(TransferKind kind, const std::vector<zr_transfer>& transfers) const {
    Completion& done = instance_.host().new_completion();
    if (const Answer answer = try_transfer(kind, transfers, &done); !answer.ok())
      fail(kind == TransferKind::write ? "write() " : "read() ", answer.said());
    return done;
  }
  /// Waits for a completion, which must be resolved with ZR_OK.
  void finish(Completion& done) const {
    require(instance_.host().wait(done, kTransferSeconds), "a transfer with a completion never resolves it");
    require(done.code() == ZR_OK, "a transfer was resolved with ", code_text(done.code()), ": ", done.text());
  }
  void transfer_later(TransferKind kind, const std::vector<zr_transfer>& transfers) const {
    finish(start(kind, transfers));
  }
  const zr_offload_api& api() const { return api_; }
  Instance& instance() const { return instance_; }

 private:
  Instance& instance_;
  Mode mode_;
  const zr_offload_api& api_;
  uint64_t align_ = 1;
};

struct OpenTier {
  explicit OpenTier(Case& test) : instance(test, host), tier(instance, {}) { tier.open(); }
  TestHost host;
  Instance instance;
  TestTier tier;
};

// Memory that a transfer can use, filled with random bytes.
inline Array filled(const TestTier& tier, uint64_t bytes, std::mt19937_64& random) {
  Array memory(bytes, std::max<std::size_t>(tier.align(), 64));
  for (std::size_t i = 0; i < bytes; ++i) memory.data()[i] = static_cast<char>(random());
  return memory;
}
inline zr_transfer transfer_of(uint64_t id, uint64_t offset, const Array& memory) {
  return {id, offset, view_of(memory.data(), static_cast<int64_t>(memory.size()), ZR_U8)};
}

}  // namespace zr::conform
