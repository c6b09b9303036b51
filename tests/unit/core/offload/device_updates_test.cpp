// Updates of states on a tier for gradients and weights on a device whose operations run as late as possible: a copy or
// a computation that does not wait for another one gives wrong values.
#include "offload/device_updates.hpp"

#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "base/draft_abi.hpp"
#include "base/round_up.hpp"

namespace {

using namespace zr::host;

constexpr int64_t kBlock = plan::kDeviceBlock;

class LateMemory final : public PinnedMemory {
 public:
  explicit LateMemory(int64_t bytes)
      : bytes_(static_cast<char*>(std::aligned_alloc(64, static_cast<std::size_t>(round_up(bytes, 64))))) {}
  ~LateMemory() override { std::free(bytes_); }
  char* data() const override { return bytes_; }

 private:
  char* const bytes_;
};

// Operations in their order, which run when somebody waits for them.
class LateStream {
 public:
  int64_t add(std::function<void()> operation) {
    operations_.push_back(std::move(operation));
    return end();
  }
  int64_t end() const { return done_ + std::ssize(operations_); }
  bool is_idle() const { return operations_.empty(); }
  void run_to(int64_t end) {
    while (done_ < end) {
      const std::function<void()> next = std::move(operations_.front());
      operations_.pop_front();
      ++done_;
      next();
    }
  }

 private:
  int64_t done_ = 0;
  std::deque<std::function<void()>> operations_;
};

// A device whose memory is host memory. Its copies are counted.
class LateDevice final : public DeviceMemory {
 public:
  struct Counts {
    int64_t bytes_to_host = 0, bytes_to_device = 0, pinned = 0;
  };
  struct CopyStreamUse {
    const std::shared_ptr<LateStream> stream = std::make_shared<LateStream>();
    bool to_host = false, to_device = false;  // it has had copies in this direction
  };
  class Copies final : public CopyStream {
   public:
    explicit Copies(LateDevice& device) : device_(device), use_(device.copies.emplace_back()), stream_(use_.stream) {}
    ~Copies() override { stream_->run_to(stream_->end()); }
    void follow_computation() override {
      const int64_t end = device_.computation.end();
      stream_->add([&device = device_, end] { device.computation.run_to(end); });
    }
    void lead_computation() override {
      device_.computation.add([stream = stream_, end = stream_->end()] { stream->run_to(end); });
    }
    void to_host(const void* from, const PinnedMemory& to, int64_t offset, int64_t bytes) override {
      device_.counts.bytes_to_host += bytes;
      use_.to_host = true;
      copy(to.data() + offset, from, bytes);
    }
    void to_device(const PinnedMemory& from, int64_t offset, void* to, int64_t bytes) override {
      device_.counts.bytes_to_device += bytes;
      use_.to_device = true;
      copy(to, from.data() + offset, bytes);
    }
    std::unique_ptr<Mark> mark() override {
      struct End final : Mark {
        End(std::shared_ptr<LateStream> of, int64_t at) : stream(std::move(of)), end(at) {}
        void wait() override { stream->run_to(end); }
        const std::shared_ptr<LateStream> stream;
        const int64_t end;
      };
      return std::make_unique<End>(stream_, stream_->end());
    }

   private:
    void copy(void* to, const void* from, int64_t bytes) {
      stream_->add([=] { std::memcpy(to, from, static_cast<std::size_t>(bytes)); });
    }
    LateDevice& device_;
    CopyStreamUse& use_;
    const std::shared_ptr<LateStream> stream_;
  };

  zr_device device() const override { return {ZR_DEVICE_EXTENSION, 0}; }
  void* native_stream() override { return nullptr; }
  void* allocate(int64_t) override { return nullptr; }
  void free(void*) noexcept override {}
  void zero(const zr_view&) override {}
  void copy(const zr_view&, const zr_view&) override {}
  void add(const zr_view&, const zr_view&, bool) override {}
  int64_t count_non_finite(const zr_view&) override { return 0; }
  void upload(const void*, void*, int64_t) override {}
  void download(const void*, void*, int64_t) override {}
  void run(const std::function<void(zr_stream*)>&) override {}
  void call(const std::function<void()>&) override {}
  std::unique_ptr<PinnedMemory> allocate_pinned(int64_t bytes) override {
    counts.pinned += bytes;
    return std::make_unique<LateMemory>(bytes);
  }
  std::unique_ptr<CopyStream> new_copy_stream() override { return std::make_unique<Copies>(*this); }

