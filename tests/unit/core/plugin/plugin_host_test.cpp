#include "plugin/plugin_host.hpp"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <string>

#include "base/error.hpp"
#include "support/sample_keys.hpp"
#include "support/sanitizers.hpp"
#include "zr/abi/optimizer.h"

namespace zr::host {

namespace {
zr_alloc request_of(uint64_t bytes, uint64_t align, const char* tag) {
  return {sizeof(zr_alloc), 0, bytes, align, {ZR_DEVICE_CPU, 0}, tag};
}

struct PluginHostTest : ::testing::Test {
  Ledger ledger;
  ThreadPool pool{3};
  plugin::PluginHost host{ledger, pool};
  template <class Service>
  const Service* service(const char* id) {
    return static_cast<const Service*>(host.abi()->service(host.abi(), id));
  }
  zr_code allocate(uint64_t bytes, uint64_t align, const char* tag, zr_view* out, zr_error* error) {
    return allocate(request_of(bytes, align, tag), out, error);
  }
  zr_code allocate(const zr_alloc& request, zr_view* out, zr_error* error) {
    return service<zr_memory_service>("zr.host.memory/1")->alloc(host.abi(), &request, out, error);
  }
  int64_t held() {
    int64_t sum = 0;
    for (const auto& row : ledger.rows()) sum += row.now;
    return sum;
  }
};

plugin::Component load_plugin(const std::string& name) {
  return plugin::Registry({ZR_BUILD_DIR "/tests/plugins/" + name}).load(plugin::Role::optimizer, "bad", "here");
}
config::JobConfig config_of(const plugin::Component& component, const std::string& toml = "") {
  return config::Document::parse("optimizer = \"bad\"\n", "job.toml",
                                 {"optimizer.bad.rate=" + (toml.empty() ? "0.5" : toml)})
      .check(config::keys_of(component.table->keys, component.table->n_keys, "optimizer.bad"), 1);
}

TEST_F(PluginHostTest, AllocatesZeroedAlignedMemoryAndCountsIt) {
  const auto* memory = service<zr_memory_service>("zr.host.memory/1");
  for (const uint64_t bytes : {uint64_t{1}, uint64_t{4095}, uint64_t{5} << 20}) {
    for (const uint64_t align : {uint64_t{1}, uint64_t{4096}, uint64_t{4} << 20}) {
      zr_view view{};
      CallError error;
      ASSERT_EQ(allocate(bytes, align, "scratch", &view, &error), ZR_OK);
      EXPECT_EQ(view.count, static_cast<int64_t>(bytes));
      EXPECT_EQ(view.dtype, ZR_U8);
      EXPECT_EQ(reinterpret_cast<uintptr_t>(view.data) % std::max<uint64_t>(align, 64), 0u);
      const auto* byte = static_cast<const unsigned char*>(view.data);
      EXPECT_TRUE(std::all_of(byte, byte + bytes, [](unsigned char b) { return b == 0; }));
      std::memset(view.data, 1, bytes);
      EXPECT_EQ(held(), static_cast<int64_t>(bytes));
      memory->free(host.abi(), &view);
      EXPECT_EQ(held(), 0);
    }
  }
}

TEST_F(PluginHostTest, CountsMemoryUnderTheKindOfItsTag) {
  const auto* memory = service<zr_memory_service>("zr.host.memory/1");
  zr_view view{};
  CallError error;
  ASSERT_EQ(allocate(100, 64, "all_gather: double buffer", &view, &error), ZR_OK);
  memory->account(host.abi(), "arena", 1000);
  const auto rows = ledger.rows();
  ASSERT_EQ(rows.size(), 2u);
  EXPECT_EQ(rows[0].kind, MemoryKind::all_gather);
  EXPECT_EQ(rows[0].now, 100);
  EXPECT_EQ(rows[1].kind, MemoryKind::communicator);
  EXPECT_EQ(rows[1].now, 1000);
  memory->free(host.abi(), &view);
}

TEST_F(PluginHostTest, HasAnErrorIfCountedMemoryExceedsABudget) {
  const auto* memory = service<zr_memory_service>("zr.host.memory/1");
  ledger.on_change(Tier::host, [](int64_t held) {
    if (held > 2048) throw UserError("the budget is 2.00 KiB");
  });
  memory->account(host.abi(), "arena", 2048);
  EXPECT_EQ(host.take_excess(), nullptr);
  memory->account(host.abi(), "other: products", 1024);
  try {
    std::rethrow_exception(host.take_excess());
  } catch (const UserError& error) {
    EXPECT_STREQ(error.what(),
                 "the budget is 2.00 KiB; 1.00 KiB of it are 'other: products', which a plug-in allocates while it "
                 "works: the plan does not include them");
  }
  EXPECT_EQ(host.take_excess(), nullptr) << "reported once";
  ledger.on_change(Tier::host, {});
}

TEST_F(PluginHostTest, RejectsMemoryThatCannotBeAllocated) {
  zr_view view{};
  CallError error;
  EXPECT_EQ(allocate(uint64_t{1} << 60, 64, "the world", &view, &error), ZR_NOMEM);
  EXPECT_STREQ(error.msg, "cannot allocate 1152921504606846976 bytes for 'the world'");
  EXPECT_EQ(allocate(10, 48, "odd", &view, &error), ZR_INVALID);
  EXPECT_STREQ(error.msg, "alignment 48 is not a power of two");
  EXPECT_EQ(allocate(uint64_t{8} << 20, uint64_t{1} << 63, "scratch", &view, &error), ZR_NOMEM);
  EXPECT_STREQ(error.msg, "cannot allocate memory for 'scratch' at a multiple of 9223372036854775808");
  EXPECT_EQ(view.data, nullptr);
}

// The engine copies the tag: an allocation of its own, which fails before that of the plug-in.
TEST_F(PluginHostTest, ReturnsAnErrorIfItsOwnMemoryCannotBeAllocated) {
  if (test::kSanitized) GTEST_SKIP() << test::kSanitizerMemory;
  const std::string tag(std::size_t{64} << 20, 't');
  const auto allocate_without_memory = [&] {
    const rlimit limit{std::size_t{1} << 20, RLIM_INFINITY};  // what is mapped already remains
    ::setrlimit(RLIMIT_AS, &limit);
    zr_view view{};
    CallError error;
    const zr_code code = allocate(10, 64, tag.c_str(), &view, &error);
    std::cerr << "code " << code << ": " << error.msg;
    std::_Exit(view.data ? 1 : 0);
  };
  EXPECT_EXIT(allocate_without_memory(), ::testing::ExitedWithCode(0),
              "code " + std::to_string(ZR_NOMEM) + ": cannot allocate memory: the process is out of memory");
}

TEST_F(PluginHostTest, RejectsARequestForMemoryThatItDoesNotKnow) {
  zr_view view{};
  CallError error;
  zr_alloc request = request_of(10, 64, "weights");
  request.device.type = ZR_DEVICE_CUDA;
  EXPECT_EQ(allocate(request, &view, &error), ZR_UNSUPPORTED);
  EXPECT_STREQ(error.msg, "'weights': the engine has no memory on devices of type 2");
  request = request_of(10, 64, "weights");
  request.flags = 2;
  EXPECT_EQ(allocate(request, &view, &error), ZR_UNSUPPORTED);
  EXPECT_STREQ(
      error.msg,
      "'weights': flags has bits that this zeroth does not know (0x2); install a newer zeroth, or a plug-in for "
      "this one");
  request = request_of(10, 64, "weights");
  request.size = offsetof(zr_alloc, tag);
  EXPECT_EQ(allocate(request, &view, &error), ZR_INVALID);
  EXPECT_STREQ(error.msg, "the zr_alloc has 32 bytes, fewer than in ABI 0.9");
  EXPECT_EQ(view.data, nullptr);
}

// A plug-in that is built with newer headers passes a longer request.
TEST_F(PluginHostTest, IgnoresMembersOfARequestThatItDoesNotKnow) {
  const struct {
    zr_alloc known;
    uint64_t unknown;
  } request{{sizeof request, 0, 10, 64, {ZR_DEVICE_CPU, 0}, "weights"}, 7};
  zr_view view{};
  CallError error;
  ASSERT_EQ(allocate(request.known, &view, &error), ZR_OK);
  EXPECT_EQ(view.count, 10);
  service<zr_memory_service>("zr.host.memory/1")->free(host.abi(), &view);
}

TEST_F(PluginHostTest, AllocatesNothingForZeroBytes) {
  const auto* memory = service<zr_memory_service>("zr.host.memory/1");
  zr_view view{&view, 7, 0, 0, {0, 0}};
  CallError error;
  ASSERT_EQ(allocate(0, 64, "empty", &view, &error), ZR_OK);
  EXPECT_EQ(view.data, nullptr);
  EXPECT_EQ(view.count, 0);
  memory->free(host.abi(), &view);
}

TEST_F(PluginHostTest, RunsTasksOnItsPool) {
  const auto* tasks = service<zr_task_service>("zr.host.tasks/1");
  EXPECT_EQ(tasks->width(host.abi()), 3u);
  std::atomic<int64_t> sum{0};
  tasks->parallel_for(
      host.abi(), 1000, 10,
      [](void* ctx, int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) *static_cast<std::atomic<int64_t>*>(ctx) += i;
      },
      &sum);
  EXPECT_EQ(sum, 999 * 1000 / 2);
}

TEST_F(PluginHostTest, ReturnsTypedValuesOfATable) {
  const auto* values = service<zr_config_service>("zr.host.config/1");
  const config::JobConfig config = sample::check("", {"strategy.flat.bucket_bytes=1MiB", "optimizer.adam.fused=false"});
  const plugin::ConfigView optimizer(config.table("optimizer.adam")), strategy(config.table("strategy.flat")),
      model(config.table("model"));
  int64_t whole = 0;
  EXPECT_EQ(values->get_int(strategy.abi(), "bucket_bytes", &whole), ZR_OK);
  EXPECT_EQ(whole, 1 << 20);
  double real = 0;
  EXPECT_EQ(values->get_float(optimizer.abi(), "weight_decay", &real), ZR_OK);
  EXPECT_EQ(real, 0.01);
  int32_t flag = 1;
  EXPECT_EQ(values->get_bool(optimizer.abi(), "fused", &flag), ZR_OK);
  EXPECT_EQ(flag, 0);
  const char* text = nullptr;
  EXPECT_EQ(values->get_string(model.abi(), "kind", &text), ZR_OK);
  EXPECT_STREQ(text, "gpt");
  const double* list = nullptr;
  uint32_t n = 0;
  EXPECT_EQ(values->get_floats(optimizer.abi(), "betas", &list, &n), ZR_OK);
  ASSERT_EQ(n, 2u);
  EXPECT_EQ(list[1], 0.999);
  EXPECT_EQ(values->get_int(optimizer.abi(), "betas", &whole), ZR_INVALID);
  EXPECT_EQ(values->get_int(optimizer.abi(), "nothing", &whole), ZR_INVALID);
}

TEST_F(PluginHostTest, OffersAddedServicesAndRecordsMissingOnes) {
  const int table = 3;
  EXPECT_EQ(service<int>("zr.host.mine/1"), nullptr);
  host.offer("zr.host.mine/1", &table);
  EXPECT_EQ(service<int>("zr.host.mine/1"), &table);
  EXPECT_EQ(host.take_missing_services(), std::vector<std::string>{"zr.host.mine/1"});
  EXPECT_TRUE(host.take_missing_services().empty());
  int mine = 0;
  EXPECT_EQ(host.context<int>(), nullptr);
  host.set_context(&mine);
  EXPECT_EQ(host.context<int>(), &mine);
  EXPECT_EQ(&plugin::PluginHost::from_abi(host.abi()), &host);
}

TEST(PluginHostLifetimeTest, KeepsServicesUsableAfterItsDestruction) {
  const zr_host* kept = nullptr;
  const zr_memory_service* memory = nullptr;
  {
    Ledger ledger;
    ThreadPool pool(1);
    const plugin::PluginHost host(ledger, pool);
    kept = host.abi();
    memory = static_cast<const zr_memory_service*>(kept->service(kept, "zr.host.memory/1"));
  }
  EXPECT_EQ(kept->service(kept, "zr.host.memory/1"), nullptr);
  zr_view view{};
  CallError error;
  const zr_alloc request = request_of(10, 64, "late");
  EXPECT_EQ(memory->alloc(kept, &request, &view, &error), ZR_STATE);
}

TEST(PluginHostLifetimeTest, FreesLeakedPluginMemoryWithAWarning) {
  Ledger ledger;
  ThreadPool pool(1);
  ::testing::internal::CaptureStderr();
  {
    plugin::PluginHost host(ledger, pool);
    const plugin::Component leak = load_plugin("leak");
    const plugin::Instance instance(host, leak, config_of(leak), "optimizer.bad");
    EXPECT_EQ(ledger.peak(Tier::device), 3 << 20) << "a tag \"all_gather\" counts as device memory";
  }
  EXPECT_EQ(::testing::internal::GetCapturedStderr(),
            "zeroth: warning: plug-ins did not free 3.00 MiB of host memory; the engine frees it now\n");
  EXPECT_TRUE(ledger.holders().empty());
}

TEST_F(PluginHostTest, CreatesAComponentWithItsValuesAndCountsItsModule) {
  const plugin::Component good = load_plugin("good");
  {
    const plugin::Instance one(host, good, config_of(good, "0.25"), "optimizer.bad");
    EXPECT_EQ(*static_cast<double*>(one.self()), 0.25);
    EXPECT_EQ(one.call_text("step"), "optimizer 'bad' (" ZR_BUILD_DIR "/tests/plugins/good/zr_optimizer_bad.so): step");
    const plugin::Instance two(host, good, config_of(good, "0.75"), "optimizer.bad");  // startup() is not called again
    EXPECT_EQ(*static_cast<double*>(two.self()), 0.75);
    EXPECT_NE(one.api<zr_optimizer_api>(), nullptr);
  }
  const plugin::Instance again(host, good, config_of(good), "optimizer.bad");  // shut down, started again
  EXPECT_EQ(*static_cast<double*>(again.self()), 0.5);
}

}  // namespace
}  // namespace zr::host
