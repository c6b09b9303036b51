#include "base/directory.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>
#include <utility>

#include "base/error.hpp"
#include "base/text.hpp"

namespace zr::host {

namespace {
constexpr mode_t kFileMode = 0666, kFolderMode = 0777;

std::string temporary(const std::string& name) { return fmt::format(".{}.tmp", name); }
}  // namespace

Directory::Directory(std::string path, int fd) : path_(std::move(path)), fd_(fd) {}

Directory Directory::open(const std::string& path, bool make) {
  if (make) make_folder(path);
  const int fd = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) fail_file(path, "cannot be opened", errno);
  return {path, fd};
}

Directory::~Directory() {
  if (fd_ >= 0) ::close(fd_);
}

Directory::Directory(Directory&& other) noexcept : path_(std::move(other.path_)), fd_(std::exchange(other.fd_, -1)) {}

std::string Directory::in(const std::string& name) const { return fmt::format("{}/{}", path_, name); }

bool Directory::make(const std::string& name) const {
  if (::mkdirat(fd_, name.c_str(), kFolderMode) == 0) return true;
  if (errno != EEXIST) fail_file(in(name), "cannot be created", errno);
  return false;
}

Directory Directory::subdirectory(const std::string& name) const {
  make(name);
  return existing(name);
}

