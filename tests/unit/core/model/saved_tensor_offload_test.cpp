// Tensors that autograd saves are written to a store, restored bit-identically, and not kept in memory.
#include "model/saved_tensor_offload.hpp"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstring>
#include <map>

#include "base/error.hpp"
#include "model/allocator.hpp"
#include "model/process_setup.hpp"
#include "model/recompute.hpp"

namespace zr::host {
namespace {

// A store in memory that libtorch does not track.
struct Store {
  std::map<uint64_t, std::string> records;
  std::vector<std::vector<uint64_t>> announced;
  int puts = 0, gets = 0;
  int64_t bytes = 0;
  model::Model::OffloadCallbacks callbacks(int64_t least = 1) {
    return {least,
            [this](const void* data, int64_t n) {
              records[static_cast<uint64_t>(++puts)] =
                  std::string(static_cast<const char*>(data), static_cast<std::size_t>(n));
              bytes += n;
              return static_cast<uint64_t>(puts);
            },
            [this](uint64_t record, void* to) {
              ++gets;
              std::memcpy(to, records.at(record).data(), records.at(record).size());
            },
            [this](const std::vector<uint64_t>& next) { announced.push_back(next); },
            [this](uint64_t record) { records.erase(record); }};
  }
};

using Loss = std::function<torch::Tensor(const torch::Tensor& x)>;

torch::Tensor start() { return torch::arange(48, torch::kFloat).view({6, 8}).div_(7).sin_().requires_grad_(); }

// Compares the gradient of the loss with and without a store.
class SavedTensorOffloadTest : public ::testing::Test {
 protected:
  SavedTensorOffloadTest() { model::ProcessSetup::count_cpu_memory(); }
  void expect_same(const Loss& loss, int puts) {
    const torch::Tensor plain = start(), kept = start();
    loss(plain).backward();
    Store store;
    {
      const model::SavedTensorOffload offload(store.callbacks(), {});
      loss(kept).backward();
    }
    EXPECT_EQ(std::memcmp(plain.grad().data_ptr(), kept.grad().data_ptr(), plain.grad().nbytes()), 0);
    EXPECT_EQ(store.puts, puts);
    EXPECT_TRUE(store.records.empty()) << "all records are released";
  }
};

TEST_F(SavedTensorOffloadTest, RestoresTensorsBitIdentically) {
  expect_same([](const torch::Tensor& x) { return (x * 2).exp().sum(); }, 1);
  expect_same([](const torch::Tensor& x) { return torch::tanh(x * x).square().sum(); }, 1);
  expect_same([](const torch::Tensor& x) { return torch::softmax(torch::gelu(x * 1.5), 1).mul(x).sum(); }, 2);
}

TEST_F(SavedTensorOffloadTest, StoresEachStorageOnceForAllItsViews) {
  expect_same(
      [](const torch::Tensor& x) {
        const auto all = x * 3;
        const auto parts = all.chunk(4, 1);  // not contiguous
        return (parts[0] * parts[1] + parts[2].t().contiguous().t() * parts[3] + all.t().slice(0, 1, 3).t())
            .exp()
            .sum();
      },
      3);  // `all`; the contiguous copy; the output of exp
  expect_same(
      [](const torch::Tensor& x) {
        const auto all = (x * 3).t();
        return (all.unsqueeze(0).expand({5, 8, 6}) * all.flip(0)).sum();
      },
      2);
}

TEST_F(SavedTensorOffloadTest, StoresATensorAgainAfterItWasChanged) {
  expect_same(
      [](const torch::Tensor& x) {
        auto y = x * 3;
        const auto unused = y * y;
        y.add_(1);
        return (y * y).sum();
      },
      2);
}

TEST_F(SavedTensorOffloadTest, DistinguishesATensorFromALaterOneAtItsAddress) {
  expect_same(
      [](const torch::Tensor& x) {
        auto y = x * 2;
        for (int i = 0; i < 20; ++i) y = torch::tanh(y + 0.1);
        return y.sum();
      },
      20);
}

TEST_F(SavedTensorOffloadTest, KeepsTensorsThatTheirOperatorFillsAfterSavingThem) {
  expect_same(
      [](const torch::Tensor& x) {
        torch::manual_seed(3);
        torch::Tensor y = x * 3;
        return (torch::rrelu(x * 2, 0.1, 0.4, true) * torch::rrelu_(y, 0.1, 0.4, true)).sum();
      },
      2);  // the factors; inputs and noise stay in memory
}

TEST_F(SavedTensorOffloadTest, DistinguishesTensorsWithSeparateVersionCounters) {
  Store store;
  const model::SavedTensorOffload offload(store.callbacks(), {});
  const torch::Tensor one = torch::ones({16}).requires_grad_();
  torch::Tensor first, second;
  {
    const torch::Tensor values = torch::full({16}, 3.0f);
    first = one * values;          // saves threes
    values.data().fill_(5);        // does not increase the version of `values`
    second = one * values.data();  // saves fives
  }
  second.sum().backward();
  EXPECT_TRUE(one.grad().eq(5).all().item<bool>());
}

TEST_F(SavedTensorOffloadTest, HoldsNoMemoryBetweenForwardAndBackward) {
  const torch::Tensor x = torch::ones({1 << 18}).requires_grad_();
  Store store;
  const model::SavedTensorOffload offload(store.callbacks(1 << 16), {});
  const int64_t before = model::TorchMemory::held();
  torch::Tensor y = x * 2;
  for (int i = 0; i < 16; ++i) y = torch::tanh(y);
  y = y.sum();
  EXPECT_LT(model::TorchMemory::held() - before, 1 << 16) << "16 MiB are held without a store";
  model::TorchMemory::forget_peak();
  y.backward();
  EXPECT_LT(model::TorchMemory::peak() - before, 6 << 20);
  EXPECT_EQ(store.puts, 16);
  EXPECT_EQ(store.gets, 16);
}

TEST_F(SavedTensorOffloadTest, KeepsTensorsThatAreHeldInMemoryAnyway) {
  const torch::Tensor weight = torch::ones({64, 64}).requires_grad_(), buffer = torch::ones({64, 64});
  std::vector<float> mine(64 * 64, 2);
  Store store;
  const model::SavedTensorOffload offload(store.callbacks(4096), {{"buffer", buffer}});
  const torch::Tensor foreign = torch::from_blob(mine.data(), {64, 64}), small = torch::ones({64}) * 2;
  ((weight * buffer) * foreign * weight.t() * small).sum().backward();
  EXPECT_EQ(store.puts, 2) << "only the products are stored, which two factors need again";
  EXPECT_TRUE(weight.grad().eq(8).all().item<bool>());
}

TEST_F(SavedTensorOffloadTest, DoesNotReadATensorThatIsStillInMemory) {
  const torch::Tensor x = start();
  Store store;
  const model::SavedTensorOffload offload(store.callbacks(), {});
  const torch::Tensor y = (x * 2).exp();
  y.sum().backward();
  EXPECT_EQ(store.gets, 0);
  (x * y.detach()).sum().backward();
  EXPECT_EQ(store.puts, 1) << "the tensor is held after a backward, so keeping it costs nothing";
}

TEST_F(SavedTensorOffloadTest, SharesARestoredTensorBetweenItsUsers) {
  const torch::Tensor x = torch::ones({64, 64}).requires_grad_(), w = torch::ones({64, 64}).requires_grad_();
  Store store;
  const model::SavedTensorOffload offload(store.callbacks(), {});
  torch::Tensor loss;
  {
    const torch::Tensor h = torch::tanh(x);
    loss = (torch::mm(h, w) + torch::mm(h, w * 2) + torch::mm(h, w * 3)).sum();
  }
  const int puts = store.puts;
  loss.backward();
  EXPECT_EQ(puts, 3) << "h once, and two products with w";
  EXPECT_EQ(store.gets, 3);
}

TEST_F(SavedTensorOffloadTest, AnnouncesReadsInTheOrderOfBackward) {
  const torch::Tensor x = start();
  Store store;
  const model::SavedTensorOffload offload(store.callbacks(), {});
  torch::Tensor y = x * 2;
  for (int i = 0; i < 4; ++i) y = torch::tanh(y);
  y = y.sum();
  y.backward();
  const std::vector<std::vector<uint64_t>> expected{{3, 2, 1}, {2, 1}, {1}};
  EXPECT_EQ(store.announced, expected);
}

TEST_F(SavedTensorOffloadTest, RejectsInPlaceChangesOfASavedTensor) {
  for (const int64_t least : {1, 1 << 20}) {
    Store store;
    const model::SavedTensorOffload offload(store.callbacks(least), {});
    const torch::Tensor x = start();
    torch::Tensor y = x.exp();
    const torch::Tensor loss = y.sum();
    y.mul_(2);
    try {
      loss.backward();
      ADD_FAILURE() << "backward would use changed values";
    } catch (const Error& failure) {
      EXPECT_EQ(failure.exit_code(), exit_code::user);
      EXPECT_STREQ(
          failure.what(),
          "backward needs a tensor [6, 8] that was changed in place after forward had saved it; change a copy");
    }
  }
}

TEST_F(SavedTensorOffloadTest, SupportsRecomputedBlocks) {
  const auto again = [](const torch::Tensor& x) {
    const auto inner = [](const torch::Tensor& y) { return torch::dropout(torch::tanh(y * y), 0.25, true); };
    const auto frame = std::make_shared<model::RecomputeFrame>(
        [inner](const std::vector<torch::Tensor>& inputs) { inner(inputs[0]); }, std::vector<torch::Tensor>{x});
    const model::RecomputeFrame::FirstRun first_run(frame);
    return inner(x);
  };
  expect_same(
      [&](const torch::Tensor& x) {
        torch::manual_seed(3);
        torch::Tensor y = x * 2;
        for (int i = 0; i < 3; ++i) y = again(y);
        return y.sum();
      },
      3);  // only the inputs of the blocks
}

TEST_F(SavedTensorOffloadTest, StoresNothingWithoutGradients) {
  Store store;
  const model::SavedTensorOffload offload(store.callbacks(), {});
  const torch::NoGradGuard no_grad;
  start().exp().tanh();
  EXPECT_EQ(store.puts, 0);
}

TEST_F(SavedTensorOffloadTest, FreesTensorsOfAGraphWithoutBackward) {
  Store store;
  const model::SavedTensorOffload offload(store.callbacks(), {});
  start().exp().tanh().sum();
  EXPECT_EQ(store.puts, 2);
  EXPECT_TRUE(store.records.empty());
}

TEST_F(SavedTensorOffloadTest, FreesTensorsThatStayedInMemoryWithTheirGraph) {
  Store store;
  const model::SavedTensorOffload offload(store.callbacks(1 << 20), {});
  const torch::Tensor x = start();
  const int64_t before = model::TorchMemory::held();
  x.exp().tanh().sum();  // exp and tanh save their outputs
  EXPECT_EQ(store.puts, 0);
  EXPECT_EQ(model::TorchMemory::held(), before);
}

TEST_F(SavedTensorOffloadTest, ReportsATensorWhoseStoreIsDestroyed) {
  const torch::Tensor x = start();
  torch::Tensor loss;
  {
    Store store;
    const model::SavedTensorOffload offload(store.callbacks(), {});
    loss = x.exp().sum();
  }
  EXPECT_THROW(loss.backward(), Error);
}

TEST_F(SavedTensorOffloadTest, UsesTheStoreThatBeganLast) {
  Store one, other;
  auto first = std::make_unique<model::SavedTensorOffload>(one.callbacks(), model::SavedTensorOffload::Buffers{});
  const model::SavedTensorOffload second(other.callbacks(), {});
  first.reset();
  start().exp().sum().backward();
  EXPECT_EQ(one.puts, 0);
  EXPECT_EQ(other.puts, 1);
}

}  // namespace
}  // namespace zr::host
