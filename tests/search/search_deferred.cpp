// zr::deferred builds what an ordinary construction builds: random constructors.
#include <gtest/gtest.h>

#include <iostream>

#include "search/deferred_language.hpp"

namespace deferred_search {
namespace {

// libtorch warns about each out= argument that it resizes.
class NoWarnings final : public c10::WarningHandler {
  void process(const c10::Warning&) override {}
};
NoWarnings no_warnings;
const c10::WarningUtils::WarningHandlerGuard kNoWarnings(&no_warnings);

TEST(DeferredSearch, RandomConstructorsBuildTheSameTensors) {
  Tally tally;
  const auto result =
      zr::test::search(language(Planted::none, tally), zr::test::search_programs(2000), zr::test::search_seed());
  EXPECT_EQ(result.failure.value_or(""), "");
  std::size_t rejected = 0;
  for (const auto& [message, count] : tally.rejected) {
    rejected += count;
    std::cout << count << " rejected: " << message << "\n";
  }
  std::cout << tally.programs << " programs, " << tally.accepted << " accepted by an engine, " << rejected
            << " rejected by zr::deferred\n";
  EXPECT_LT(static_cast<double>(rejected), 0.1 * static_cast<double>(tally.accepted));
  EXPECT_GT(static_cast<double>(tally.accepted), 0.5 * static_cast<double>(tally.programs));
}

class PlantedDefect : public testing::TestWithParam<std::pair<Planted, std::string>> {};

TEST_P(PlantedDefect, IsFound) {
  Tally tally;
  const auto result = zr::test::search(language(GetParam().first, tally), 2000, 1);
  ASSERT_TRUE(result.failure) << "not found in " << result.programs << " programs";
  std::cout << "program " << result.programs << "\n" << *result.failure << "\n";
}

INSTANTIATE_TEST_SUITE_P(DeferredSearch, PlantedDefect,
                         testing::ValuesIn(std::vector<std::pair<Planted, std::string>>{
                             {Planted::late_metadata, "LateMetadata"},
                             {Planted::lost_view, "LostView"},
                             {Planted::no_set_data, "NoSetData"},
                             {Planted::no_set, "NoSet"},
                             {Planted::no_reseed, "NoReseed"},
                             {Planted::shared_clone, "SharedCloneOfGenerator"},
                             {Planted::free_hand_draw, "FreeHandDraw"},
                             {Planted::default_for_own, "DefaultForOwnGenerator"},
                             {Planted::no_restore, "NoRestoredState"},
                             {Planted::dropped_values, "DroppedValuesOfVector"},
                             {Planted::dropped_pointers, "DroppedWriteThroughPointer"},
                             {Planted::kept_nothing, "ClearedRestOfStorage"},
                             {Planted::late_input, "LateOrdinaryInput"},
                             {Planted::no_out_resize, "IgnoredOut"},
                             {Planted::swapped_results, "SwappedResults"},
                             {Planted::lost_alias, "LostAlias"},
                             {Planted::fixed_dtype, "FixedDefaultDtype"},
                             {Planted::lost_list, "LostList"},
                         }),
                         [](const auto& info) { return info.param.second; });

}  // namespace
}  // namespace deferred_search
