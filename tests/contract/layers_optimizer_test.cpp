// The optional members of an optimizer's class: needs, local gradients, globals, extensions, startup and shutdown.
#include <gtest/gtest.h>

#include <map>
#include <mutex>

#include "contract/optimizer_under_test.hpp"
#include "zr/local_gradients.hpp"
#include "zr/optimizer_globals.hpp"

namespace zr::testing {
namespace {

constexpr int kOwnTable = 7;

struct Full : Optimizer<Full> {
  static constexpr uint32_t needs = ZR_OPT_NEEDS_LOCAL_GRADS;
  void update(const Update&) const {}
  uint32_t gradients(int64_t step, const zr_param_updates* updates) {
    if (step < 0) throw PluginError(ZR_INVALID, "no such step");
    return step > (updates ? updates->all[0] : 3) ? ZR_GRADS_LOCAL : ZR_GRADS_REDUCED;
  }
  int32_t summed_state(int64_t step) const { return step == 4 ? 1 : -1; }
  void state_sum(int64_t step, double sum) {
    if (step != 4) throw PluginError(ZR_INVALID, "no sum");
    state = sum;
  }
  void plan_exchange(zr_exchange_plan& sizes) const { sizes.scratch = static_cast<uint64_t>(sizes.counts[0]); }
  void exchange(const Exchange<Full>& given) {
    for (uint32_t i = 0; i < given.size(); ++i) *data<float>(given[i].grad) *= given.job.grad_mul;
    if (&given.group(0) != this) throw PluginError(ZR_INTERNAL, "another object");
  }
  void bind(const Comm& comm) {
    if (comm.world() < 2) throw PluginError(ZR_INVALID, "one rank has no peers");
    rank = comm.rank();
  }
  void save_globals(const GlobalSink& save) const {
    save("steps", steps);
    save("name", "full", 4);
  }
  void load_global(const char* key, const void* value, uint64_t bytes) {
    if (std::string(key) != "steps" || bytes != sizeof steps)
      throw PluginError(ZR_INVALID, std::string("unknown ") + key);
    std::memcpy(&steps, value, sizeof steps);
  }
  static const void* extension(const char* id) noexcept {
    return std::strcmp(id, "acme.own/1") == 0 ? &kOwnTable : nullptr;
  }
  static void startup() {
    if (++started > 1) throw PluginError(ZR_STATE, "started twice");
  }
  static void shutdown() noexcept { started = 0; }

