#include "control/job_secret.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "base/error.hpp"
#include "base/hex.hpp"

namespace zr::host::control {

namespace {
constexpr std::size_t kSecretBytes = 16;
constexpr time_t kOldSeconds = 24 * 3600;  // no launcher takes longer to start all ranks
constexpr int kPortDigits = 5;
constexpr std::size_t kFileBytes = 2 * kSecretBytes + kPortDigits;
constexpr const char* kRemedy = ", or set ZR_TOKEN to the same secret on every rank";

std::string hash_text(const std::string& text) {
  uint64_t hash = 14695981039346656037u;  // FNV-1a
  for (const char c : text) hash = (hash ^ static_cast<uint8_t>(c)) * 1099511628211u;
  return hex(hash);
}

// Opens the folder if only this user can access it; else returns -1 and sets `problem`.
int open_private(const std::string& folder, std::string& problem) {
  const int fd = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  struct stat status {};
  if (fd < 0 || ::fstat(fd, &status) != 0) {
    problem = std::strerror(errno);
  } else if (status.st_uid != ::geteuid()) {
    problem = fmt::format("it belongs to user {}", status.st_uid);
  } else if (status.st_mode & 077) {
    problem = fmt::format("other users have access to it (chmod 700 {})", folder);
  } else {
    return fd;
  }
  if (fd >= 0) ::close(fd);
  return -1;
}

bool is_private(const std::string& folder) {
  std::string problem;
  const int fd = folder.empty() || folder[0] != '/' ? -1 : open_private(folder, problem);
  if (fd >= 0) ::close(fd);
  return fd >= 0;
}
}  // namespace

std::string random_hex(std::size_t bytes) {
  std::string random(bytes, '\0');
  for (char& byte : random)
    if (::getrandom(&byte, 1, 0) != 1) fail_environment("cannot get random numbers from the system (getrandom)");
  return hex_of_bytes(random);
}

JobSecret::JobSecret(const std::string& job) : name_("job-" + hash_text(job)) {
  const char* set = std::getenv("XDG_RUNTIME_DIR");
  const std::string runtime = set ? set : "";
  folder_ = is_private(runtime) ? runtime + "/zeroth" : fmt::format("/tmp/zeroth-{}", ::geteuid());
  path_ = fmt::format("{}/{}", folder_, name_);
  std::string problem;
  const bool folder_exists = ::mkdir(folder_.c_str(), 0700) == 0 || errno == EEXIST;
  if (!folder_exists) problem = std::strerror(errno);
  if (folder_exists) fd_ = open_private(folder_, problem);
  if (fd_ < 0)
    fail_environment(fmt::format(
        "the ranks on this node cannot share a secret in {}: {}; make it a folder that only this user can access{}",
        folder_, problem, kRemedy));
}

JobSecret::~JobSecret() {
  remove();
  ::close(fd_);
}

// Removes secrets that killed jobs have left. A secret is of use only until all ranks have joined.
void JobSecret::remove_old() const {
  const int fd = ::dup(fd_);
  DIR* const folder = fd < 0 ? nullptr : ::fdopendir(fd);
  if (!folder) {
    if (fd >= 0) ::close(fd);
    return;
  }
  while (const dirent* entry = ::readdir(folder)) {
    const std::string_view name = entry->d_name;
    struct stat status {};
    if (name.starts_with("job-") && ::fstatat(fd_, entry->d_name, &status, AT_SYMLINK_NOFOLLOW) == 0 &&
        S_ISREG(status.st_mode) && ::time(nullptr) - status.st_mtime > kOldSeconds)
      ::unlinkat(fd_, entry->d_name, 0);
  }
  ::closedir(folder);
}

std::string new_secret() { return random_hex(kSecretBytes); }

void JobSecret::create(const Shared& shared) {
  remove_old();
  const std::string secret = fmt::format("{}{:0{}}", shared.token, shared.port, kPortDigits);
  const std::string temporary_name = fmt::format("{}.{}", name_, ::getpid());
  ::unlinkat(fd_, temporary_name.c_str(), 0);
  const int fd = ::openat(fd_, temporary_name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
  const bool written = fd >= 0 && ::write(fd, secret.data(), secret.size()) == static_cast<ssize_t>(secret.size());
  const int error = errno;
  if (fd >= 0) ::close(fd);
  if (!written || ::renameat(fd_, temporary_name.c_str(), fd_, name_.c_str()) != 0) {
    const int last = written ? errno : error;
    ::unlinkat(fd_, temporary_name.c_str(), 0);
    fail_environment(fmt::format("{}: cannot write the job's secret: {}; make the folder writable{}", path_,
                                 std::strerror(last), kRemedy));
  }
  created_ = shared;
}

std::optional<JobSecret::Shared> JobSecret::read() const {
  const int fd = ::openat(fd_, name_.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
  if (fd < 0) return {};
  struct stat status {};
  std::array<char, kFileBytes + 1> text{};
  const bool sound = ::fstat(fd, &status) == 0 && S_ISREG(status.st_mode) && status.st_uid == ::geteuid();
  const ssize_t bytes_read = sound ? ::read(fd, text.data(), text.size()) : -1;
  ::close(fd);
  if (bytes_read != static_cast<ssize_t>(kFileBytes)) return {};
  Shared shared{std::string(text.data(), 2 * kSecretBytes), 0};
  const char* const end = text.data() + kFileBytes;
  const auto [stop, error] = std::from_chars(text.data() + 2 * kSecretBytes, end, shared.port);
  if (error != std::errc() || stop != end || shared.port == 0) return {};
  return shared;
}

void JobSecret::remove() {
  if (created_ && read() == created_) ::unlinkat(fd_, name_.c_str(), 0);
  created_.reset();
}

}  // namespace zr::host::control
