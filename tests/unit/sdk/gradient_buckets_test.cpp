// GradientBuckets in isolation: one rank with a communicator that only records collectives.
#include "zr/gradient_buckets.hpp"

#include <gtest/gtest.h>

#include <map>

#include "base/ledger.hpp"
#include "base/thread_pool.hpp"
#include "comm/comm_runtime.hpp"
#include "comm/done.hpp"
#include "plugin/plugin_host.hpp"

namespace {

struct Left {
  std::vector<float> sent;
  std::vector<int64_t> counts;
  zr_view dst;
  uint32_t flags, op;
};

zr_code submit(void* comm, const zr_coll* c, zr_stream*, zr_done* done, zr_error*) {
  const auto* src = static_cast<const float*>(c->src.data);
  static_cast<std::vector<Left>*>(comm)->push_back(
      {{src, src + c->src.count}, {c->counts, c->counts + (c->counts ? 2 : 0)}, c->dst, c->flags, c->op});
  zr::host::comm::done_resolve(done, ZR_OK, 0, nullptr);
  return ZR_OK;
}

// Two parameters of 3072 and 1024 elements, on rank 1 of 2, in two buckets: first the second parameter, cut in two;
// then the first parameter, whose middle norm block belongs to rank 0 and whose other norm blocks belong to rank 1.
class GradientBucketsTest : public testing::Test {
 protected:
  GradientBucketsTest() : pool_(1), host_(ledger_, pool_) {
    zr::host::comm::offer_async(host_);
    in_ = {sizeof(zr_plan_in), 1, 2, ZR_F32, ZR_F32, ZR_F32, 2, 2, 1024, 32, nullptr, 0, 0, nullptr};
  }
  std::vector<zr_view> make_bucket_buffers() {
    bucket_memory_.assign(2 * 3072, -1);
    return {{bucket_memory_.data(), 3072, ZR_F32, 0, {1, 0}}, {bucket_memory_.data() + 3072, 3072, ZR_F32, 0, {1, 0}}};
  }
  zr::GradientBuckets make(zr::GradientMemory memory, zr::ReducedOn reduced_on = zr::ReducedOn::owners) {
    memory_.assign(3072 + 1024, -1);
    const auto view = [&](int64_t first, int64_t count) {
      return zr_view{memory_.data() + first, count, ZR_F32, 0, {1, 0}};
    };
    std::vector<zr_view> buffers{view(0, 4096)};
    if (memory == zr::GradientMemory::double_buffered) buffers = make_bucket_buffers();
    std::vector<zr::GradientBucket> buckets{
        {{{1, 0, 1024, 0}}, {512, 512}},
        {{{0, 1024, 1024, 0}, {0, 0, 1024, 1024}, {0, 2048, 1024, 2048}}, {1024, 2048}}};
    return {in_,
            memory,
            std::move(buckets),
            zr::Comm(zr::Host(host_.abi()), {&api_, &left_, 1, 2}),
            buffers.data(),
            reduced_on == zr::ReducedOn::owners ? std::vector{view(0, 512), view(512, 2048)}
                                                : std::vector{view(0, 1024), view(1024, 3072)},
            reduced_on};
  }
  // Writes 1000 p + block into each norm block and reports it as ready.
  static void give(zr::GradientBuckets& buckets, uint32_t param, int64_t placed, uint32_t micro = 0) {
    int64_t first = placed;
    const zr_view place = buckets.destination(param, first);
    ASSERT_EQ(place.count, 1024);
    std::fill_n(static_cast<float*>(place.data), 1024, static_cast<float>(1000 * param + first / 1024));
    buckets.ready(param, first, 1024, micro);
  }

  static zr_view place(zr::GradientBuckets& buckets, uint32_t param, int64_t placed) {
    return buckets.destination(param, placed);
  }

