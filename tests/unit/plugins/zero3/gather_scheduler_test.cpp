// GatherScheduler in isolation: rank 0 of two, with a communicator that records collectives and completes each one when
// it is waited for.
#include "gather_scheduler.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <sstream>

#include "plan/plan.hpp"

struct zr_done_s {
  int references = 1;
  std::function<void()> complete;  // empty: already complete
  std::function<void()> lost;      // called if the handle is released before completion
};

namespace {

using ::testing::ElementsAre, ::testing::EndsWith, ::testing::HasSubstr, ::testing::IsEmpty;

constexpr int64_t kElements = 2048, kBytes = kElements * 4;  // per group
constexpr int64_t kPlenty = int64_t{1} << 40;
const std::string kUses = "a b c d d c b a";  // forward and backward

// The values of group 'a', 'b', ...
float value(char group, int64_t element) { return static_cast<float>(10000 * (group - 'a' + 1) + element); }

/// Simulates the host and the other rank.
class Outside {
 public:
  Outside() = default;
  Outside(const Outside&) = delete;
  const zr_host* host() const { return &host_; }
  zr_comm_ref comm() { return {&kComm, this, 0, 2}; }

  std::string started;             // groups, in the order they were started
  std::string rounded;             // for each of them, r: its weights may be rounded
  int64_t elements = 0;            // total elements of the started groups
  const float* end = nullptr;      // end of the highest memory that was gathered into
  int under_way = 0, lost = 0;     // lost: not waited for before their memory was released
  int allocations = 0, lent = 0;   // separate memory outside the gather buffer; currently held
  std::vector<std::string> lines;  // logged

 private:
  static Outside& of(const zr_host* host) { return *static_cast<Outside*>(host->ctx); }
  static zr_code submit(void* self, const zr_coll* c, zr_stream*, zr_done* done, zr_error*) {
    auto& out = *static_cast<Outside*>(self);
    const char group = c->label[0];
    auto* dst = static_cast<float*>(c->dst.data);
    EXPECT_EQ(c->op, uint32_t{ZR_ALL_GATHER});
    EXPECT_EQ(c->src.count, c->counts[0]);
    EXPECT_EQ(c->dst.count, c->counts[0] + c->counts[1]);
    for (int64_t i = 0; i < c->src.count; ++i) EXPECT_EQ(static_cast<float*>(c->src.data)[i], value(group, i));
    out.started += group;
    out.rounded += c->flags & ZR_COLL_WEIGHTS ? 'r' : '-';
    out.elements += c->dst.count;
    out.end = std::max<const float*>(out.end, dst + c->dst.count);
    ++out.under_way;
    done->lost = [&out] { ++out.lost; };
    done->complete = [&out, group, dst, count = c->dst.count] {
      for (int64_t i = 0; i < count; ++i) dst[i] = value(group, i);
      --out.under_way;
    };
    return ZR_OK;
  }
  static zr_code wait(zr_done* done, int64_t, zr_error*) {
    if (const auto complete = std::exchange(done->complete, nullptr)) complete();
    return ZR_OK;
  }
  static void release(zr_done* done) {
    if (--done->references > 0) return;
    if (done->complete) done->lost();
    delete done;
  }
  static zr_code alloc(const zr_host* host, const zr_alloc* request, zr_view* out, zr_error*) {
    const uint64_t align = std::max<uint64_t>(request->align, 64), bytes = zr::round_up(request->bytes, align);
    *out = {std::aligned_alloc(align, bytes), static_cast<int64_t>(request->bytes), ZR_U8, 0, {ZR_DEVICE_CPU, 0}};
    ++of(host).allocations;
    ++of(host).lent;
    return ZR_OK;
  }
  static void free(const zr_host* host, const zr_view* view) {
    std::free(view->data);
    --of(host).lent;
  }
  static const void* service(const zr_host*, const char* id) {
    static constexpr zr_async_service async{sizeof(zr_async_service),
                                            0,
                                            [](const zr_host*) { return new zr_done; },
                                            nullptr,
                                            release,
                                            nullptr,
                                            nullptr,
                                            wait};
    static constexpr zr_memory_service memory{sizeof(zr_memory_service), 0, alloc, free, nullptr};
    if (id == std::string("zr.host.async/1")) return &async;
    return id == std::string("zr.host.memory/1") ? &memory : nullptr;
  }
  static void log(const zr_host* host, int32_t, const char* text) { of(host).lines.emplace_back(text); }
  static constexpr zr_collectives_api kComm{sizeof(zr_collectives_api), 0, submit, nullptr};

