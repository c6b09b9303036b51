#include "job/engine_name.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/scratch.hpp"

namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using zr::host::job::EngineName;

class EngineNameTest : public ::testing::Test {
 protected:
  const zr::test::Scratch scratch_;
  const std::string ck_ = scratch_.path("ck");
  EngineName critic_{"critic", "runs/job/critic", ck_}, actor_{"actor", "runs/job/actor", ck_};
};

TEST_F(EngineNameTest, RecordsTheStepsOfOtherEnginesInItsCheckpointFolder) {
  EngineName elsewhere("third", "runs/job/third", "other"), unsaved("fourth", "runs/job/fourth", "");
  critic_.record_step(5);
  elsewhere.record_step(7);
  EXPECT_THAT(actor_.steps_of_other_engines(), ElementsAre(std::pair("critic", 5)));
  EXPECT_THAT(critic_.steps_of_other_engines(), ElementsAre(std::pair("actor", 0)));
  EXPECT_THAT(elsewhere.steps_of_other_engines(), IsEmpty());
  EXPECT_THAT(unsaved.steps_of_other_engines(), IsEmpty());
}

TEST_F(EngineNameTest, AcceptsEnginesThatWereSavedInTurn) {
  critic_.record_load(50, {{"actor", 9}});  // takes five steps per step of the actor, and is saved before it
  actor_.record_load(10, {{"critic", 50}});
  EXPECT_THAT(actor_.mismatch_warnings(), IsEmpty());
  EXPECT_THAT(critic_.mismatch_warnings(), IsEmpty());
}

TEST_F(EngineNameTest, NamesTheEngineWhoseCheckpointIsNewer) {
  scratch_.write("ck/critic/step-00000008/manifest.json", "{}");
  critic_.record_load(10, {{"actor", 9}});
  actor_.record_load(8, {{"critic", 8}});
  EXPECT_THAT(actor_.mismatch_warnings(),
              ElementsAre("engine 'actor' resumes from step 8, saved when engine 'critic' was at step 8, but engine "
                          "'critic' starts from step 10: the job ended between their saves, or a checkpoint was "
                          "removed; to resume both from the same point, remove the checkpoints of 'critic' after step "
                          "8 in " +
                          ck_ + "/critic and resume again"));
  EXPECT_EQ(critic_.mismatch_warnings(), actor_.mismatch_warnings()) << "the order of construction does not matter";
}

TEST_F(EngineNameTest, SuggestsNothingThatWouldLoseTheRun) {
  critic_.record_load(10, {{"actor", 9}});
  actor_.record_load(8, {{"critic", 8}});  // checkpoint.keep = 1
  EXPECT_THAT(actor_.mismatch_warnings(),
              ElementsAre(HasSubstr("or a checkpoint was removed; " + ck_ +
                                    "/critic has no checkpoint of step 8, so they cannot resume from the same point; "
                                    "keep more checkpoints (checkpoint.keep)")));
}

TEST_F(EngineNameTest, NamesTheEngineThatHasNoCheckpoint) {
  actor_.record_load(2, {{"critic", 2}});
  EXPECT_THAT(critic_.mismatch_warnings(),
              ElementsAre(HasSubstr("but engine 'critic' starts from step 0: the job ended between their saves")));
}

TEST_F(EngineNameTest, IgnoresEnginesThatTrainedOrWithoutRecords) {
  critic_.record_load(10, {});
  actor_.record_load(8, {});
  EXPECT_THAT(actor_.mismatch_warnings(), IsEmpty());
  critic_.record_load(10, {{"actor", 10}});
  critic_.record_step(11);
  EXPECT_THAT(actor_.mismatch_warnings(), IsEmpty());
}

}  // namespace