  Counts counts;
  std::deque<CopyStreamUse> copies;  // all streams of copies, in the order in which they were made
  LateStream computation;
};

// One rank whose states are on the tier "cpu". The update of the tests adds the gradient to the weight.
class DeviceUpdatesTest : public ::testing::Test {
 protected:
  void plan(const std::vector<int64_t>& counts, bool copies_early, zr_dtype weights = ZR_BF16) {
    plan::PlanInput in;
    for (std::size_t i = 0; i < counts.size(); ++i)
      in.parameters.push_back({std::to_string(i), {}, {counts[i]}, counts[i], false, 0});
    in.weight_dtype = weights;
    in.descriptions[0].slots = {{"m", ZR_F32, ZR_SLOT_LIKE_PARAM, 0, 0}};
    in.tiers.push_back({"cpu", Tier::host});
    in.tier_request.states = 1;
    plan_ = plan::plan_of_rank(in, 0, [](const zr_plan_in& of, const zr_plan_sink& sink) {
      int64_t elements = 0;
      for (uint32_t p = 0; p < of.n_params; ++p) elements += of.params[p]->count;
      for (const uint32_t role : {ZR_ROLE_WEIGHT, ZR_ROLE_REDUCED_GRAD}) {
        const zr_buffer buffer{
            sizeof(zr_buffer), role, "buffer", elements, role == ZR_ROLE_WEIGHT ? of.weight_dtype : ZR_F32, 0};
        sink.buffer(sink.ctx, &buffer);
      }
      for (const uint32_t role : {ZR_ROLE_WEIGHT, ZR_ROLE_REDUCED_GRAD}) {
        int64_t at = 0;
        for (uint32_t p = 0; p < of.n_params; ++p) {
          const int64_t count = of.params[p]->count;
          const zr_piece piece{sizeof(zr_piece), role, p, role == ZR_ROLE_REDUCED_GRAD ? 1u : 0u, 0, count, at};
          sink.piece(sink.ctx, &piece);
          at += count;
        }
      }
    });
    plan_.device_staging = plan_device_staging(plan_, copies_early);
    const int64_t elements = plan_.rank_plan.buffers[0].elements, size = size_of(weights);
    weights_.assign(static_cast<std::size_t>(elements * size), 0);
    gradients_.assign(static_cast<std::size_t>(elements), 0);
    const zr_device on{ZR_DEVICE_EXTENSION, 0};
    const std::vector<zr_view> buffers{{weights_.data(), elements, weights, 0, on},
                                       {gradients_.data(), elements, ZR_F32, 0, on}};
    slices_.clear();
    for (const plan::Piece& piece : plan_.rank_plan.reduced_gradients) {
      update::UpdateSlice slice{piece.param, 0,
                                piece.count, part_of(buffers[0], piece.offset, piece.count),
                                {},          part_of(buffers[1], piece.offset, piece.count),
                                {}};
      slice.slots.push_back({nullptr, piece.count, ZR_F32, 0, kHostMemory});
      slice.tier = 1;
      slices_.push_back(std::move(slice));
    }
    touched_.assign(counts.size(), 1);
    updates_.emplace(plan_, buffers, device_, ledger_);
  }
  zr_view gradients(int64_t first, int64_t count) {
    return {gradients_.data() + first, count, ZR_F32, 0, {ZR_DEVICE_EXTENSION, 0}};
  }
  // Enqueues that all gradients from `first` on get a value.
  void compute(int64_t first, int64_t count, float value) {
    device_.computation.add([=, this] { std::fill_n(gradients_.begin() + first, count, value); });
  }
  void compute(float value) { compute(0, std::ssize(gradients_), value); }
  // weight += gradient for fp32 weights; for others weight = the gradient's upper half. Calls before_work() before the
  // update of each block.
  void update(const std::function<void()>& before_work = [] {}) {
    updates_->for_each_slice_in_memory(slices_, touched_, [&](const std::vector<update::UpdateSlice>& slices) {
      before_work();
      for (const update::UpdateSlice& slice : slices) {
        EXPECT_EQ(slice.grad.device.type, ZR_DEVICE_CPU);
        EXPECT_EQ(slice.weight.device.type, ZR_DEVICE_CPU);
        EXPECT_EQ(reinterpret_cast<uintptr_t>(slice.weight.data) % 64, 0u);
        EXPECT_EQ(slice.grad.count, slice.count);
        EXPECT_EQ(slice.slots[0].count, slice.count);
        updated_[slice.param] += slice.count;
        const auto* const grad = static_cast<const float*>(slice.grad.data);
        for (int64_t i = 0; i < slice.count; ++i) {
          if (slice.weight.dtype == ZR_F32) static_cast<float*>(slice.weight.data)[i] += grad[i];
          if (slice.weight.dtype == ZR_BF16) {
            uint32_t bits;
            std::memcpy(&bits, grad + i, sizeof bits);
            static_cast<uint16_t*>(slice.weight.data)[i] = static_cast<uint16_t>(bits >> 16);
          }
        }
      }
    });
  }
  // A weight as it is in memory of the device now; bf16.
  uint16_t weight_now(int64_t element) const {
    uint16_t bits = 0;
    std::memcpy(&bits, weights_.data() + 2 * element, 2);
    return bits;
  }
  // The weights when the device has computed everything; bf16 as fp32.
  std::vector<float> weights() {
    device_.computation.run_to(device_.computation.end());
    std::vector<float> values(gradients_.size());
    const bool narrow = plan_.input.weight_dtype == ZR_BF16;
    for (std::size_t i = 0; i < values.size(); ++i) {
      uint16_t half = 0;
      if (narrow) std::memcpy(&half, weights_.data() + 2 * i, 2);
      const uint32_t bits = uint32_t{half} << 16;
      std::memcpy(&values[i], narrow ? static_cast<const void*>(&bits) : weights_.data() + 4 * i, 4);
    }
    return values;
  }