  zr_host host_{sizeof host_, ZR_ABI_MINOR, this, service, log};
};

class GatherSchedulerTest : public ::testing::Test {
 protected:
  ~GatherSchedulerTest() override { end(); }
  /// Groups a, b, ... with these sizes; a gather buffer for all of them, or only of the size that the limits require.
  void make(const zero3::Limits& limits,
            const std::vector<int64_t>& counts = {kElements, kElements, kElements, kElements}) {
    make(limits, counts, kPlenty);
  }
  void make_tight(const zero3::Limits& limits, const std::vector<int64_t>& counts) { make(limits, counts, 0); }

  void acquire(const std::string& groups, uint32_t phase) {
    const auto params = params_of(groups);
    std::vector<zr_view> whole(params.size());
    scheduler_->acquire(params.data(), static_cast<uint32_t>(params.size()), phase, whole.data());
    for (std::size_t i = 0; i < whole.size(); ++i) {
      ASSERT_EQ(whole[i].count, input_.parameters[params[i]].count);
      for (int64_t e = 0; e < whole[i].count; ++e)
        ASSERT_EQ(static_cast<float*>(whole[i].data)[e], value(groups[i], e)) << groups << ", element " << e;
    }
  }
  void release(const std::string& groups) {
    const auto params = params_of(groups);
    scheduler_->release(params.data(), static_cast<uint32_t>(params.size()));
  }
  /// One word per operator: the groups it uses. Returns the groups gathered at each operator; "-" if none.
  std::string pass(const std::string& operators) {
    std::istringstream words(operators);
    const std::vector<std::string> uses{std::istream_iterator<std::string>(words), {}};
    std::string all;
    for (std::size_t i = 0; i < uses.size(); ++i) {
      out_->started.clear();
      acquire(uses[i], i < uses.size() / 2 ? ZR_FORWARD : ZR_BACKWARD);
      release(uses[i]);
      all += (i > 0 ? " " : "") + (out_->started.empty() ? "-" : out_->started);
    }
    scheduler_->pass_end();
    return all;
  }
  /// The groups gathered after the weights were updated.
  std::string update() {
    out_->started.clear();
    scheduler_->refresh();
    scheduler_->prefetch();
    return out_->started;
  }
  int64_t window_used() const { return out_->end - buffer_.data(); }

  bool rounds_ = false;
  std::optional<Outside> out_;
  zr::host::plan::PlanInput input_;
  std::optional<zr::host::plan::PlanInputView> view_;
  std::optional<zero3::GatherGroups> groups_;
  std::optional<zero3::GatherScheduler> scheduler_;

