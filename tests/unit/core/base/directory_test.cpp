#include "base/directory.hpp"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <filesystem>
#include <fstream>
#include <functional>
#include <stdexcept>
#include <utility>

#include "support/said_by.hpp"
#include "support/scratch.hpp"

namespace {

using namespace zr::host;
namespace exit_code = zr::exit_code;
using ::testing::HasSubstr;
namespace fs = std::filesystem;

class DirectoryTest : public ::testing::Test {
 protected:
  std::string text(const std::string& path) const {
    std::ifstream in(scratch_.folder() / path);
    return {std::istreambuf_iterator<char>(in), {}};
  }
  template <class Call>
  static std::string failure(Call&& call) {
    return zr::test::said_by(call, exit_code::environment);
  }
  zr::test::Scratch scratch_;
  Directory directory_ = Directory::open(scratch_.path("here"), true);
};

TEST_F(DirectoryTest, WritesIntoTheOpenedDirectoryAfterItsPathWasReplaced) {
  directory_.write("a", "one\n");
  EXPECT_EQ(text("here/a"), "one\n");
  fs::create_directory(scratch_.path("elsewhere"));
  fs::rename(scratch_.path("here"), scratch_.path("moved"));
  fs::create_directory_symlink(scratch_.path("elsewhere"), scratch_.path("here"));
  directory_.write("a", "two\n");
  EXPECT_EQ(text("moved/a"), "two\n");
  EXPECT_EQ(directory_.read("a"), "two\n");
  EXPECT_TRUE(fs::is_empty(scratch_.path("elsewhere")));
  EXPECT_EQ(directory_.list(), std::vector<std::string>{"a"}) << "no temporary file is left";
}

TEST_F(DirectoryTest, NeverWritesThroughASymbolicLink) {
  scratch_.write("victim", "precious\n");
  for (const char* name : {"a", "lock", ".a.tmp"})
    fs::create_symlink(scratch_.path("victim"), scratch_.path("here") + "/" + name);
  directory_.write("a", "new\n");
  EXPECT_EQ(text("victim"), "precious\n");
  EXPECT_FALSE(fs::is_symlink(scratch_.path("here/a"))) << "the link is replaced by the file";
  std::string holder;
  EXPECT_THAT(failure([&] { FileLock::try_take(directory_, "lock", holder); }),
              HasSubstr("here/lock: cannot be created: it is a symbolic link, which is not followed here"));
  EXPECT_THAT(failure([&] { directory_.create("lock"); }), HasSubstr("here/lock: cannot be created: File exists"));
  EXPECT_THAT(failure([&] { directory_.read("lock"); }), HasSubstr("here/lock: cannot be opened: it is a symbolic"));
  EXPECT_EQ(text("victim"), "precious\n");
}

TEST_F(DirectoryTest, OpensNoSubdirectoryThroughASymbolicLink) {
  fs::create_directory(scratch_.path("elsewhere"));
  fs::create_directory_symlink(scratch_.path("elsewhere"), scratch_.path("here/sub"));
  EXPECT_THAT(failure([&] { directory_.subdirectory("sub"); }),
              HasSubstr("here/sub: cannot be opened: it is a symbolic link"));
  const Directory other = directory_.subdirectory("other");
  other.write("a", "1");
  EXPECT_EQ(text("here/other/a"), "1");
  EXPECT_FALSE(directory_.make("other"));
  EXPECT_TRUE(directory_.make("third"));
}

TEST_F(DirectoryTest, ReadsRegularFilesOnly) {
  EXPECT_EQ(directory_.read("missing"), std::nullopt);
  ASSERT_EQ(::mkfifo(scratch_.path("here/fifo").c_str(), 0600), 0);
  EXPECT_THAT(failure([&] { directory_.read("fifo"); }), HasSubstr("here/fifo: is not a regular file"));
  directory_.make("sub");
  EXPECT_THAT(failure([&] { directory_.read("sub"); }), HasSubstr("here/sub: is not a regular file"));
  std::string holder;
  EXPECT_THAT(zr::test::said_by([&] { FileLock::try_take(directory_, "fifo", holder); }),
              HasSubstr("here/fifo: is a FIFO, not a regular file; remove it"));
  EXPECT_THAT(zr::test::said_by([&] { FileLock::try_take(directory_, "sub", holder); }),
              HasSubstr("here/sub: is a folder, not a regular file; remove it"));
}

TEST_F(DirectoryTest, ReplacesALinkInOneStep) {
  directory_.link("1", "latest");
  directory_.link("2", "latest");
  EXPECT_EQ(directory_.link_target("latest"), "2");
  EXPECT_EQ(directory_.link_target("missing"), std::nullopt);
  EXPECT_EQ(directory_.list(), std::vector<std::string>{"latest"});
}

TEST_F(DirectoryTest, RemovesEntries) {
  directory_.write("a", "1");
  EXPECT_TRUE(directory_.has_file("a"));
  directory_.remove("a");
  directory_.remove("a");
  EXPECT_FALSE(directory_.has_file("a"));
}

TEST_F(DirectoryTest, RemovesTreeButNotTargetsOfItsLinks) {
  scratch_.write("victim/kept", "precious\n");
  const Directory tree = directory_.subdirectory("tree");
  tree.subdirectory("below").write("a", "1");
  fs::create_directory_symlink(scratch_.path("victim"), scratch_.path("here/tree/link"));
  fs::create_symlink(scratch_.path("victim/kept"), scratch_.path("here/tree/below/link"));
  directory_.remove_all("tree");
  directory_.remove_all("tree");
  EXPECT_FALSE(directory_.has("tree"));
  EXPECT_EQ(text("victim/kept"), "precious\n");
}

TEST_F(DirectoryTest, ExchangesTwoEntriesInOneStep) {
  directory_.subdirectory("a").write("x", "1");
  directory_.subdirectory("b").write("x", "2");
  EXPECT_TRUE(directory_.exchange("a", "b"));
  EXPECT_EQ(text("here/a/x"), "2");
  EXPECT_EQ(text("here/b/x"), "1");
  EXPECT_FALSE(directory_.exchange("a", "missing"));
}

TEST_F(DirectoryTest, OpensRegularFilesForWriting) {
  directory_.write("a", "one");
  directory_.open_file("a").write(0, "two", 3);
  EXPECT_EQ(text("here/a"), "two");
  fs::create_symlink(scratch_.path("here/a"), scratch_.path("here/link"));
  ASSERT_EQ(::mkfifo(scratch_.path("here/fifo").c_str(), 0600), 0);
  EXPECT_THAT(failure([&] { directory_.open_file("link"); }), HasSubstr("here/link: cannot be opened: it is a symb"));
  EXPECT_THAT(failure([&] { directory_.open_file("fifo"); }), HasSubstr("here/fifo: is not a regular file"));
  EXPECT_THAT(failure([&] { directory_.open_file("missing"); }), HasSubstr("here/missing: cannot be opened"));
}

TEST_F(DirectoryTest, LockNamesItsHolderAndEndsWithIt) {
  std::string holder;
  {
    const auto lock = FileLock::try_take(directory_, "lock", holder);
    ASSERT_TRUE(lock);
    EXPECT_FALSE(FileLock::try_take(directory_, "lock", holder));
    EXPECT_THAT(holder, testing::MatchesRegex("process " + std::to_string(::getpid()) + " on .+"));
  }
  EXPECT_TRUE(FileLock::try_take(directory_, "lock", holder));
}

TEST_F(DirectoryTest, LockReplacesNoFileOfAnotherProgram) {
  std::string holder;
  scratch_.write("here/lock", "notes of the user");
  EXPECT_THAT(zr::test::said_by([&] { FileLock::try_take(directory_, "lock", holder); }),
              HasSubstr("here/lock: is a file of another program, but its name is that of a lock; move it to another "
                        "folder"));
  EXPECT_EQ(text("here/lock"), "notes of the user");
}

// A child that waits until its pipe is closed. `made_by`: fork(), or a system call that runs no handler of fork().
class WaitingChild {
 public:
  explicit WaitingChild(const std::function<pid_t()>& made_by) {
    std::array<int, 2> ready{};
    if (::pipe2(ends_.data(), O_CLOEXEC) != 0 || ::pipe2(ready.data(), O_CLOEXEC) != 0)
      throw std::runtime_error("no pipe");
    pid_ = made_by();
    char byte = 0;
    if (pid_ != 0) {  // until the child runs, it holds copies of all descriptors
      const bool runs = ::read(ready[0], &byte, 1) == 1;
      for (const int end : ready) ::close(end);
      if (!runs) throw std::runtime_error("no child");
      return;
    }
    ::close(ends_[1]);
    if (::write(ready[1], &byte, 1) != 1) ::_exit(1);
    while (::read(ends_[0], &byte, 1) > 0) {
    }
    ::_exit(0);
  }
  ~WaitingChild() {
    ::close(ends_[0]);
    ::close(ends_[1]);
    ::waitpid(pid_, nullptr, 0);
  }
  pid_t pid() const { return pid_; }

