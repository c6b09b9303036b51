// A save that is killed at any point, on any rank, or fails on a disk error keeps all committed checkpoints intact.
#include <sys/resource.h>

#include <filesystem>
#include <set>

#include "ranks.hpp"
#include "support/scratch.hpp"

namespace zr::test {
namespace {

const std::vector<std::string> kPlaces{"save.folder_made",      "save.files_made",    "save.chunk_written",
                                       "save.before_sync",      "save.synced",        "save.index_written",
                                       "save.manifest_written", "save.before_commit", "save.committed",
                                       "save.root_synced",      "retain.renamed"};

std::string saves(const std::string& root, const Model& model, int64_t step, const checkpoint::CheckpointComm& peers,
                  int64_t keep = 0) {
  checkpoint::SaveOptions options = kSmall;
  options.keep = keep;
  const std::unique_ptr<checkpoint::FolderLock> lock =
      peers.rank == 0 ? std::make_unique<checkpoint::FolderLock>(root) : nullptr;
  return checkpoint::save(root, image_of(model, step, peers.rank, peers.world, static_cast<unsigned>(step % 3)), peers,
                          options)
      .folder;
}

std::set<std::string> names_in(const std::string& folder) {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) names.insert(entry.path().filename());
  return names;
}

TEST(CheckpointSaveTest, HoldsEveryByteForAnyNumberOfWritersAndReaders) {
  const Scratch scratch;
  int64_t step = 0;
  for (const int writers : {1, 2, 3, 4, 8})
    for (const unsigned how : {0u, 1u, 2u}) {
      const Model model(static_cast<unsigned>(++step));
      ASSERT_TRUE(good(on_ranks(writers, [&](const checkpoint::CheckpointComm& peers) {
        const std::unique_ptr<checkpoint::FolderLock> lock =
            peers.rank == 0 ? std::make_unique<checkpoint::FolderLock>(scratch.path("c")) : nullptr;
        save(scratch.path("c"), image_of(model, step, peers.rank, writers, how), peers, kSmall);
      })));
      const std::string folder = checkpoint::find_checkpoint(scratch.path("c"));
      EXPECT_EQ(folder, scratch.path("c/" + checkpoint::checkpoint_name(step)));
      for (const int readers : {1, 2, 3, 4, 8})
        for (const unsigned other : {0u, 1u, 2u}) expect_holds(folder, model, readers, other);
    }
}

TEST(CheckpointSaveTest, SLOW_KeepsCommittedCheckpointsWhenRanksAreKilledAnywhere) {
  constexpr int kRanks = 3;
  const Scratch scratch;
  const std::string root = scratch.path("c");
  int64_t step = 1;
  const Model first(1);
  ASSERT_TRUE(good(on_ranks(kRanks, [&](const checkpoint::CheckpointComm& peers) { saves(root, first, 1, peers); })));
  int kills = 0;
  unsigned committed = 1;  // the step, and so the seed, of the newest complete checkpoint
  const char* more = std::getenv("ZR_KILLS");
  const int wanted = more ? std::atoi(more) : 300;
  const std::vector<int> once{1, 1, 1}, often{1, 2, 3, 5, 8, 13, 21, 34};
  while (kills < wanted)
    for (const std::string& place : kPlaces)
      for (int victim = -1; victim < kRanks; ++victim)  // -1: all ranks
        for (const int time : place == "save.chunk_written" ? often : once) {
          ++step;
          const Model model(static_cast<unsigned>(step));
          const auto ends = on_ranks(kRanks, [&](const checkpoint::CheckpointComm& peers) {
            if (victim < 0 || victim == peers.rank)
              ::setenv("ZR_FAILPOINT", (place + "=kill@" + std::to_string(time)).c_str(), 1);
            saves(root, model, step, peers, 2);
          });
          for (const int end : ends) kills += killed(end);
          if (step == 2) {
            ASSERT_GT(kills, 0) << "no failpoint killed a rank";
          }
          const std::string newest = checkpoint::find_checkpoint(root);
          if (newest == (std::filesystem::path(root) / checkpoint::checkpoint_name(step)).string())
            committed = static_cast<unsigned>(step);
          else
            EXPECT_FALSE(good(ends)) << place << ": a save that succeeded must be the newest checkpoint";
          ASSERT_EQ(newest, (std::filesystem::path(root) / checkpoint::checkpoint_name(committed)).string()) << place;
          expect_holds(newest, Model(committed));
          if (::testing::Test::HasFatalFailure()) return;
        }
  std::printf("%d ranks were killed while saving\n", kills);
  ++step;
  ASSERT_TRUE(
      good(on_ranks(kRanks, [&](const checkpoint::CheckpointComm& peers) { saves(root, Model(7), step, peers, 1); })));
  EXPECT_EQ(names_in(root), (std::set<std::string>{"lock", checkpoint::checkpoint_name(step)}))
      << "no temporary files remain";
}

TEST(CheckpointSaveTest, ReplacesACheckpointOfTheSameStepAtomically) {
  const Scratch scratch;
  const std::string root = scratch.path("c");
  for (const std::string& place : kPlaces) {
    if (place == "retain.renamed") continue;  // this test removes no old checkpoint
    const Model before(1), after(2);
    ASSERT_TRUE(good(on_ranks(2, [&](const checkpoint::CheckpointComm& peers) { saves(root, before, 5, peers); })));
    const auto ends = on_ranks(2, [&](const checkpoint::CheckpointComm& peers) {
      ::setenv("ZR_FAILPOINT", (place + "=kill").c_str(), 1);
      saves(root, after, 5, peers);
    });
    EXPECT_TRUE(killed(ends[0])) << place;
    const checkpoint::Checkpoint checkpoint(checkpoint::find_checkpoint(root));
    char seen = 0, old = before.bytes[0][0];
    checkpoint.read(*checkpoint.find("weight", "embedding"), 0, 1, &seen);
    expect_holds(checkpoint.folder(), seen == old ? before : after);
  }
}

TEST(CheckpointSaveTest, KeepsEarlierCheckpointsAndLeavesNoDebrisOnADiskError) {
  const Scratch scratch;
  const std::string root = scratch.path("c");
  const Model good_one(1);
  ASSERT_TRUE(good(on_ranks(2, [&](const checkpoint::CheckpointComm& peers) { saves(root, good_one, 1, peers); })));
  for (const std::string call : {"open", "resize", "reserve", "write", "sync", "rename"})
    for (const std::string error : {"ENOSPC", "EIO"}) {
      int failed = 0;
      for (const int time : {1, 2, 3}) {
        const auto ends = on_ranks(2, [&](const checkpoint::CheckpointComm& peers) {
          if (peers.rank == time % 2)
            ::setenv("ZR_FAILPOINT", (call + "=" + error + "@" + std::to_string(time)).c_str(), 1);
          try {
            saves(root, Model(2), 2, peers);
          } catch (const Error& failure) {
            const std::string text = failure.what();
            const bool says = text.find("step 2 was not saved: ") == 0 &&
                              text.find(error == "EIO" ? "Input/output error" : "No space left") != text.npos;
            if (!says) std::fprintf(stderr, "%s\n", text.c_str());
            ::_exit(says && failure.exit_code() == exit_code::environment ? 3 : 1);
          }
        });
        for (const int end : ends) {
          ASSERT_TRUE(WIFEXITED(end));
          EXPECT_NE(WEXITSTATUS(end), 1) << call << " " << error << " " << time;
        }
        if (WEXITSTATUS(ends[0]) == 3) {
          ++failed;
          EXPECT_EQ(checkpoint::checkpoints_in(root), std::vector<std::string>{checkpoint::checkpoint_name(1)});
          EXPECT_EQ(names_in(root), (std::set<std::string>{"lock", checkpoint::checkpoint_name(1)}));
        } else {
          std::filesystem::remove_all(std::filesystem::path(root) / checkpoint::checkpoint_name(2));
        }
        expect_holds(checkpoint::find_checkpoint(root), good_one);
      }
      EXPECT_GE(failed, 1) << call << " " << error << ": this fault never caused a failure";
    }
}

// Another process with write permission replaces the folder that is being written.
TEST(CheckpointSaveTest, DoesNotWriteIntoAFolderThatReplacedItsOwn) {
  namespace fs = std::filesystem;
  const Scratch scratch;
  const std::string root = scratch.path("c"), victim = scratch.path("victim");
  std::string partial;  // the folder that is written
  ASSERT_TRUE(good(on_ranks(2, [&](const checkpoint::CheckpointComm& peers) { saves(root, Model(1), 1, peers); })));
  fs::copy(root + "/" + checkpoint::checkpoint_name(1), victim, fs::copy_options::recursive);
  struct Swap {
    std::string what, message;
    std::function<void()> put;  // under the name of `partial`, which was moved to NAME.held
  };
  const std::vector<Swap> swaps{
      {"a link", ".partial: cannot be opened: it is a symbolic link", [&] { fs::create_symlink(victim, partial); }},
      {"another checkpoint", ": was replaced by another user or process while the checkpoint was written",
       [&] { fs::copy(victim, partial, fs::copy_options::recursive); }},
      {"links to another's files", "cannot be opened: it is a symbolic link",
       [&] {
         fs::create_directory(partial);
         for (const auto& entry : fs::directory_iterator(victim))
           fs::create_symlink(entry.path(), fs::path(partial) / entry.path().filename());
       }},
      {"another user's folder", ".partial: was replaced by another user or process",
       [&] {
         fs::copy(partial + ".held", partial, fs::copy_options::recursive);
         ASSERT_EQ(::chown(partial.c_str(), 65534, 65534), 0);
       }},
  };
  for (const Swap& swap : swaps) {
    if (swap.what == "another user's folder" && ::geteuid() != 0) continue;
    const auto ends = on_ranks(2, [&](const checkpoint::CheckpointComm& given) {
      checkpoint::CheckpointComm peers = given;
      int messages = 0;
      if (peers.rank == 1)
        peers.broadcast = [&](const std::string& word) {
          std::string answer = given.broadcast(word);
          if (++messages == 2) {  // rank 0 made the folder, this rank opens it next
            partial = root + "/" + answer;
            fs::rename(partial, partial + ".held");
            swap.put();
          }
          return answer;
        };
      try {
        saves(root, Model(2), 2, peers);
      } catch (const Error& failure) {
        const std::string text = failure.what();
        if (text.find(swap.message) == text.npos) std::fprintf(stderr, "%s: %s\n", swap.what.c_str(), text.c_str());
        ::_exit(text.find(swap.message) == text.npos ? 1 : 3);
      }
    });
    for (const int end : ends) EXPECT_EQ(WEXITSTATUS(end), 3) << swap.what;
    expect_holds(victim, Model(1));
    expect_holds(root + "/" + checkpoint::checkpoint_name(1), Model(1));
    for (const std::string& name : names_in(root))
      if (name != checkpoint::checkpoint_name(1)) fs::remove_all(root + "/" + name);
  }
}

TEST(CheckpointSaveTest, CompletesShortWrites) {
  const Scratch scratch;
  for (const int time : {1, 2, 9, 30}) {
    const auto ends = on_ranks(2, [&](const checkpoint::CheckpointComm& peers) {
      ::setenv("ZR_FAILPOINT", ("write=SHORT@" + std::to_string(time)).c_str(), 1);
      saves(scratch.path("c"), Model(4), time, peers);
      if (failpoints_fired() != 1) ::_exit(1);
    });
    ASSERT_TRUE(good(ends)) << time;
    expect_holds(checkpoint::find_checkpoint(scratch.path("c")), Model(4));
  }
}

// A run that starts again, or resumes from an earlier checkpoint, in a folder that contains a later step.
TEST(CheckpointSaveTest, TreatsTheLastSavedCheckpointAsTheNewest) {
  const Scratch scratch;
  const std::string root = scratch.path("c");
  const checkpoint::CheckpointComm me = checkpoint::single_rank_comm();
  for (const int64_t step : {90, 100}) saves(root, Model(1), step, me, 1);
  const std::string saved = saves(root, Model(2), 10, me, 1);
  EXPECT_EQ(saved, checkpoint::find_checkpoint(root));
  EXPECT_EQ(checkpoint::checkpoints_in(root), std::vector<std::string>{checkpoint::checkpoint_name(10)});
  expect_holds(checkpoint::find_checkpoint(root), Model(2));
  expect_holds(root + "/step-00000100.superseded", Model(1));
  saves(root, Model(3), 100, me, 2);
  saves(root, Model(4), 20, me, 2);
  EXPECT_EQ(checkpoint::checkpoints_in(root),
            (std::vector<std::string>{checkpoint::checkpoint_name(10), checkpoint::checkpoint_name(20)}));
  expect_holds(root + "/step-00000100.superseded", Model(3));
}

// Runs that start again and again, each to a step that earlier ones have saved.
TEST(CheckpointRetentionTest, CountsSupersededCheckpointsAsTheOldest) {
  const Scratch scratch;
  const std::string root = scratch.path("c");
  const checkpoint::CheckpointComm me = checkpoint::single_rank_comm();
  const auto checkpoints = [&] {
    std::set<std::string> names = names_in(root);
    names.erase("lock");
    return names;
  };
  for (int attempt = 0; attempt < 7; ++attempt)
    for (const int64_t step : {10, 20, 30}) saves(root, Model(1), step, me, 3);
  using Names = std::set<std::string>;
  EXPECT_EQ(checkpoints(), (Names{"step-00000010", "step-00000020", "step-00000030"}));
  saves(root, Model(1), 10, me, 3);
  EXPECT_EQ(checkpoints(), (Names{"step-00000010", "step-00000020.superseded", "step-00000030.superseded"}));
  saves(root, Model(1), 11, me, 3);
  EXPECT_EQ(checkpoints(), (Names{"step-00000010", "step-00000011", "step-00000030.superseded"}))
      << "the superseded checkpoint that was saved first is removed first";
  std::filesystem::create_directories(root + "/step-00000005.superseded-of-mine");
  for (const int64_t step : {12, 13}) saves(root, Model(1), step, me, 1);
  EXPECT_EQ(checkpoints(), (Names{"step-00000005.superseded-of-mine", "step-00000013"}))
      << "only names that zeroth gives are removed";
}

// A job whose steps are skipped keeps its last checkpoint of an applied step, even if checkpoint.keep is smaller.
TEST(CheckpointRetentionTest, KeepsTheNewestCheckpointWhoseStepWasApplied) {
  const Scratch scratch;
  const std::string root = scratch.path("c");
  const checkpoint::FolderLock lock(root);
  const auto saves_step = [&](int64_t step, bool applied, int64_t keep) {
    const Model model(1);
    checkpoint::CheckpointContents image = image_of(model, step, 0, 1);
    checkpoint::CheckpointMetadata metadata;
    metadata.last_step_applied = image.last_step_applied = applied;
    image.metadata_json = checkpoint::to_text(metadata);
    checkpoint::SaveOptions options = kSmall;
    options.keep = keep;
    checkpoint::save(root, image, checkpoint::single_rank_comm(), options);
  };
  using Names = std::vector<std::string>;
  saves_step(1, true, 2);
  saves_step(2, true, 2);
  saves_step(3, false, 2);
  EXPECT_EQ(checkpoint::checkpoints_in(root), (Names{checkpoint::checkpoint_name(2), checkpoint::checkpoint_name(3)}));
  for (const int64_t step : {4, 5, 6}) saves_step(step, false, 2);
  EXPECT_EQ(checkpoint::checkpoints_in(root),
            (Names{checkpoint::checkpoint_name(2), checkpoint::checkpoint_name(5), checkpoint::checkpoint_name(6)}));
  saves_step(7, false, 1);
  EXPECT_EQ(checkpoint::checkpoints_in(root), (Names{checkpoint::checkpoint_name(2), checkpoint::checkpoint_name(7)}));
  EXPECT_TRUE(checkpoint::last_step_applied(root + "/" + checkpoint::checkpoint_name(2)));
  EXPECT_FALSE(checkpoint::last_step_applied(root + "/" + checkpoint::checkpoint_name(7)));
  saves_step(8, true, 1);
  EXPECT_EQ(checkpoint::checkpoints_in(root), Names{checkpoint::checkpoint_name(8)});
}

// A user may have put them there.
TEST(CheckpointRetentionTest, RemovesNothingWithoutAManifest) {
  const Scratch scratch;
  const std::string root = scratch.path("c");
  const checkpoint::FolderLock lock(root);
  scratch.write("c/step-00000001/notes.txt", "of the user");
  scratch.write("c/step-00000002", "of the user");
  scratch.write("c/step-00000003.superseded/notes.txt", "of the user");
  scratch.write("elsewhere/notes.txt", "of the user");
  std::filesystem::create_directory_symlink(scratch.path("elsewhere"), scratch.path("c/step-00000004"));
  for (const int64_t step : {5, 6, 7}) {
    checkpoint::SaveOptions options = kSmall;
    options.keep = 1;
    checkpoint::save(root, image_of(Model(1), step, 0, 1), checkpoint::single_rank_comm(), options);
  }
  for (const char* file : {"c/step-00000001/notes.txt", "c/step-00000002", "c/step-00000003.superseded/notes.txt",
                           "c/step-00000004/notes.txt"})
    EXPECT_TRUE(std::filesystem::exists(scratch.path(file))) << file;
  EXPECT_FALSE(std::filesystem::exists(root + "/step-00000006"));
  EXPECT_TRUE(std::filesystem::exists(root + "/step-00000007"));
}

TEST(FolderLockTest, ReleasesALockWhoseHolderCouldNotBeWritten) {
  const Scratch scratch;
  const auto ends = on_ranks(1, [&](const checkpoint::CheckpointComm&) {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit none{0, RLIM_INFINITY}, all{RLIM_INFINITY, RLIM_INFINITY};
    ::setrlimit(RLIMIT_FSIZE, &none);
    try {
      const checkpoint::FolderLock lock(scratch.path("c"));
      ::_exit(1);
    } catch (const Error& failure) {
      if (failure.exit_code() != exit_code::environment) ::_exit(2);
    }
    ::setrlimit(RLIMIT_FSIZE, &all);
    const checkpoint::FolderLock lock(scratch.path("c"));
  });
  EXPECT_TRUE(good(ends));
}

TEST(FolderLockTest, RejectsASecondJobAndNamesTheHolder) {
  const Scratch scratch;
  const checkpoint::FolderLock lock(scratch.path("c"));
  const auto ends = on_ranks(1, [&](const checkpoint::CheckpointComm&) {
    try {
      const checkpoint::FolderLock second(scratch.path("c"));
    } catch (const Error& failure) {
      const std::string text = failure.what();
      const std::string holder = " (process " + std::to_string(::getppid()) + " on ";
      ::_exit(text.find("another job is saving to this folder" + holder) != text.npos ? 0 : 1);
    }
    ::_exit(2);
  });
  EXPECT_TRUE(good(ends));
}

TEST(FolderLockTest, RejectsAFolderThatTheSameJobHoldsAndSuggestsAnother) {
  const Scratch scratch;
  const std::string root = scratch.path("c");
  const checkpoint::FolderLock first(root);
  try {
    const checkpoint::FolderLock second(root);
    FAIL() << "was locked twice";
  } catch (const Error& failure) {
    EXPECT_EQ(failure.what(), root +
                                  ": this job has already locked the folder, as its run folder or for the checkpoints "
                                  "of another engine; save to a separate folder, for example inside this one");
  }
}

}  // namespace
}  // namespace zr::test