  Ledger ledger_;
  LateDevice device_;
  plan::MemoryPlan plan_;
  std::vector<char> weights_;
  std::vector<float> gradients_;
  std::vector<update::UpdateSlice> slices_;
  std::vector<char> touched_;
  std::map<uint32_t, int64_t> updated_;  // elements by parameter
  std::optional<offload::DeviceUpdates> updates_;
};

TEST_F(DeviceUpdatesTest, CopiesGradientsWhenTheyAreFinalAndNotAgain) {
  plan({2048, 4096}, true);
  updates_->begin_micro_step(true);
  compute(4);
  updates_->gradients_final(gradients(2048, 4096));  // the last parameter first, as backward
  updates_->gradients_final(gradients(0, 2048));
  EXPECT_EQ(updates_->copied_early(), 6144);
  EXPECT_EQ(device_.counts.bytes_to_host, 6144 * 4);
  update();
  EXPECT_EQ(device_.counts.bytes_to_host, 6144 * 4);
  EXPECT_EQ(device_.counts.bytes_to_device, 6144 * 2);
  EXPECT_EQ(weights(), std::vector<float>(6144, 4));
  EXPECT_EQ(updated_, (std::map<uint32_t, int64_t>{{0, 2048}, {1, 4096}}));
}

// A strategy may reduce the same memory several times.
TEST_F(DeviceUpdatesTest, TheLastValueOfAGradientCounts) {
  plan({2048, 4096}, true);
  updates_->begin_micro_step(true);
  compute(4);
  updates_->gradients_final(gradients(0, 6144));
  compute(1000, 3000, 8);
  updates_->gradients_final(gradients(1000, 3000));
  update();
  std::vector<float> expected(6144, 4);
  std::fill_n(expected.begin() + 1000, 3000, 8.0f);
  EXPECT_EQ(weights(), expected);
}

// Such as those of a strategy that reduces after the last collective, or that the program has edited.
TEST_F(DeviceUpdatesTest, CopiesGradientsThatWereNotReportedBeforeTheUpdate) {
  plan({2048, 4096}, true);
  updates_->begin_micro_step(true);
  compute(4);
  updates_->gradients_final(gradients(2048, 100));
  update();
  EXPECT_EQ(weights(), std::vector<float>(6144, 4));
  updates_->begin_micro_step(false);  // of a step with several: nothing is final
  updates_->gradients_final(gradients(0, 6144));
  EXPECT_EQ(updates_->copied_early(), 0);
  compute(16);
  update();
  EXPECT_EQ(weights(), std::vector<float>(6144, 16));
}

TEST_F(DeviceUpdatesTest, GradientsOfAnEarlierStepAreNotUsed) {
  plan({2048}, true);
  for (const float value : {4.0f, 8.0f, 2.0f}) {
    updates_->begin_micro_step(true);
    compute(value);
    if (value != 8) updates_->gradients_final(gradients(0, 2048));
    update();
    EXPECT_EQ(weights(), std::vector<float>(2048, value));
  }
}

TEST_F(DeviceUpdatesTest, UpdatesMoreBlocksThanSlots) {
  for (const bool early : {true, false}) {
    device_.counts = {};
    plan({4 * kBlock + 1024}, early);
    ASSERT_EQ(plan_.device_staging.blocks.size(), 5u);
    for (const float value : {4.0f, 8.0f}) {
      updates_->begin_micro_step(true);
      for (int64_t block = 0; block < 4; ++block) compute(kBlock * block, kBlock, value * (1 << block));
      compute(4 * kBlock, 1024, value);
      updates_->gradients_final(gradients(0, 4 * kBlock + 1024));
      EXPECT_EQ(updates_->copied_early(), early ? 4 * kBlock + 1024 : 0);
      update();
      const std::vector<float> weights = this->weights();
      for (int64_t block = 0; block < 4; ++block)
        for (const int64_t at : {int64_t{0}, kBlock - 1})
          EXPECT_EQ(weights[static_cast<std::size_t>(kBlock * block + at)], value * (1 << block)) << early << block;
      EXPECT_EQ(weights.back(), value);
    }
    EXPECT_EQ(device_.counts.pinned, plan_.device_staging.bytes());
    EXPECT_EQ(ledger_.held(Tier::host), plan_.device_staging.bytes());
    updates_.reset();
    EXPECT_EQ(ledger_.held(Tier::host), 0);
  }
}

// While a block is updated, the gradients of the next one and the new weights of the one before are on their way, each
// direction on a stream of its own, and nothing has waited for them.
TEST_F(DeviceUpdatesTest, CopiesInBothDirectionsWhileABlockIsUpdated) {
  constexpr int64_t kBlocks = 4;
  for (const bool early : {true, false}) {
    device_.counts = {};
    updates_.reset();
    device_.copies.clear();
    plan({kBlocks * kBlock}, early);
    updates_->begin_micro_step(true);
    compute(4);
    updates_->gradients_final(gradients(0, kBlocks * kBlock));
    int64_t block = 0;
    update([&] {
      EXPECT_EQ(device_.counts.bytes_to_device, block * kBlock * 2) << "new weights of the blocks before " << block;
      EXPECT_EQ(device_.counts.bytes_to_host, (early ? kBlocks : std::min(block + 2, kBlocks)) * kBlock * 4);
      if (block > 0) {
        EXPECT_EQ(weight_now((block - 1) * kBlock), 0) << "nothing needs the new weights of block " << block - 1;
      }
      int downloads = 0, uploads = 0;
      for (const auto& [stream, to_host, to_device] : device_.copies) {
        EXPECT_FALSE(to_host && to_device) << "a stream for both directions";
        downloads += to_host;
        uploads += to_device;
        if (to_host && !early) {
          EXPECT_EQ(stream->is_idle(), block + 1 == kBlocks) << "gradients of the block after " << block;
        }
      }
      EXPECT_EQ(downloads, 1);
      EXPECT_EQ(uploads, block > 0 ? 1 : 0);
      ++block;
    });
    EXPECT_EQ(block, kBlocks);
    EXPECT_EQ(weight_now(kBlocks * kBlock - 1), 0) << "the host has not waited for the last copy";
    EXPECT_EQ(weights(), std::vector<float>(kBlocks * kBlock, 4));
  }
}

// Backward reads the old weights, also those whose slot is used again during the update.
TEST_F(DeviceUpdatesTest, WeightsAreReplacedAfterTheComputationThatReadsThem) {
  plan({4 * kBlock}, true);
  updates_->begin_micro_step(true);
  compute(4);
  updates_->gradients_final(gradients(0, 4 * kBlock));
  uint16_t read = 1;
  device_.computation.add([&] { read = weight_now(0); });
  update();
  EXPECT_EQ(weights(), std::vector<float>(4 * kBlock, 4));
  EXPECT_EQ(read, 0);
}

// Weights in fp32 are their own masters, so the update reads them.
TEST_F(DeviceUpdatesTest, Fp32WeightsAreReadFromTheDevice) {
  for (const bool early : {true, false}) {
    plan({kBlock + 1024, 2048}, early, ZR_F32);
    for (int step = 1; step <= 3; ++step) {
      updates_->begin_micro_step(true);
      compute(4);
      updates_->gradients_final(gradients(0, kBlock + 3072));
      update();
    }
    EXPECT_EQ(weights(), std::vector<float>(kBlock + 3072, 12)) << early;
  }
}

TEST_F(DeviceUpdatesTest, LeavesParametersWithoutGradientsAsTheyAre) {
  plan({2048, 4096, 1024}, true);
  updates_->begin_micro_step(true);
  compute(4);
  updates_->gradients_final(gradients(0, 7168));
  touched_[1] = 0;
  update();
  std::vector<float> expected(7168, 4);
  std::fill_n(expected.begin() + 2048, 4096, 0.0f);
  EXPECT_EQ(weights(), expected);
  EXPECT_EQ(updated_, (std::map<uint32_t, int64_t>{{0, 2048}, {2, 1024}}));
}

// The tiles of a disk are parts of slices.
TEST_F(DeviceUpdatesTest, UpdatesPartsOfSlices) {
  plan({4096}, true);
  const update::UpdateSlice whole = slices_[0];
  for (const auto& [first, count] : {std::pair<int64_t, int64_t>{0, 1024}, {1024, 2048}, {3072, 1024}}) {
    slices_ = {slice_part(plan_, whole, first, count)};
    updates_->begin_micro_step(true);
    compute(static_cast<float>(1 << (first / 1024)));
    update();
  }
  std::vector<float> expected(4096, 1);
  std::fill_n(expected.begin() + 1024, 2048, 2.0f);
  std::fill_n(expected.begin() + 3072, 1024, 8.0f);
  EXPECT_EQ(weights(), expected);
}

}  // namespace