 private:
  void end() {
    scheduler_.reset();
    EXPECT_TRUE(!out_ || out_->lent == 0) << "all memory is given back";
  }
  static std::vector<uint32_t> params_of(const std::string& groups) {
    std::vector<uint32_t> params;
    for (const char group : groups) params.push_back(static_cast<uint32_t>(group - 'a'));
    return params;
  }
  void make(const zero3::Limits& limits, const std::vector<int64_t>& counts, int64_t window) {
    end();
    out_.emplace();
    input_ = {};
    input_.world = 2;
    input_.rounds_weights = rounds_;
    for (const int64_t count : counts) {
      const std::string module(1, static_cast<char>('a' + input_.parameters.size()));
      input_.parameters.push_back({module + ".weight", {}, {count}, count, false, 0});
    }
    view_.emplace(input_, 0);
    groups_.emplace(view_->in(), kPlenty, 0);
    ASSERT_EQ(groups_->groups().size(), counts.size());
    shard_.resize(static_cast<std::size_t>(groups_->shard()));
    for (std::size_t c = 0; c < counts.size(); ++c)
      for (int64_t i = 0; i < groups_->groups()[c].part(0).size(); ++i)
        shard_[static_cast<std::size_t>(groups_->groups()[c].own_offset + i)] = value(static_cast<char>('a' + c), i);
    window = std::min(groups_->sharded(), std::max(window, zero3::all_gather_buffer_elements(*groups_, limits, 4)));
    buffer_.assign(static_cast<std::size_t>(window), -1);
    scheduler_.emplace(view_->in(), *groups_, limits, zr::Comm(zr::Host(out_->host()), out_->comm()), view(shard_),
                       view(buffer_), zr::Host(out_->host()));
  }
  static zr_view view(std::vector<float>& memory) {
    return {memory.data(), static_cast<int64_t>(memory.size()), ZR_F32, 0, {1, 0}};
  }
  std::vector<float> shard_, buffer_;
};

TEST_F(GatherSchedulerTest, PrefetchesUpToPrefetchBytesOnceTheOrderIsKnown) {
  for (const auto& [prefetch, gathered] : std::map<int64_t, std::string>{{0, "a b c d - - b a"},
                                                                         {kBytes - 1, "a b c d - - b a"},
                                                                         {kBytes, "ab c d b - - a -"},
                                                                         {2 * kBytes - 1, "ab c d b - - a -"},
                                                                         {2 * kBytes, "abc d b a - - - -"}}) {
    make({prefetch, kPlenty, 2 * kBytes});
    EXPECT_EQ(pass(kUses), kUses) << "on demand";
    EXPECT_EQ(pass(kUses), gathered) << prefetch << " bytes ahead";
    EXPECT_EQ(pass(kUses), gathered);
  }
}

TEST_F(GatherSchedulerTest, GathersExactWeightsForAnExport) {
  for (rounds_ = false;; rounds_ = true) {
    make({0, kPlenty, kPlenty});
    pass("a b b a");
    pass("a b b a");
    scheduler_->refresh();
    out_->started.clear();
    out_->rounded.clear();
    for (const uint32_t phase : {ZR_FORWARD, ZR_EXPORT_PHASE, ZR_EXPORT_PHASE, ZR_BACKWARD}) {
      acquire("a", phase);
      release("a");
    }
    EXPECT_EQ(out_->started, rounds_ ? "aaaa" : "a");
    EXPECT_EQ(out_->rounded, rounds_ ? "r--r" : "-");
    EXPECT_EQ(out_->lost, 0);
    if (rounds_) break;
  }
}

// The program can catch the error; the weights that it names, and those beside it, can then be used again.
TEST_F(GatherSchedulerTest, AnExportOfRoundedWeightsInUseFailsAndChangesNothing) {
  rounds_ = true;
  make({0, kPlenty, 0});
  acquire("b", ZR_FORWARD);
  out_->started.clear();
  EXPECT_THROW(acquire("ab", ZR_EXPORT_PHASE), zr::PluginError);
  EXPECT_EQ(out_->started, "");
  release("b");
  acquire("ab", ZR_EXPORT_PHASE);
  release("ab");
  EXPECT_EQ(out_->started, "ab");
  EXPECT_EQ(out_->rounded, "r--");
}

TEST_F(GatherSchedulerTest, DoesNotWaitForAPrefetchBeforeItsUse) {
  make({2 * kBytes, kPlenty, 0});
  pass(kUses);
  acquire("a", ZR_FORWARD);
  EXPECT_EQ(out_->under_way, 2);
  release("a");
  acquire("b", ZR_FORWARD);
  EXPECT_EQ(out_->under_way, 2) << "c, and d";
  release("b");
  scheduler_->wait();
  EXPECT_EQ(out_->under_way, 0);
}

TEST_F(GatherSchedulerTest, PrefetchesUpdatedWeightsBeforeTheFirstUse) {
  make({2 * kBytes, kPlenty, 2 * kBytes});
  pass(kUses);
  EXPECT_EQ(update(), "ab");
  EXPECT_EQ(update(), "ab") << "groups gathered before the update are invalid";
  EXPECT_EQ(out_->lost, 0) << "a gather in flight must not lose its memory";
  EXPECT_EQ(pass(kUses), "c d b a - - - -");
}

TEST_F(GatherSchedulerTest, ReusesGatheredWeightsWithinMaxReuseBytes) {
  // Elements between two uses: none for d; both uses of d for c; also both of c for b; also both of b for a.
  for (const auto& [reuse, gathered] : std::map<int64_t, std::string>{{0, "a b c d - c b a"},
                                                                      {2 * kBytes - 1, "a b c d - c b a"},
                                                                      {2 * kBytes, "a b c d - - b a"},
                                                                      {4 * kBytes, "a b c d - - - a"},
                                                                      {6 * kBytes, "a b c d - - - -"}}) {
    make({0, kPlenty, reuse});
    pass(kUses);
    EXPECT_EQ(pass(kUses), gathered) << reuse << " bytes";
    EXPECT_EQ(pass(kUses), gathered);
  }
}

// Groups have equal size and use the first free range, so the used part of the buffer is the peak of held groups.
TEST_F(GatherSchedulerTest, HoldsAtMostMaxLiveBytesAndReleasesTheFarthestUse) {
  make({0, 2 * kBytes, kPlenty});
  EXPECT_EQ(pass(kUses), kUses);
  for (int i = 0; i < 2; ++i) EXPECT_EQ(pass(kUses), "a b c d - - b a");
  EXPECT_EQ(window_used(), 2 * kElements);

  make({kPlenty, 2 * kBytes, kPlenty});
  pass(kUses);
  for (int i = 0; i < 2; ++i) EXPECT_EQ(pass(kUses), "ab c d - - b a -") << "also with prefetch";
  EXPECT_EQ(window_used(), 2 * kElements);

  make({kPlenty, 0, kPlenty});
  for (int i = 0; i < 2; ++i) EXPECT_EQ(pass(kUses), kUses) << "a group is held while it is used";
  EXPECT_EQ(window_used(), kElements);

  make({0, kPlenty, kPlenty});
  for (int i = 0; i < 2; ++i) pass(kUses);
  EXPECT_EQ(window_used(), 4 * kElements) << "without the limit";
}

TEST_F(GatherSchedulerTest, ReleasesGroupsBeyondMaxLiveBytesWhenTheirOperatorEnds) {
  make({0, 2 * kBytes, kPlenty});
  const std::string uses = "abc a b c";
  EXPECT_EQ(pass(uses), uses);
  for (int i = 0; i < 2; ++i) EXPECT_EQ(pass(uses), "abc a - c") << "releases a although it is next, then c for a";
}

TEST_F(GatherSchedulerTest, FollowsAChangedOrderAndLogsTheChangeOnce) {
  make({kBytes, kPlenty, kPlenty});
  pass(kUses);
  EXPECT_EQ(pass(kUses), "ab c d - - - - -");
  EXPECT_THAT(out_->lines, IsEmpty());
  const std::string other = "a c b d d b c a";
  EXPECT_EQ(pass(other), "ab c - d d b c -") << "b was prefetched, and a was kept for its second use";
  EXPECT_EQ(pass(other), "ac b d - - - - -");
  EXPECT_EQ(pass(other), "ac b d - - - - -");
  EXPECT_THAT(out_->lines, ElementsAre("zero3: the order of execution changed at 'c.weight'; weights are gathered on "
                                       "demand until the order is recorded again"));
}

TEST_F(GatherSchedulerTest, LogsAPassThatIsShorterOrLonger) {
  make({0, kPlenty, 0});
  pass(kUses);
  pass("a b b a");
  EXPECT_THAT(out_->lines, ElementsAre(HasSubstr("changed at 'b.weight'")));
  pass("a b");
  EXPECT_THAT(out_->lines, ElementsAre(HasSubstr("'b.weight'"), HasSubstr("'b.weight'")));
  pass("a b c");
  EXPECT_THAT(out_->lines, ElementsAre(HasSubstr("'b.weight'"), HasSubstr("'b.weight'"), HasSubstr("'c.weight'")));
}

TEST_F(GatherSchedulerTest, LogsAtMostThreeChangesOfOrder) {
  make({0, kPlenty, 0});
  for (int i = 0; i < 3; ++i) {
    pass("a b");
    pass("b a");
  }
  EXPECT_THAT(out_->lines,
              ElementsAre(EndsWith("again"), EndsWith("again"), EndsWith("(further changes are not logged)")));
}

TEST_F(GatherSchedulerTest, KeepsTheOrderAcrossEvaluationsAndExports) {
  make({kBytes, kPlenty, 2 * kBytes});
  pass(kUses);
  out_->started.clear();
  for (const uint32_t phase : {ZR_EVAL, ZR_EXPORT_PHASE}) {
    acquire("c", phase);
    release("c");
  }
  EXPECT_EQ(out_->started, "c") << "no prefetch; c is kept for the next pass";
  EXPECT_EQ(pass(kUses), "ab d - b - - a -") << "c was still gathered";
  EXPECT_EQ(pass(kUses), "ab c d b - - a -");
  EXPECT_THAT(out_->lines, IsEmpty());
}

TEST_F(GatherSchedulerTest, AllocatesNoMemoryAfterTheSecondPass) {
  for (const int64_t prefetch : {int64_t{0}, kBytes, 4 * kBytes}) {
    make_tight({prefetch, kPlenty, kPlenty}, {1024, 2048, 3072, 4096});
    for (int step = 0; step < 5; ++step) {
      pass(kUses);
      update();
    }
    EXPECT_EQ(out_->allocations, 0) << "the gather buffer has the capacity that the limits allow";
  }
}

TEST_F(GatherSchedulerTest, ReusesSeparateMemoryWhenTheGatherBufferIsFull) {
  make_tight({0, kPlenty, kPlenty}, {1024, 2048, 3072, 4096});
  int early = 0;
  for (int step = 0; step < 5; ++step) {
    pass("ad d cd bcd a");
    update();
    if (step == 1) early = out_->allocations;
  }
  EXPECT_GT(early, 0);
  EXPECT_EQ(out_->allocations, early) << "after the second pass";
  EXPECT_EQ(out_->lent, 2) << "the peak of separate allocations";
  EXPECT_THAT(out_->lines, ElementsAre(HasSubstr("does not fit into the all-gather buffer")));

  make_tight({0, kPlenty, kPlenty}, {1024, 2048, 3072, 4096});
  acquire("abcd", ZR_EXPORT_PHASE);
  EXPECT_EQ(out_->lent, 3);
  release("abcd");
  EXPECT_EQ(out_->lent, 0) << "a scope may gather the full model once";
}

TEST_F(GatherSchedulerTest, GathersTheElementsThatTheOrderRequires) {
  // a + b + c + d = 10240. Forward gathers all; backward still has d, and with reuse also c, b and a.
  for (const auto& [reuse, elements] : std::map<int64_t, int64_t>{{0, 10240 + 1024 + 2048 + 3072},
                                                                  {2 * 4096, 10240 + 1024 + 2048},
                                                                  {2 * (4096 + 3072), 10240 + 1024},
                                                                  {2 * (4096 + 3072 + 2048), 10240}})
    for (const int64_t prefetch : {int64_t{0}, int64_t{4096}, kPlenty}) {
      make({4 * prefetch, kPlenty, 4 * reuse}, {1024, 2048, 3072, 4096});
      pass(kUses);
      EXPECT_EQ(std::exchange(out_->elements, 0), 2 * 10240) << "the order is not known yet";
      for (int step = 0; step < 3; ++step) {
        pass(kUses);
        EXPECT_EQ(std::exchange(out_->elements, 0), elements) << reuse << " reused, " << prefetch << " ahead";
      }
    }
}

TEST_F(GatherSchedulerTest, SizesTheGatherBufferForPrefetchAndTheLargestUse) {
  make({0, kPlenty, 0});
  const auto elements = [&](int64_t prefetch, int64_t live) {
    return zero3::all_gather_buffer_elements(*groups_, {prefetch, live, kPlenty}, 4);
  };
  EXPECT_EQ(elements(0, kPlenty), kElements);
  EXPECT_EQ(elements(kBytes, kPlenty), 2 * kElements);
  EXPECT_EQ(elements(kPlenty, 3 * kBytes), 3 * kElements);
  EXPECT_EQ(elements(kPlenty, 0), kElements);
  EXPECT_EQ(elements(kPlenty, kPlenty), 4 * kElements);
}

}  // namespace