  zr::host::Ledger ledger_;
  zr::host::ThreadPool pool_;
  zr::host::plugin::PluginHost host_;
  const zr_collectives_api api_{sizeof(zr_collectives_api), 0, submit, nullptr};
  zr_plan_in in_{};
  std::vector<float> memory_, bucket_memory_;
  std::vector<Left> left_;
};

TEST_F(GradientBucketsTest, SendsBucketsInOrderForAnyArrivalOrder) {
  for (const auto memory : {zr::GradientMemory::double_buffered, zr::GradientMemory::full}) {
    left_.clear();
    auto buckets = make(memory);
    for (const int64_t first : {2048, 0, 1024}) give(buckets, 0, first);
    EXPECT_EQ(left_.size(), 0u) << "the bucket before this one is not full";
    give(buckets, 1, 0);
    buckets.backward_end();
    ASSERT_EQ(left_.size(), 2u);
    EXPECT_EQ(left_[0].sent.front(), 1000);
    EXPECT_EQ(left_[1].counts, (std::vector<int64_t>{1024, 2048}));
    for (const auto& [at, leaf] : std::map<int, float>{{0, 1}, {1024, 0}, {2048, 2}})
      EXPECT_EQ(left_[1].sent[static_cast<std::size_t>(at)], leaf) << "rank 0's shard comes first";
    EXPECT_EQ(left_[1].dst.data, memory_.data() + 512);
    EXPECT_EQ(left_[1].flags, uint32_t{ZR_COLL_GRADIENTS});
    give(buckets, 1, 0, 1);
    EXPECT_EQ(left_[2].flags, uint32_t{ZR_COLL_GRADIENTS} | ZR_COLL_ACCUMULATE) << "later micro-steps accumulate";
  }
}

TEST_F(GradientBucketsTest, ReportsEachBucketBeforeItIsSent) {
  auto buckets = make(zr::GradientMemory::full);
  std::vector<std::pair<std::size_t, std::size_t>> reported;  // bucket; number of buckets that were sent before
  const auto ready = [&](uint32_t param, int64_t first) {
    buckets.ready(param, first, 1024, 0, [&](std::size_t bucket) { reported.emplace_back(bucket, left_.size()); });
  };
  for (const int64_t first : {2048, 0, 1024}) ready(0, first);
  EXPECT_TRUE(reported.empty());
  ready(1, 0);
  EXPECT_EQ(reported, (std::vector<std::pair<std::size_t, std::size_t>>{{0, 0}, {1, 1}}));
  buckets.wait_reduced(1);
}

TEST_F(GradientBucketsTest, ReducesFullBucketsOnAllRanks) {
  auto buckets = make(zr::GradientMemory::double_buffered, zr::ReducedOn::all);
  give(buckets, 1, 0);
  for (const int64_t first : {2048, 0, 1024}) give(buckets, 0, first);
  buckets.backward_end();
  ASSERT_EQ(left_.size(), 2u);
  for (const Left& reduction : left_) {
    EXPECT_EQ(reduction.op, uint32_t{ZR_ALL_REDUCE});
    EXPECT_EQ(reduction.flags, uint32_t{ZR_COLL_GRADIENTS});
    EXPECT_EQ(reduction.counts.size(), 0u);
  }
  EXPECT_EQ(left_[0].sent, std::vector<float>(1024, 1000));
  EXPECT_EQ(left_[1].sent.size(), 3072u);
  EXPECT_EQ(left_[1].dst.data, memory_.data() + 1024);
  EXPECT_EQ(left_[1].dst.count, 3072);
}

TEST_F(GradientBucketsTest, DestinationIsTheRestOfItsRun) {
  auto buckets = make(zr::GradientMemory::double_buffered);
  EXPECT_EQ(place(buckets, 1, 0).count, 1024);
  EXPECT_EQ(place(buckets, 1, 100).count, 924);
  EXPECT_EQ(static_cast<float*>(place(buckets, 0, 2048 + 7).data) - static_cast<float*>(place(buckets, 0, 1024).data),
            2048 + 7);
}

TEST_F(GradientBucketsTest, PlacesAParameterInTheOrderItsBucketsAreSent) {
  zr::GradientBuckets buckets(
      in_, zr::GradientMemory::double_buffered, {{{{0, 2048, 1024, 0}}, {512, 512}}, {{{0, 0, 2048, 0}}, {1024, 1024}}},
      zr::Comm(zr::Host(host_.abi()), {&api_, &left_, 1, 2}), make_bucket_buffers().data(), {zr_view{}, zr_view{}});
  int64_t first = 0;
  EXPECT_EQ(buckets.destination(0, first).count, 1024);
  EXPECT_EQ(first, 2048) << "the last elements are sent first";
  first = 1024;
  EXPECT_EQ(buckets.destination(0, first).count, 2048);
  EXPECT_EQ(first, 0);
}

TEST_F(GradientBucketsTest, StoresFullGradientsFromTheLastSentToTheFirst) {
  auto buckets = make(zr::GradientMemory::full);
  EXPECT_EQ(place(buckets, 0, 1024).data, memory_.data());
  EXPECT_EQ(place(buckets, 1, 0).data, memory_.data() + 3072);
}

TEST_F(GradientBucketsTest, HoldsFullGradientsWhenTheHostHoldsThem) {
  using zr::GradientMemory;
  EXPECT_EQ(gradient_memory(in_, GradientMemory::double_buffered), GradientMemory::double_buffered);
  EXPECT_FALSE(reduces_in_place(in_, GradientMemory::full)) << "two micro-steps";
  in_.accumulation = 1;
  EXPECT_TRUE(reduces_in_place(in_, GradientMemory::full));
  EXPECT_FALSE(reduces_in_place(in_, GradientMemory::double_buffered));
  in_.grad_dtype = ZR_BF16;
  EXPECT_FALSE(reduces_in_place(in_, GradientMemory::full));
  in_.flags = ZR_PLAN_HOLD_GRADS;
  EXPECT_EQ(gradient_memory(in_, GradientMemory::double_buffered), GradientMemory::full);
  in_.size = offsetof(zr_plan_in, flags);
  EXPECT_EQ(gradient_memory(in_, GradientMemory::double_buffered), GradientMemory::double_buffered)
      << "a host of ABI 0.1";
}

}  // namespace