Directory Directory::existing(const std::string& name) const {
  const int fd = ::openat(fd_, name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  if (fd < 0) {
    // For a link, O_DIRECTORY fails before O_NOFOLLOW does.
    const bool linked = errno == ENOTDIR && link_target(name);
    fail_file(in(name), "cannot be opened", linked ? ELOOP : errno);
  }
  return {in(name), fd};
}

File Directory::create(const std::string& name) const {
  const int error = injected_error("open");
  const int fd =
      error ? -1 : ::openat(fd_, name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, kFileMode);
  if (fd < 0) fail_file(in(name), "cannot be created", error ? error : errno);
  return File(in(name), fd);
}

File Directory::open_file(const std::string& name) const {
  const int error = injected_error("open");
  const int fd = error ? -1 : ::openat(fd_, name.c_str(), O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
  if (fd < 0) fail_file(in(name), "cannot be opened", error ? error : errno);
  File file(in(name), fd);
  struct stat status {};
  if (::fstat(fd, &status) != 0) fail_file(in(name), "cannot be examined", errno);
  if (!S_ISREG(status.st_mode)) fail_file(in(name), "is not a regular file", EINVAL);
  return file;
}

std::optional<std::string> Directory::read(const std::string& name) const {
  const int fd = ::openat(fd_, name.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
  if (fd < 0 && errno == ENOENT) return {};
  if (fd < 0) fail_file(in(name), "cannot be opened", errno);
  const File file(in(name), fd);
  struct stat status {};
  if (::fstat(fd, &status) != 0) fail_file(in(name), "cannot be examined", errno);
  if (!S_ISREG(status.st_mode)) fail_file(in(name), "is not a regular file", S_ISDIR(status.st_mode) ? EISDIR : EINVAL);
  std::string text(static_cast<std::size_t>(status.st_size), '\0');
  file.read(0, text.data(), status.st_size);
  return text;
}

void Directory::write(const std::string& name, const std::string& text) const {
  const std::string temporary_name = temporary(name);
  remove(temporary_name);
  try {
    File file = create(temporary_name);
    file.write(0, text.data(), static_cast<int64_t>(text.size()));
    file.sync();
  } catch (const Error&) {
    ::unlinkat(fd_, temporary_name.c_str(), 0);
    throw;
  }
  rename(temporary_name, name);
}

void Directory::rename(const std::string& from, const std::string& to) const {
  const int error = injected_error("rename");
  if (error || ::renameat(fd_, from.c_str(), fd_, to.c_str()) != 0)
    fail_file(in(from), "cannot be renamed to " + in(to), error ? error : errno);
}

bool Directory::exchange(const std::string& a, const std::string& b) const {
  return ::renameat2(fd_, a.c_str(), fd_, b.c_str(), RENAME_EXCHANGE) == 0;
}

void Directory::link(const std::string& target, const std::string& name) const {
  const std::string temporary_name = temporary(name);
  remove(temporary_name);
  if (::symlinkat(target.c_str(), fd_, temporary_name.c_str()) != 0 ||
      ::renameat(fd_, temporary_name.c_str(), fd_, name.c_str()) != 0)
    fail_file(in(name), "cannot be made a symbolic link", errno);
}

std::optional<std::string> Directory::link_target(const std::string& name) const {
  std::array<char, PATH_MAX> target;
  const ssize_t n = ::readlinkat(fd_, name.c_str(), target.data(), target.size());
  if (n < 0) return {};
  return std::string(target.data(), static_cast<std::size_t>(n));
}

void Directory::remove(const std::string& name) const {
  if (::unlinkat(fd_, name.c_str(), 0) != 0 && errno != ENOENT) fail_file(in(name), "cannot be removed", errno);
}

void Directory::remove_all(const std::string& name) const {
  if (::unlinkat(fd_, name.c_str(), 0) == 0 || errno == ENOENT) return;
  if (errno != EISDIR) fail_file(in(name), "cannot be removed", errno);
  {
    const Directory directory = existing(name);
    for (const std::string& entry : directory.list()) directory.remove_all(entry);
  }
  if (::unlinkat(fd_, name.c_str(), AT_REMOVEDIR) != 0 && errno != ENOENT)
    fail_file(in(name), "cannot be removed", errno);
}

bool Directory::has(const std::string& name) const {
  struct stat status {};
  return ::fstatat(fd_, name.c_str(), &status, AT_SYMLINK_NOFOLLOW) == 0;
}

bool Directory::has_file(const std::string& name) const {
  struct stat status {};
  return ::fstatat(fd_, name.c_str(), &status, AT_SYMLINK_NOFOLLOW) == 0 && S_ISREG(status.st_mode);
}

std::vector<std::string> Directory::list() const {
  // A separate descriptor: fdopendir() takes ownership of it, and it has its own offset.
  const int fd = ::openat(fd_, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const std::unique_ptr<DIR, int (*)(DIR*)> entries(fd < 0 ? nullptr : ::fdopendir(fd), &::closedir);
  if (!entries) fail_file(path_, "cannot be listed", errno);
  std::vector<std::string> names;
  errno = 0;
  while (const dirent* entry = ::readdir(entries.get())) {
    const std::string name = entry->d_name;
    if (name != "." && name != "..") names.push_back(name);
  }
  if (errno) fail_file(path_, "cannot be listed", errno);
  std::sort(names.begin(), names.end());
  return names;
}

void Directory::sync() const {
  int error = injected_error("sync");
  if (error == 0) {
    int result = 0;
    do result = ::fsync(fd_);
    while (result != 0 && errno == EINTR);
    if (result != 0 && errno != EINVAL) error = errno;  // EINVAL: the file system does not support fsync on directories
  }
  if (error) fail_file(path_, "changes to its entries may not be on the disk", error);
}

uint32_t Directory::owner() const {
  struct stat status {};
  if (::fstat(fd_, &status) != 0) fail_file(path_, "cannot be examined", errno);
  return status.st_uid;
}

namespace {
// "PID on HOST" of the text in a lock file, if HOST is this host and the process has ended; else 0.
pid_t ended_holder(const std::string& holder, const std::string& host) {
  int pid = 0;
  std::array<char, HOST_NAME_MAX + 1> name{};
  static_assert(HOST_NAME_MAX == 64);
  if (std::sscanf(holder.c_str(), "process %d on %64s", &pid, name.data()) != 2 || host != name.data()) return 0;
  return ::kill(pid, 0) != 0 && errno == ESRCH ? pid : 0;
}

// The processes of this user that have the file open, as in "123 (python), 124 (sleep)".
std::string processes_with(int fd) {
  std::string list;
  std::error_code error;
  const std::filesystem::path own = std::filesystem::read_symlink(fmt::format("/proc/self/fd/{}", fd), error);
  for (const auto& process : std::filesystem::directory_iterator("/proc", error)) {
    const std::string pid = process.path().filename().string();
    if (pid.find_first_not_of("0123456789") != pid.npos || pid == std::to_string(::getpid())) continue;
    std::error_code hidden;
    for (const auto& entry : std::filesystem::directory_iterator(process.path() / "fd", hidden)) {
      // Compares names, because stat() of a file on a mount that does not answer would wait for ever.
      if (std::filesystem::read_symlink(entry.path(), hidden) != own) continue;
      std::string name;
      std::getline(std::ifstream(process.path() / "comm"), name);
      list += fmt::format("{}{} ({})", list.empty() ? "" : ", ", pid, name);
      break;
    }
  }
  return list;
}

std::string host_name() {
  std::array<char, HOST_NAME_MAX + 1> host{};
  ::gethostname(host.data(), host.size() - 1);
  return host.data();
}

// What the lock file says about its holder. A process that the holder has started may hold the lock after it has ended.
std::string holder_text(int fd) {
  std::array<char, HOST_NAME_MAX + 64> text{};
  const ssize_t n = ::pread(fd, text.data(), text.size() - 1, 0);
  std::string holder(text.data(), n > 0 ? static_cast<std::size_t>(n) : 0);
  while (!holder.empty() && holder.back() == '\n') holder.pop_back();
  if (ended_holder(holder, host_name()) == 0) return holder;
  const std::string others = processes_with(fd);
  return fmt::format("{}, which has ended, but {} still holds its lock", holder,
                     others.empty() ? "a process that it started" : "process " + others);
}
}  // namespace

std::optional<FileLock> FileLock::try_take(const Directory& directory, const std::string& name, std::string& holder) {
  const std::string path = directory.in(name);
  OwnDescriptor file([&] {
    return ::openat(directory.fd_, name.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, kFileMode);
  });
  const int error = errno;
  struct stat status {};
  const auto reject = [&] {
    fail_user(fmt::format("{}: is {}, not a regular file; remove it", printable(path), file_kind_text(status.st_mode)));
  };
  if (file.get() < 0) {
    const bool is_other = error == EISDIR || error == ENXIO;
    if (is_other && ::fstatat(directory.fd_, name.c_str(), &status, AT_SYMLINK_NOFOLLOW) == 0) reject();
    fail_file(path, "cannot be created", error);
  }
  if (::fstat(file.get(), &status) != 0) fail_file(path, "cannot be examined", errno);
  if (!S_ISREG(status.st_mode)) reject();
  if (::flock(file.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) fail_file(path, "cannot be locked", errno);
    holder = holder_text(file.get());
    return {};
  }
  if (status.st_size > 0 && !holder_text(file.get()).starts_with("process "))
    fail_user(fmt::format("{}: is a file of another program, but its name is that of a lock; move it to another folder",
                          printable(path)));
  const std::string process = fmt::format("process {} on {}\n", ::getpid(), host_name());
  if (::ftruncate(file.get(), 0) != 0) fail_file(path, "cannot be written", errno);
  const ssize_t n = ::pwrite(file.get(), process.data(), process.size(), 0);
  if (n != std::ssize(process)) fail_file(path, "cannot be written", n < 0 ? errno : ENOSPC);
  return FileLock(std::move(file));
}

}  // namespace zr::host
