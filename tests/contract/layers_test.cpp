// Tests the C++ layer of sdk/: the tests call plain C++ classes through the C function tables, as the host does.
#include <gtest/gtest.h>

#include <cstring>

#include "contract/optimizer_under_test.hpp"
#include "zr/communicator.hpp"
#include "zr/optimizer.hpp"
#include "zr/strategy.hpp"

namespace zr::testing {
namespace {

// ---- a strategy whose behavior each test selects ----

struct Sample : Strategy<Sample> {
  static constexpr zr_key keys[] = {key_bytes("bucket", "\"1MiB\"", 0, kNoBound, "size of a bucket"),
                                    key_bool("fail", "false", "throw")};
  explicit Sample(const Config& config) : bucket(config.integer("bucket")) {
    if (config.boolean("fail")) throw PluginError(ZR_IO, "fail = true", 42);
  }
  void plan(const zr_plan_in& in, PlanBuilder& plan) const {
    EXPECT_EQ(plan.buffer(ZR_ROLE_WEIGHT, "weights", 10, in.weight_dtype), 0u);
    const uint32_t sums = plan.buffer(ZR_ROLE_REDUCED_GRAD, "sums", bucket, ZR_F32);
    plan.piece(ZR_ROLE_REDUCED_GRAD, 3, sums, 16, 4, 8);
  }
  void bind(const zr_plan_in&, const Binding& bound) {
    buffer = bound.buffers[0];
    comm.emplace_back(bound.comm);
  }
  zr_view grad_destination(uint32_t param, int64_t first, const zr_use&) {
    return part(buffer, first, param == 7 ? 0 : 2);
  }
  void grad_ready(uint32_t, int64_t, int64_t, const zr_use& use) {
    micro = use.micro;
    pending = comm[0].start(reduce_scatter(buffer, buffer, "bucket 0", ZR_COLL_ACCUMULATE));
  }
  void event(uint32_t kind, const zr_use&) {
    if (kind == ZR_STEP_END) throw std::runtime_error("a plain exception");
    if (kind == ZR_EVAL_END) throw 7;
    if (kind == ZR_EVAL_BEGIN) throw std::bad_alloc();
  }
  void grads_finish(const zr_use&) { pending.wait(); }
  void updated(const zr_use&) { comm[0].run(broadcast(buffer, 1, "weights")); }
  int64_t bucket;
  inline static uint32_t micro = 0;  // of the last gradient
  zr_view buffer{};
  std::vector<Comm> comm;
  Done pending;
};
constexpr zr_component kSample = component<Sample>("sample", "1.0");

const zr_strategy_api& api() { return *static_cast<const zr_strategy_api*>(kSample.api); }

/// A host communicator that records its collectives.
struct Noted {
  std::vector<zr_coll> colls;
  std::vector<zr_done*> dones;
  zr_code answer = ZR_OK;
};
zr_code note(void* comm, const zr_coll* coll, zr_stream*, zr_done* done, zr_error* error) {
  Noted& noted = *static_cast<Noted*>(comm);
  if (noted.answer != ZR_OK) {
    error->code = noted.answer;
    std::strcpy(error->msg, "rank 1 is gone");
    return noted.answer;
  }
  noted.colls.push_back(*coll);
  noted.dones.push_back(done);
  return ZR_OK;
}
constexpr zr_collectives_api kNoted{sizeof(zr_collectives_api), 0, note, nullptr};

class StrategyLayerTest : public ::testing::Test {
 protected:
  void create(const Values& values = {{"bucket", 64}, {"fail", 0}}) {
    const zr_config_s config{values, {}};
    code_ = kSample.create(&host_, &config, &self_, &error_);
  }
  void bind() {
    create();
    zr_bind bound{sizeof bound, 1, &buffer_, {&kNoted, &noted_, 0, 2}};
    const zr_plan_in in = plan_in();
    ASSERT_EQ(api().bind(self_, &in, &bound, &error_), ZR_OK);
  }
  ~StrategyLayerTest() override { kSample.destroy(self_); }
  static zr_plan_in plan_in() {
    zr_plan_in in{};
    in.size = sizeof in;
    return in;
  }
  zr_host host_ = make_host();
  zr_error error_ = OptimizerUnderTest::no_error();
  void* self_ = nullptr;
  zr_code code_ = ZR_OK;
  float memory_[8] = {};
  zr_view buffer_ = view_of(memory_, 8);
  Noted noted_;
  zr_use use_{sizeof use_, ZR_BACKWARD, 0, 0, nullptr, nullptr};
};

TEST_F(StrategyLayerTest, DescribesKindKeysAndImplementedFunctions) {
  EXPECT_STREQ(kSample.kind, "zr.strategy/1");
  ASSERT_EQ(kSample.n_keys, 2u);
  EXPECT_STREQ(kSample.keys[1]->name, "fail");
  EXPECT_EQ(api().size, sizeof(zr_strategy_api));
  EXPECT_EQ(api().acquire, nullptr);
  EXPECT_EQ(api().release, nullptr);
  EXPECT_NE(api().describe, nullptr);
}

TEST_F(StrategyLayerTest, DescribesThatItNeedsHostMemoryWithoutStreams) {
  create();
  zr_strategy_desc desc{};
  desc.size = sizeof desc;
  ASSERT_EQ(api().describe(self_, &desc, &error_), ZR_OK);
  EXPECT_EQ(desc.size, sizeof desc);
  EXPECT_EQ(desc.flags, 0u);
  EXPECT_EQ(desc.device_types, kCpuOnly);
}

// A host with newer headers passes longer structs.
TEST_F(StrategyLayerTest, IgnoresMembersThatItDoesNotKnow) {
  bind();
  struct {
    zr_use known;
    uint64_t unknown;
  } use{{sizeof use, ZR_BACKWARD, 3, 0, nullptr, nullptr}, 7};
  ASSERT_EQ(api().grad_ready(self_, 0, 0, 8, &use.known, &error_), ZR_OK);
  EXPECT_EQ(Sample::micro, 3u);
}

TEST_F(StrategyLayerTest, ResolvesTheCompletionOfACallThatIsComplete) {
  bind();
  zr_done_s done;
  use_.done = &done;
  ASSERT_EQ(api().updated(self_, &use_, &error_), ZR_OK);
  EXPECT_EQ(done.resolved, 1);
  EXPECT_EQ(done.code, ZR_OK);
  EXPECT_EQ(done.references, 1);
}

TEST_F(StrategyLayerTest, DoesNotResolveTheCompletionOfACallThatFails) {
  bind();
  zr_done_s done;
  use_.done = &done;
  noted_.answer = ZR_COMM;
  EXPECT_EQ(api().updated(self_, &use_, &error_), ZR_COMM);
  EXPECT_EQ(done.resolved, 0);
  EXPECT_EQ(done.references, 1);
}

TEST_F(StrategyLayerTest, TurnsAConstructorErrorIntoCodeTextAndNumber) {
  self_ = nullptr;
  create({{"bucket", 1}, {"fail", 1}});
  EXPECT_EQ(code_, ZR_IO);
  EXPECT_EQ(error_.code, ZR_IO);
  EXPECT_EQ(error_.native, 42);
  EXPECT_STREQ(error_.msg, "fail = true");
  EXPECT_EQ(self_, nullptr);
}

TEST_F(StrategyLayerTest, EmitsBuffersAndPiecesInOrder) {
  create();
  struct Got {
    std::vector<zr_buffer> buffers;
    std::vector<zr_piece> pieces;
  } got;
  const zr_plan_sink sink{sizeof sink, 0, &got,
                          [](void* ctx, const zr_buffer* b) { static_cast<Got*>(ctx)->buffers.push_back(*b); },
                          [](void* ctx, const zr_piece* p) { static_cast<Got*>(ctx)->pieces.push_back(*p); }};
  zr_plan_in in = plan_in();
  in.weight_dtype = ZR_BF16;
  ASSERT_EQ(api().plan(self_, &in, &sink, &error_), ZR_OK);
  ASSERT_EQ(got.buffers.size(), 2u);
  EXPECT_EQ(got.buffers[0].dtype, ZR_BF16);
  EXPECT_EQ(got.buffers[1].elements, 64);
  EXPECT_EQ(got.buffers[1].size, sizeof(zr_buffer));
  ASSERT_EQ(got.pieces.size(), 1u);
  EXPECT_EQ(got.pieces[0].buffer, 1u);
  EXPECT_EQ(got.pieces[0].param, 3u);
  EXPECT_EQ(got.pieces[0].first, 16);
  EXPECT_EQ(got.pieces[0].count, 4);
  EXPECT_EQ(got.pieces[0].offset, 8);
}

TEST_F(StrategyLayerTest, ReturnsAgainWithoutChangingTheViewWhenTheBucketIsFull) {
  bind();
  zr_view place = view_of(&error_, 99);
  int64_t first = 0;
  EXPECT_EQ(api().grad_destination(self_, 7, &first, &use_, &place, &error_), ZR_AGAIN);
  EXPECT_EQ(place.count, 99);
  first = 3;
  EXPECT_EQ(api().grad_destination(self_, 1, &first, &use_, &place, &error_), ZR_OK);
  EXPECT_EQ(place.data, memory_ + 3);
  EXPECT_EQ(place.count, 2);
}

TEST_F(StrategyLayerTest, CatchesEveryException) {
  bind();
  EXPECT_EQ(api().event(self_, ZR_STEP_BEGIN, &use_, &error_), ZR_OK);
  EXPECT_EQ(api().event(self_, ZR_STEP_END, &use_, &error_), ZR_INTERNAL);
  EXPECT_STREQ(error_.msg, "a plain exception");
  EXPECT_EQ(api().event(self_, ZR_EVAL_BEGIN, &use_, &error_), ZR_NOMEM);
  EXPECT_STREQ(error_.msg, "out of memory");
  EXPECT_EQ(api().event(self_, ZR_EVAL_END, &use_, &error_), ZR_INTERNAL);
  EXPECT_STREQ(error_.msg, "an exception of unknown type (not a std::exception)");
}

TEST_F(StrategyLayerTest, StartsCollectivesWithACompletionAndWaitsForIt) {
  bind();
  ASSERT_EQ(api().grad_ready(self_, 0, 0, 8, &use_, &error_), ZR_OK);
  ASSERT_EQ(noted_.colls.size(), 1u);
  EXPECT_EQ(noted_.colls[0].op, static_cast<uint32_t>(ZR_REDUCE_SCATTER));
  EXPECT_EQ(noted_.colls[0].reduce, static_cast<uint32_t>(ZR_SUM));
  EXPECT_EQ(noted_.colls[0].flags, static_cast<uint32_t>(ZR_COLL_ACCUMULATE));
  EXPECT_EQ(noted_.colls[0].size, sizeof(zr_coll));
  ASSERT_NE(noted_.dones[0], nullptr);
  EXPECT_EQ(noted_.dones[0]->references, 1);
  noted_.dones[0]->code = ZR_COMM;
  EXPECT_EQ(api().grads_finish(self_, &use_, &error_), ZR_COMM);
  noted_.dones[0]->code = ZR_OK;
  EXPECT_EQ(api().grads_finish(self_, &use_, &error_), ZR_OK);
}

TEST_F(StrategyLayerTest, RunsBlockingCollectivesAndPropagatesTheirFailure) {
  bind();
  ASSERT_EQ(api().updated(self_, &use_, &error_), ZR_OK);
  EXPECT_EQ(noted_.colls[0].op, static_cast<uint32_t>(ZR_BROADCAST));
  EXPECT_EQ(noted_.colls[0].root, 1);
  EXPECT_EQ(noted_.dones[0], nullptr);
  noted_.answer = ZR_COMM;
  EXPECT_EQ(api().updated(self_, &use_, &error_), ZR_COMM);
  EXPECT_STREQ(error_.msg, "rank 1 is gone");
}

TEST(CollectiveTest, SetsRootPeerAndTag) {
  float memory[8] = {};
  const zr_view part = view_of(memory, 2), all = view_of(memory, 8);
  const zr_coll gathered = gather(part, all, 3, "g"), scattered = scatter(all, part, 2, "s"),
                sent = send(part, 1, 7, "m"), received = recv(part, 4, 8, "m");
  EXPECT_EQ(gathered.op, static_cast<uint32_t>(ZR_GATHER));
  EXPECT_EQ(gathered.root, 3);
  EXPECT_EQ(scattered.op, static_cast<uint32_t>(ZR_SCATTER));
  EXPECT_EQ(scattered.root, 2);
  EXPECT_EQ(sent.op, static_cast<uint32_t>(ZR_SEND));
  EXPECT_EQ(sent.src.count, 2);
  EXPECT_EQ(sent.peer, 1);
  EXPECT_EQ(sent.tag, 7);
  EXPECT_EQ(received.op, static_cast<uint32_t>(ZR_RECV));
  EXPECT_EQ(received.dst.count, 2);
  EXPECT_EQ(received.peer, 4);
}

// ---- communicators ----

zr_comm_caps some_caps() {
  zr_comm_caps caps{};
  caps.flags = ZR_COMM_UPCAST;
  caps.ops = 6;
  caps.device_types = kCpuOnly;
  return caps;
}
struct Plain {  // implements neither progress() nor memory allocation
  void submit(const zr_coll& coll, zr_stream*, zr_done*) {
    if (aborted) throw PluginError(ZR_CANCELLED, std::string(coll.label) + " was aborted");
  }
  void abort() noexcept { aborted = true; }
  bool aborted = false;
};
struct PlainKind : Communicator<PlainKind, Plain> {
  zr_comm_caps caps() const { return some_caps(); }
  std::unique_ptr<Plain> open(const zr_comm_open& how) {
    if (how.world > 2) throw PluginError(ZR_UNSUPPORTED, "two ranks at most");
    return std::make_unique<Plain>();
  }
};
struct Own : Plain {  // implements both, and keeps completions
  explicit Own(const Host& host) : host(host) {}
  void submit(const zr_coll&, zr_stream*, zr_done* done) { kept.push_back(Done::retained(host, done)); }
  void progress() {
    for (Done& done : kept) done.resolve();
    kept.clear();
  }
  zr_view mem_alloc(uint64_t bytes, uint64_t align, uint32_t) {
    return view_of(std::aligned_alloc(align, bytes), static_cast<int64_t>(bytes), ZR_U8);
  }
  void mem_free(const zr_view& memory) noexcept { std::free(memory.data); }
  Host host;
  std::vector<Done> kept;
};
struct OwnKind : Communicator<OwnKind, Own> {
  explicit OwnKind(const Host& host) : host(host) {}
  zr_comm_caps caps() const { return some_caps(); }
  std::unique_ptr<Own> open(const zr_comm_open&) { return std::make_unique<Own>(host); }
  Host host;
};

struct Opened {
  explicit Opened(const zr_component& component, int32_t world = 2)
      : component(component), api(*static_cast<const zr_communicator_api*>(component.api)) {
    const zr_config_s config;
    EXPECT_EQ(component.create(&host, &config, &self, &error), ZR_OK);
    const zr_comm_open how{sizeof how, 0, world, 0, {ZR_DEVICE_CPU, 0}, "data", "comm.1."};
    code = api.open(self, &how, &comm, &error);
  }
  ~Opened() {
    if (comm) api.close(comm);
    component.destroy(self);
  }
  zr_host host = make_host();
  zr_error error = OptimizerUnderTest::no_error();
  const zr_component component;
  const zr_communicator_api& api;
  void *self = nullptr, *comm = nullptr;
  zr_code code = ZR_OK;
};

TEST(CommunicatorLayerTest, SetsUnimplementedFunctionsToNull) {
  const Opened plain(component<PlainKind>("plain", "1.0")), own(component<OwnKind>("own", "1.0"));
  EXPECT_STREQ(plain.component.kind, "zr.communicator/1");
  EXPECT_EQ(plain.component.n_keys, 0u);
  EXPECT_EQ(plain.api.progress, nullptr);
  EXPECT_EQ(plain.api.mem_alloc, nullptr);
  EXPECT_EQ(plain.api.mem_free, nullptr);
  EXPECT_NE(own.api.progress, nullptr);
  EXPECT_NE(own.api.mem_alloc, nullptr);
}

TEST(CommunicatorLayerTest, WritesCapabilitiesWithinTheSizeGiven) {
  Opened plain(component<PlainKind>("plain", "1.0"));
  zr_comm_caps caps{};
  caps.size = sizeof caps;
  EXPECT_EQ(plain.api.caps(plain.self, &caps, &plain.error), ZR_OK);
  EXPECT_EQ(caps.flags, static_cast<uint32_t>(ZR_COMM_UPCAST));
  EXPECT_EQ(caps.ops, 6u);
  EXPECT_EQ(caps.device_types, kCpuOnly);
  caps = {};
  caps.size = offsetof(zr_comm_caps, ops);
  EXPECT_EQ(plain.api.caps(plain.self, &caps, &plain.error), ZR_OK);
  EXPECT_EQ(caps.size, offsetof(zr_comm_caps, ops));
  EXPECT_EQ(caps.ops, 0u);
}

TEST(CommunicatorLayerTest, ReportsAFailedOpenAndAnAbort) {
  const Opened rejected(component<PlainKind>("plain", "1.0"), 3);
  EXPECT_EQ(rejected.code, ZR_UNSUPPORTED);
  EXPECT_STREQ(rejected.error.msg, "two ranks at most");
  EXPECT_EQ(rejected.comm, nullptr);
  Opened plain(component<PlainKind>("plain", "1.0"));
  const zr_coll coll = barrier("the end");
  EXPECT_EQ(plain.api.submit(plain.comm, &coll, nullptr, nullptr, &plain.error), ZR_OK);
  plain.api.abort(plain.comm);
  EXPECT_EQ(plain.api.submit(plain.comm, &coll, nullptr, nullptr, &plain.error), ZR_CANCELLED);
  EXPECT_STREQ(plain.error.msg, "the end was aborted");
}

TEST(CommunicatorLayerTest, KeepsAReferenceToAPendingCompletion) {
  Opened own(component<OwnKind>("own", "1.0"));
  zr_done_s done;
  const zr_coll coll = barrier("b");
  ASSERT_EQ(own.api.submit(own.comm, &coll, nullptr, &done, &own.error), ZR_OK);
  EXPECT_EQ(done.references, 2);
  EXPECT_EQ(done.resolved, 0);
  ASSERT_EQ(own.api.progress(own.comm, &own.error), ZR_OK);
  EXPECT_EQ(done.references, 1);
  EXPECT_EQ(done.resolved, 1);
  EXPECT_EQ(done.code, ZR_OK);
}

TEST(CommunicatorLayerTest, AllocatesAndFreesMemory) {
  Opened own(component<OwnKind>("own", "1.0"));
  zr_view memory{};
  ASSERT_EQ(own.api.mem_alloc(own.comm, 4096, 256, 0, &memory, &own.error), ZR_OK);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(memory.data) % 256, 0u);
  EXPECT_EQ(memory.count, 4096);
  EXPECT_EQ(memory.dtype, ZR_U8);
  EXPECT_EQ(memory.device.type, ZR_DEVICE_CPU);
  own.api.mem_free(own.comm, &memory);
}

// ---- a simple optimizer; the layer rounds its weights ----

struct Descent : Optimizer<Descent> {
  static constexpr zr_slot slots[] = {slot("sum")};
  void update(const Update& u) const {
    float* sum = u.slot(0);
    for (int64_t i = 0; i < u.count; ++i) {
      sum[i] += static_cast<float>(u.first + i);
      u.weight[i] -= static_cast<float>(u.lr) * (u.mul * u.grad[i]);
    }
  }
};

TEST(OptimizerLayerTest, RoundsTheMasterWhenTheAuthorDoesNot) {
  const zr_component component = zr::component<Descent>("descent", "1.0");
  const auto& api = *static_cast<const zr_optimizer_api*>(component.api);
  const zr_host host = make_host();
  const zr_config_s config;
  zr_error error = OptimizerUnderTest::no_error();
  void* self = nullptr;
  ASSERT_EQ(component.create(&host, &config, &self, &error), ZR_OK);
  constexpr int64_t kCount = 40000;  // more than one block
  std::vector<float> master(kCount, 1.0f), grad(kCount), sum(kCount);
  std::vector<uint16_t> weight(kCount);
  for (int64_t i = 0; i < kCount; ++i) grad[i] = static_cast<float>(i % 1000);
  const zr_view slot = view_of(sum.data(), kCount);
  zr_update_slice slice{};
  slice.size = sizeof slice;
  slice.name = "w";
  slice.shape = &kCount;
  slice.ndim = 1;
  slice.first = 5;
  slice.count = kCount;
  slice.lr = 0.01;
  slice.weight = view_of(weight.data(), kCount, ZR_BF16);
  slice.master = view_of(master.data(), kCount);
  slice.grad = view_of(grad.data(), kCount);
  slice.slots = &slot;
  const zr_update_slice* slices[] = {&slice};
  zr_step step{};
  step.size = sizeof step;
  step.grad_mul = 0.5f;
  ASSERT_EQ(api.step(self, &step, slices, 1, nullptr, nullptr, &error), ZR_OK) << error.msg;
  for (int64_t i = 0; i < kCount; ++i) {
    ASSERT_EQ(master[i], 1.0f - 0.01f * (0.5f * grad[i])) << i;
    ASSERT_EQ(weight[i], to_bf16(master[i])) << i;
    ASSERT_EQ(sum[i], static_cast<float>(5 + i)) << "the index of an element must not depend on the blocks";
  }
  int stream = 0;
  EXPECT_EQ(api.step(self, &step, slices, 1, reinterpret_cast<zr_stream*>(&stream), nullptr, &error), ZR_UNSUPPORTED);
  EXPECT_STREQ(error.msg, "this optimizer updates host memory only, without a stream");
  component.destroy(self);
}

TEST(TasksTest, RunTheFunctionAndRethrowItsException) {
  static const zr_task_service service{
      sizeof service, 0, [](const zr_host*) { return 3u; },
      [](const zr_host*, int64_t n, int64_t, void (*fn)(void*, int64_t, int64_t), void* ctx) {
        fn(ctx, 0, n / 2);
        fn(ctx, n / 2, n);
      }};
  zr_host host = make_host();
  host.service = [](const zr_host*, const char* id) -> const void* {
    return std::string(id) == "zr.host.tasks/1" ? &service : nullptr;
  };
  const Tasks tasks{Host(&host)};
  EXPECT_EQ(tasks.width(), 3u);
  int64_t sum = 0;
  tasks.parallel_for(10, 1, [&](int64_t begin, int64_t end) { sum += end - begin; });
  EXPECT_EQ(sum, 10);
  EXPECT_THROW(tasks.parallel_for(10, 1,
                                  [](int64_t begin, int64_t) {
                                    if (begin > 0) throw PluginError(ZR_IO, "half way");
                                  }),
               PluginError);
}

}  // namespace
}  // namespace zr::testing
