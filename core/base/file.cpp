#include "base/file.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "base/error.hpp"
#include "base/text.hpp"

namespace zr::host {

namespace fs = std::filesystem;

namespace {
// Repeats a call that a signal interrupted.
template <class F>
int retry(F&& call) {
  int result;
  do result = call();
  while (result != 0 && errno == EINTR);
  return result;
}

constexpr int64_t kMaxTextBytes = int64_t{1} << 30;

std::string too_large_remedy() {
  struct rlimit limit {};
  if (::getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY)
    return "use a file system that allows larger files";
  return fmt::format("files of this process may have at most {} (ulimit -f): raise this limit",
                     bytes_text(static_cast<int64_t>(limit.rlim_cur)));
}
}  // namespace

void report_file_size_limit() {
  struct sigaction action {};
  if (::sigaction(SIGXFSZ, nullptr, &action) == 0 && action.sa_handler == SIG_DFL) ::signal(SIGXFSZ, SIG_IGN);
}

std::string file_kind_text(mode_t mode) {
  return S_ISFIFO(mode)                   ? "a FIFO"
         : S_ISDIR(mode)                  ? "a folder"
         : S_ISSOCK(mode)                 ? "a socket"
         : S_ISCHR(mode) || S_ISBLK(mode) ? "a device"
                                          : "not a file";
}

void fail_file(const std::string& path, const std::string& what, int error) {
  std::string remedy = "check that the folder exists, that its disk works, and that this user may write to it";
  if (error == ENOSPC || error == EDQUOT) remedy = "free space on this disk, or use another folder";
  if (error == EFBIG) remedy = too_large_remedy();
  if (error == EMFILE) remedy = "this process has too many open files: raise the limit (ulimit -n)";
  if (error == ENFILE) remedy = "the machine has too many open files: close other programs";
  if (error == EIO) remedy = "the disk reports errors; use a folder on another disk";
  if (error == ELOOP)
    fail_environment(
        fmt::format("{}: {}: it is a symbolic link, which is not followed here; replace the link with what it points "
                    "to, or remove it",
                    path, what));
  fail_environment(fmt::format("{}: {}: {}; {}", path, what, std::strerror(error), remedy));
}

File::File(const std::string& path, Mode mode) : path_(path) {
  const bool reads = mode == Mode::read || mode == Mode::read_following_links;
  const int flags = (reads ? O_RDONLY : O_RDWR) | (mode == Mode::create ? O_CREAT | O_EXCL : 0) |
                    (mode == Mode::read_following_links ? 0 : O_NOFOLLOW) | O_CLOEXEC |
                    O_NONBLOCK;  // opening a FIFO would block
  const int error = injected_error("open");
  fd_ = error ? -1 : ::open(path.c_str(), flags, 0666);
  if (fd_ < 0 && !error && reads && (errno == ENOENT || errno == EACCES || errno == ENOTDIR))
    fail_environment(fmt::format("{}: cannot be opened: {}; check that it exists and that this user may read it",
                                 printable(path), std::strerror(errno)));
  if (fd_ < 0) fail_file(path, mode == Mode::create ? "cannot be created" : "cannot be opened", error ? error : errno);
  struct stat status {};
  std::string kind;
  if (::fstat(fd_, &status) == 0 && !S_ISREG(status.st_mode)) kind = file_kind_text(status.st_mode);
  if (kind.empty()) return;
  ::close(std::exchange(fd_, -1));
  fail_user(fmt::format("{}: is {}, not a regular file; replace it with the file itself", printable(path), kind));
}

File::~File() {
  if (fd_ >= 0) ::close(fd_);
}

File::File(File&& other) noexcept : path_(std::move(other.path_)), fd_(std::exchange(other.fd_, -1)) {}

void File::resize(int64_t bytes) {
  int error = injected_error("resize");
  if (error == 0 && retry([&] { return ::ftruncate(fd_, bytes); }) != 0) error = errno;
  if (error) fail_file(path_, "cannot allocate " + bytes_text(bytes), error);
}

void File::reserve(int64_t at, int64_t bytes) {
  int error = injected_error("reserve");
  if (error == 0 && retry([&] { return ::fallocate(fd_, 0, at, bytes); }) != 0 && errno != EOPNOTSUPP &&
      errno != ENOSYS)
    error = errno;
  if (error) fail_file(path_, "cannot allocate " + bytes_text(bytes), error);
}

void File::write(int64_t at, const void* data, int64_t bytes) {
  const char* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const int error = injected_error("write");
    const auto max_bytes = static_cast<std::size_t>(shortened_write("write", bytes));
    const ssize_t n = error ? -1 : ::pwrite(fd_, from, max_bytes, at);
    if (n < 0 && !error && errno == EINTR) continue;
    if (n <= 0) fail_file(path_, fmt::format("writing at byte {} failed", at), error ? error : n == 0 ? ENOSPC : errno);
    from += n;
    at += n;
    bytes -= n;
  }
}