  std::mutex mutex;  // objects are not moved
  int64_t steps = 5;
  double state = 0;
  int32_t rank = -1;
  inline static int started = 0;
};
constexpr zr_component kFull = only_component<Full>("full", "1.0");

class OptimizerSlotsTest : public ::testing::Test {
 protected:
  OptimizerSlotsTest() { EXPECT_EQ(kFull.create(&host_, &config_, &self_, &error_), ZR_OK); }
  ~OptimizerSlotsTest() override { kFull.destroy(self_); }
  const zr_host host_ = make_host();
  const zr_config_s config_;
  zr_error error_ = OptimizerUnderTest::no_error();
  void* self_ = nullptr;
};

TEST_F(OptimizerSlotsTest, DescribesItsNeeds) {
  const auto& api = *static_cast<const zr_optimizer_api*>(kFull.api);
  zr_optimizer_desc desc{};
  desc.size = sizeof desc;
  const zr_param param{};
  ASSERT_EQ(api.describe(self_, &param, &desc, &error_), ZR_OK);
  EXPECT_EQ(desc.needs, static_cast<uint32_t>(ZR_OPT_NEEDS_LOCAL_GRADS));
}

TEST_F(OptimizerSlotsTest, HasTheExtensionsOfItsLayerAndItsOwn) {
  EXPECT_EQ(kFull.extension("acme.own/1"), &kOwnTable);
  EXPECT_EQ(kFull.extension("acme.other/1"), nullptr);
  EXPECT_NE(kFull.extension("zr.optimizer.globals/1"), nullptr);
}

TEST_F(OptimizerSlotsTest, ReportsWhichGradientsAStepNeeds) {
  const auto* table = static_cast<const zr_local_gradients_api*>(kFull.extension("zr.optimizer.local_gradients/1"));
  ASSERT_NE(table, nullptr);
  EXPECT_EQ(table->size, sizeof *table);
  uint32_t grads = 9;
  EXPECT_EQ(table->gradients(self_, 4, nullptr, &grads, &error_), ZR_OK);
  EXPECT_EQ(grads, static_cast<uint32_t>(ZR_GRADS_LOCAL));
  const int64_t all = 4, local = 0;
  const zr_param_updates updates{sizeof updates, 1, &all, &local};
  EXPECT_EQ(table->gradients(self_, 4, &updates, &grads, &error_), ZR_OK);
  EXPECT_EQ(grads, static_cast<uint32_t>(ZR_GRADS_REDUCED));
  EXPECT_EQ(table->gradients(self_, -1, nullptr, &grads, &error_), ZR_INVALID);
  EXPECT_STREQ(error_.msg, "no such step");
}

TEST_F(OptimizerSlotsTest, ExchangesLocalGradients) {
  const auto* table = static_cast<const zr_local_gradients_api*>(kFull.extension("zr.optimizer.local_gradients/1"));
  ASSERT_NE(table, nullptr);
  const int64_t count = 7;
  zr_exchange_plan sizes{sizeof sizes, 2, &count, nullptr, 1, 0, 0, 0};
  EXPECT_EQ(table->plan(self_, &sizes, &error_), ZR_OK);
  EXPECT_EQ(sizes.scratch, 7u);
  float value = 3;
  zr_local_gradient gradient{};
  gradient.size = sizeof gradient;
  gradient.grad = {&value, 1, ZR_F32, 0, {ZR_DEVICE_CPU, 0}};
  const zr_local_gradient* list = &gradient;
  const zr_step step{sizeof step, 0.5f, 1, 0};
  const zr_view scratch{};
  EXPECT_EQ(table->exchange(self_, &step, &list, 1, &scratch, &error_), ZR_OK);
  EXPECT_EQ(value, 1.5f);
  gradient.group = 5;
  EXPECT_EQ(table->exchange(self_, &step, &list, 1, &scratch, &error_), ZR_INVALID);
  EXPECT_STREQ(error_.msg, "group 5 is out of range (1 groups)");
}

TEST_F(OptimizerSlotsTest, ReceivesTheSumOfAState) {
  const auto* table = static_cast<const zr_local_gradients_api*>(kFull.extension("zr.optimizer.local_gradients/1"));
  ASSERT_NE(table, nullptr);
  int32_t slot = 9;
  EXPECT_EQ(table->summed_state(self_, 3, &slot, &error_), ZR_OK);
  EXPECT_EQ(slot, -1);
  EXPECT_EQ(table->summed_state(self_, 4, &slot, &error_), ZR_OK);
  EXPECT_EQ(slot, 1);
  EXPECT_EQ(table->state_sum(self_, 4, 2.5, &error_), ZR_OK);
  EXPECT_EQ(OptimizerLayer<Full>::first_group(self_).state, 2.5);
  EXPECT_EQ(table->state_sum(self_, 5, 2.5, &error_), ZR_INVALID);
  EXPECT_STREQ(error_.msg, "no sum");
}

TEST_F(OptimizerSlotsTest, ReceivesTheCommunicator) {
  const auto* table = static_cast<const zr_local_gradients_api*>(kFull.extension("zr.optimizer.local_gradients/1"));
  ASSERT_NE(table, nullptr);
  const zr_collectives_api collectives{};
  EXPECT_EQ(table->bind(self_, {&collectives, nullptr, 2, 3}, &error_), ZR_OK);
  EXPECT_EQ(OptimizerLayer<Full>::first_group(self_).rank, 2);
  EXPECT_EQ(table->bind(self_, {&collectives, nullptr, 0, 1}, &error_), ZR_INVALID);
  EXPECT_STREQ(error_.msg, "one rank has no peers");
}

TEST_F(OptimizerSlotsTest, SavesAndLoadsGlobals) {
  const auto* table = static_cast<const zr_optimizer_globals_api*>(kFull.extension("zr.optimizer.globals/1"));
  ASSERT_NE(table, nullptr);
  using Saved = std::map<std::string, std::string>;
  const zr_global_sink sink = [](void* ctx, const char* key, const void* value, uint64_t bytes) {
    (*static_cast<Saved*>(ctx))[key] = std::string(static_cast<const char*>(value), bytes);
  };
  const int64_t nine = 9;
  EXPECT_EQ(table->load_global(self_, "steps", &nine, sizeof nine, &error_), ZR_OK);
  Saved saved;
  EXPECT_EQ(table->save_globals(self_, sink, &saved, &error_), ZR_OK);
  EXPECT_EQ(saved,
            (Saved{{"steps", std::string(reinterpret_cast<const char*>(&nine), sizeof nine)}, {"name", "full"}}));
  EXPECT_EQ(table->load_global(self_, "other", &nine, sizeof nine, &error_), ZR_INVALID);
  EXPECT_STREQ(error_.msg, "unknown other");
}

TEST_F(OptimizerSlotsTest, StartsAndShutsDown) {
  constexpr auto startup = startup_of<Full>();
  constexpr auto shutdown = shutdown_of<Full>();
  EXPECT_EQ(startup(&error_), ZR_OK);
  EXPECT_EQ(startup(&error_), ZR_STATE);
  EXPECT_STREQ(error_.msg, "started twice");
  shutdown();
  EXPECT_EQ(Full::started, 0);
}

struct PlainOptimizer : Optimizer<PlainOptimizer> {
  void update(const Update&) const {}
};

TEST(OptimizerWithoutOptionalMembers, HasNoFunctionsForThem) {
  constexpr zr_component plain = component<PlainOptimizer>("plain", "1.0");
  EXPECT_EQ(startup_of<PlainOptimizer>(), nullptr);
  EXPECT_EQ(shutdown_of<PlainOptimizer>(), nullptr);
  EXPECT_EQ(plain.extension("zr.optimizer.globals/1"), nullptr);
  EXPECT_EQ(plain.extension("zr.optimizer.local_gradients/1"), nullptr);
}

}  // namespace
}  // namespace zr::testing
