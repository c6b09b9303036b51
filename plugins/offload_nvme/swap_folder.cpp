#include "swap_folder.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <mutex>
#include <vector>

#include "zr/base.hpp"

namespace nvme {

namespace {
constexpr const char* kStart = "zeroth-swap-";
constexpr const char* kLock = "/lock";

[[noreturn]] void fail(const std::string& what, int error) {
  throw zr::PluginError(ZR_IO,
                        "tier nvme: " + what + ": " + std::strerror(error) +
                            "; make sure that this user may write there, or set offload.nvme.path to another folder",
                        error);
}

std::vector<std::string> names_in(const std::string& path) {
  std::vector<std::string> names;
  DIR* folder = ::opendir(path.c_str());
  if (!folder) return names;
  while (const dirent* entry = ::readdir(folder)) names.emplace_back(entry->d_name);
  ::closedir(folder);
  return names;
}

// The caller holds the lock exclusively. The lock file is removed last: a process that waits for the lock then finds
// that the file is gone.
void remove_folder(const std::string& folder) {
  for (const std::string& name : names_in(folder))
    if (name != "." && name != ".." && "/" + name != kLock) ::unlink((folder + "/" + name).c_str());
  ::unlink((folder + kLock).c_str());
  ::rmdir(folder.c_str());
}

// The locks of this process. A child that fork() makes closes them: a lock is held until all processes close it, and
// the folder of a job that has ended would stay as long as such a child.
struct Locks {
  std::mutex mutex;
  std::vector<int> open;
};
Locks& locks() {
  static auto* all = [] {  // never destroyed
    ::pthread_atfork([] { locks().mutex.lock(); }, [] { locks().mutex.unlock(); },
                     [] {
                       for (const int fd : locks().open) ::close(fd);
                       locks().open.clear();
                       locks().mutex.unlock();
                     });
    return new Locks;
  }();
  return *all;
}

// No child inherits the descriptor that `open` returns.
int open_lock(const std::string& file, int flags) {
  Locks& all = locks();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const int fd = ::open(file.c_str(), flags, 0600);
  const int error = errno;
  if (fd >= 0) all.open.push_back(fd);
  errno = error;
  return fd;
}

void close_lock(int fd) {
  Locks& all = locks();
  const std::lock_guard<std::mutex> lock(all.mutex);
  if (std::erase(all.open, fd) > 0) ::close(fd);  // else this process is a child
}

bool lock(int fd, int operation) {
  int result;
  do result = ::flock(fd, operation);
  while (result != 0 && errno == EINTR);
  return result == 0;
}
}  // namespace

SwapFolder::SwapFolder(const std::string& path, const std::string& job) : folder_(path + "/" + kStart) {
  for (const char c : job) folder_ += c == '/' ? '_' : c;
  for (int round = 0; round < 1000; ++round) {  // another job, or a rank that ends, may be removing it
    if (::mkdir(folder_.c_str(), 0700) != 0 && errno != EEXIST) fail("cannot create " + folder_, errno);
    const int fd = open_lock(folder_ + kLock, O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0 && errno == ENOENT) continue;
    if (fd < 0 || !lock(fd, LOCK_SH)) {
      const int error = errno;
      if (fd >= 0) close_lock(fd);
      fail("cannot lock " + folder_ + kLock, error);
    }
    struct stat held {
    }, there{};
    if (::fstat(fd, &held) == 0 && ::stat((folder_ + kLock).c_str(), &there) == 0 && held.st_ino == there.st_ino) {
      lock_ = fd;
      return;
    }
    close_lock(fd);
  }
  fail("cannot create " + folder_ + ": another process keeps removing it", EBUSY);
}

SwapFolder::~SwapFolder() {
  if (lock(lock_, LOCK_EX | LOCK_NB)) remove_folder(folder_);
  close_lock(lock_);
}

int SwapFolder::create(int rank, std::string& name) {
  const std::string start = folder_ + "/rank-" + std::to_string(rank);
  for (int i = 0;; ++i) {
    name = i == 0 ? start : start + "." + std::to_string(i);
    const int fd = ::open(name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (fd >= 0) return fd;
    if (errno != EEXIST) fail("cannot create " + name, errno);
  }
}

void SwapFolder::remove(const std::string& name) const { ::unlink(name.c_str()); }

void remove_abandoned(const std::string& path, const std::function<void(const std::string&)>& removed) {
  for (const std::string& name : names_in(path)) {
    if (name.compare(0, std::strlen(kStart), kStart) != 0) continue;
    const std::string folder = path + "/" + name;
    struct stat about {};
    if (::lstat(folder.c_str(), &about) != 0 || !S_ISDIR(about.st_mode) || about.st_uid != ::geteuid()) continue;
    const int fd = open_lock(folder + kLock, O_RDWR | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0) {
      ::rmdir(folder.c_str());  // created but never locked; removed only if it is empty
      continue;
    }
    if (lock(fd, LOCK_EX | LOCK_NB)) {
      remove_folder(folder);
      removed(folder);
    }
    close_lock(fd);
  }
}

}  // namespace nvme
