// Tests the C++ layer for tiers: the tests call plain C++ classes through the C function table, as the host does.
#include <gtest/gtest.h>

#include <string>

#include "contract/optimizer_under_test.hpp"
#include "zr/offload.hpp"

namespace zr::testing {
namespace {

struct Shelf : Offload<Shelf> {  // implements no optional function
  zr_offload_caps caps() const {
    zr_offload_caps caps{};
    caps.io_align = 512;
    return caps;
  }
  uint64_t reserve(uint64_t bytes, const char* tag) {
    if (bytes > 100) throw PluginError(ZR_IO, std::string("no space for ") + tag, 28);
    return bytes + 1;
  }
  void release(uint64_t slot) noexcept { released = slot; }
  void write(const zr_transfer* all, uint32_t n, zr_stream*, zr_done*) { offset = all[n - 1].offset; }
  void read(const zr_transfer*, uint32_t, zr_stream*, zr_done*) { throw PluginError(ZR_IO, "not what was written", 1); }
  inline static uint64_t released, offset;
};
struct CompleteTier : Shelf {  // implements every optional function
  using Layer = OffloadLayer<CompleteTier>;
  explicit CompleteTier(const Host& host) : host(host) {}
  void open() {
    if (opened) throw PluginError(ZR_STATE, "already open");
    opened = true;
  }
  void write(const zr_transfer*, uint32_t, zr_stream*, zr_done* done) { kept = Done::retained(host, done); }
  zr_view map(uint64_t slot) { return view_of(memory, static_cast<int64_t>(slot)); }
  void unmap(uint64_t) noexcept { kept.resolve(); }
  void reg(const zr_view& view) {
    if (view.count > 2) throw PluginError(ZR_NOMEM, "too much");
  }
  void unreg(const zr_view&) noexcept {}
  Host host;
  bool opened = false;
  Done kept;
  float memory[4] = {};
};

struct Tier {
  explicit Tier(const zr_component& component)
      : component(component), api(*static_cast<const zr_offload_api*>(component.api)) {
    const zr_config_s config;
    EXPECT_EQ(component.create(&host, &config, &self, &error), ZR_OK);
  }
  ~Tier() { component.destroy(self); }
  zr_host host = make_host();
  zr_error error = OptimizerUnderTest::no_error();
  const zr_component component;
  const zr_offload_api& api;
  void* self = nullptr;
};

TEST(OffloadLayerTest, SetsUnimplementedFunctionsToNull) {
  Tier shelf(component<Shelf>("shelf", "1.0")), complete(component<CompleteTier>("complete", "1.0"));
  EXPECT_STREQ(shelf.component.kind, "zr.offload/1");
  EXPECT_EQ(shelf.api.size, sizeof(zr_offload_api));
  EXPECT_EQ(shelf.api.map, nullptr);
  EXPECT_EQ(shelf.api.unmap, nullptr);
  EXPECT_EQ(shelf.api.reg, nullptr);
  EXPECT_EQ(shelf.api.unreg, nullptr);
  EXPECT_NE(complete.api.map, nullptr);
  EXPECT_NE(complete.api.reg, nullptr);
}

TEST(OffloadLayerTest, ReportsThatATierWithMapIsMappable) {
  Tier shelf(component<Shelf>("shelf", "1.0")), complete(component<CompleteTier>("complete", "1.0"));
  zr_offload_caps caps{};
  caps.size = sizeof caps;
  ASSERT_EQ(shelf.api.caps(shelf.self, &caps, &shelf.error), ZR_OK);
  EXPECT_EQ(caps.io_align, 512u);
  EXPECT_EQ(caps.flags, 0u);
  caps.size = sizeof caps;
  ASSERT_EQ(complete.api.caps(complete.self, &caps, &complete.error), ZR_OK);
  EXPECT_EQ(caps.flags, static_cast<uint32_t>(ZR_TIER_MAPPABLE));
  zr_view view{};
  ASSERT_EQ(complete.api.map(complete.self, 3, &view, &complete.error), ZR_OK);
  EXPECT_EQ(view.count, 3);
}

TEST(OffloadLayerTest, OpensATierAlsoIfTheAuthorHasNothingToOpen) {
  Tier shelf(component<Shelf>("shelf", "1.0")), complete(component<CompleteTier>("complete", "1.0"));
  EXPECT_EQ(shelf.api.open(shelf.self, &shelf.error), ZR_OK);
  EXPECT_EQ(complete.api.open(complete.self, &complete.error), ZR_OK);
  EXPECT_EQ(complete.api.open(complete.self, &complete.error), ZR_STATE);
  EXPECT_STREQ(complete.error.msg, "already open");
}

TEST(OffloadLayerTest, TurnsExceptionsIntoCodeTextAndNumber) {
  Tier shelf(component<Shelf>("shelf", "1.0")), complete(component<CompleteTier>("complete", "1.0"));
  uint64_t slot = 99;
  EXPECT_EQ(shelf.api.reserve(shelf.self, 7, "a", &slot, &shelf.error), ZR_OK);
  EXPECT_EQ(slot, 8u);
  EXPECT_EQ(shelf.api.reserve(shelf.self, 101, "masters", &slot, &shelf.error), ZR_IO);
  EXPECT_EQ(slot, 8u) << "a failure does not change its outputs";
  EXPECT_EQ(shelf.error.native, 28);
  EXPECT_STREQ(shelf.error.msg, "no space for masters");
  EXPECT_EQ(shelf.api.read(shelf.self, nullptr, 0, nullptr, nullptr, &shelf.error), ZR_IO);
  EXPECT_EQ(shelf.error.native, 1);
  const zr_transfer two[] = {{1, 2, {}}, {3, 4, {}}};
  EXPECT_EQ(shelf.api.write(shelf.self, two, 2, nullptr, nullptr, &shelf.error), ZR_OK);
  EXPECT_EQ(Shelf::offset, 4u);
  shelf.api.release(shelf.self, 8);
  EXPECT_EQ(Shelf::released, 8u);
  const zr_view large = view_of(&slot, 3);
  EXPECT_EQ(complete.api.reg(complete.self, &large, &complete.error), ZR_NOMEM);
}

TEST(OffloadLayerTest, KeepsAReferenceToAPendingCompletion) {
  Tier complete(component<CompleteTier>("complete", "1.0"));
  zr_done_s done;
  ASSERT_EQ(complete.api.write(complete.self, nullptr, 0, nullptr, &done, &complete.error), ZR_OK);
  EXPECT_EQ(done.references, 2);
  complete.api.unmap(complete.self, 0);
  EXPECT_EQ(done.resolved, 1);
}

}  // namespace
}  // namespace zr::testing