 private:
  std::array<int, 2> ends_{};
  pid_t pid_ = -1;
};

TEST_F(DirectoryTest, LockIsNotHeldByChildrenOfItsProcess) {
  std::string holder;
  auto lock = FileLock::try_take(directory_, "lock", holder);
  ASSERT_TRUE(lock);
  const WaitingChild child(&::fork);
  EXPECT_FALSE(FileLock::try_take(directory_, "lock", holder)) << "the process still holds it";
  lock.reset();
  EXPECT_TRUE(FileLock::try_take(directory_, "lock", holder));
}

TEST_F(DirectoryTest, LockNamesTheProcessThatHoldsItAfterItsHolderHasEnded) {
  std::string holder;
  auto lock = FileLock::try_take(directory_, "lock", holder);
  ASSERT_TRUE(lock);
  const WaitingChild child([] { return static_cast<pid_t>(::syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0)); });
  pid_t gone = 0;
  {
    const WaitingChild brief(&::fork);
    gone = brief.pid();
  }
  const std::string host = text("here/lock").substr(text("here/lock").find(" on "));
  lock.reset();
  scratch_.write("here/lock", "process " + std::to_string(gone) + host);
  EXPECT_FALSE(FileLock::try_take(directory_, "lock", holder));
  EXPECT_EQ(holder, "process " + std::to_string(gone) + host.substr(0, host.find('\n')) +
                        ", which has ended, but process " + std::to_string(child.pid()) +
                        " (unit_base) still holds its lock");
}

TEST(OwnDescriptorTest, ClosesNothingInAChild) {
  const zr::test::Scratch scratch;
  const std::string path = scratch.write("file", "text");
  OwnDescriptor file([&] { return ::open(path.c_str(), O_RDONLY | O_CLOEXEC); });
  const int fd = file.get();
  const pid_t pid = ::fork();
  if (pid == 0) {
    const bool closed = ::fcntl(fd, F_GETFD) < 0;
    const int own = ::dup2(0, fd);  // a descriptor of the child with the same number
    { const OwnDescriptor moved(std::move(file)); }
    ::_exit(closed && own == fd && ::fcntl(fd, F_GETFD) >= 0 ? 0 : 1);
  }
  int status = -1;
  ::waitpid(pid, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_GE(::fcntl(fd, F_GETFD), 0);
}

}  // namespace