void File::read(int64_t at, void* data, int64_t bytes) const {
  char* to = static_cast<char*>(data);
  while (bytes > 0) {
    const int error = injected_error("read");
    const ssize_t n = error ? -1 : ::pread(fd_, to, static_cast<std::size_t>(bytes), at);
    if (n < 0 && !error && errno == EINTR) continue;
    if (n < 0) fail_file(path_, fmt::format("reading at byte {} failed", at), error ? error : errno);
    if (n == 0) fail_user(fmt::format("{}: ends at byte {}, but more data is expected: it is truncated", path_, at));
    to += n;
    at += n;
    bytes -= n;
  }
}

int64_t File::size() const {
  struct stat status {};
  if (::fstat(fd_, &status) != 0) fail_file(path_, "cannot be examined", errno);
  return status.st_size;
}

uint32_t File::owner() const {
  struct stat status {};
  if (::fstat(fd_, &status) != 0) fail_file(path_, "cannot be examined", errno);
  return status.st_uid;
}

void File::begin_sync(int64_t at, int64_t bytes) {
  // Where the call is not supported, sync() does all the work.
  static_cast<void>(::sync_file_range(fd_, at, bytes, SYNC_FILE_RANGE_WRITE));
}

void File::sync() {
  int error = injected_error("sync");
  if (error == 0 && retry([&] { return ::fdatasync(fd_); }) != 0) error = errno;
  if (error) fail_file(path_, "written data may not be on the disk", error);
}

void write_file(const std::string& path, const std::string& text) {
  const std::string temporary = path + ".partial";
  remove_path(temporary);
  {
    File file(temporary, File::Mode::create);
    file.write(0, text.data(), static_cast<int64_t>(text.size()));
    file.sync();
  }
  rename_path(temporary, path);
}

std::string read_file(const std::string& path) {
  const File file(path, File::Mode::read);
  if (file.size() > kMaxTextBytes)
    fail_user(fmt::format("{}: is {} large, more than the limit of {} for such a file; load another checkpoint", path,
                          bytes_text(file.size()), bytes_text(kMaxTextBytes)));
  std::string text(static_cast<std::size_t>(file.size()), '\0');
  file.read(0, text.data(), static_cast<int64_t>(text.size()));
  return text;
}

void sync_folder(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  int error = fd < 0 ? errno : injected_error("sync");
  if (fd >= 0 && error == 0 && retry([&] { return ::fsync(fd); }) != 0 && errno != EINVAL)
    error = errno;  // EINVAL: the file system does not support fsync on folders
  if (fd >= 0) ::close(fd);
  if (error) fail_file(path, "changes to its entries may not be on the disk", error);
}

void rename_path(const std::string& from, const std::string& to) {
  const int error = injected_error("rename");
  if (error || ::rename(from.c_str(), to.c_str()) != 0)
    fail_file(from, "cannot be renamed to " + to, error ? error : errno);
}

void make_folder(const std::string& path) {
  std::error_code error;
  std::vector<fs::path> parents;  // parents of created folders, the innermost first
  for (fs::path folder = fs::absolute(path); !fs::exists(folder, error) && folder.has_relative_path();
       folder = folder.parent_path())
    parents.push_back(folder.parent_path());
  fs::create_directories(path, error);
  if (error) fail_file(path, "cannot be created", error.value());
  for (const fs::path& folder : parents) sync_folder(folder.string());
}

bool path_exists(const std::string& path) {
  std::error_code error;
  return fs::exists(path, error);
}

void remove_path(const std::string& path) {
  std::error_code error;
  fs::remove_all(path, error);
  if (error) fail_file(path, "cannot be removed", error.value());
}

std::vector<std::string> list_folder(const std::string& path) {
  std::vector<std::string> names;
  std::error_code error;
  fs::directory_iterator entries(path, error);
  if (error == std::errc::no_such_file_or_directory || error == std::errc::not_a_directory) return names;
  if (error) fail_file(path, "cannot be listed", error.value());
  for (const fs::directory_entry& entry : entries) names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace zr::host
