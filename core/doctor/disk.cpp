#include "doctor/disk.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <new>
#include <sstream>

#include "base/text.hpp"

namespace zr::host::doctor {

namespace fs = std::filesystem;

namespace {

constexpr int64_t kFewBytes = int64_t{1} << 30;
constexpr std::size_t kBlock = 4096;

// The kernel writes spaces in names as \040.
std::string unescaped(const std::string& text) {
  std::string result;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const bool octal = text[i] == '\\' && i + 3 < text.size() &&
                       text.find_first_not_of("01234567", i + 1) >= std::min(i + 4, text.size());
    result += octal ? static_cast<char>(std::stoi(text.substr(i + 1, 3), nullptr, 8)) : text[i];
    if (octal) i += 3;
  }
  return result;
}

bool is_below(const std::string& path, const std::string& folder) {
  return folder == "/" || path == folder || path.starts_with(folder + "/");
}

fs::path nearest_existing(const fs::path& path) {
  std::error_code error;
  fs::path at = fs::absolute(path, error).lexically_normal();
  while (!fs::exists(at, error) && at.has_parent_path() && at != at.parent_path()) at = at.parent_path();
  return at;
}

// The error of writing one block with O_DIRECT; 0 if it works. The file has no name.
int direct_error_in(const std::string& folder) {
  int fd = ::open(folder.c_str(), O_TMPFILE | O_RDWR | O_EXCL | O_CLOEXEC, 0600);
  if (fd < 0) {  // a file system without unnamed files
    std::string name = folder + "/.zeroth-doctor-XXXXXX";
    fd = ::mkostemp(name.data(), O_CLOEXEC);
    if (fd < 0) return errno;
    ::unlink(name.c_str());
  }
  int error = 0;
  void* const block = ::operator new(kBlock, std::align_val_t(kBlock));
  std::memset(block, 0, kBlock);
  if (::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_DIRECT) != 0) error = errno;
  if (!error && ::pwrite(fd, block, kBlock, 0) < 0) error = errno;
  ::operator delete(block, std::align_val_t(kBlock));
  ::close(fd);
  return error;
}

bool is_memory(const std::string& type) { return type == "tmpfs" || type == "ramfs"; }

// What cannot be written there.
const char* contents(FolderUse use) {
  switch (use) {
    case FolderUse::checkpoint: return "checkpoints cannot be saved";
    case FolderUse::offload: return "states cannot be offloaded";
    default: return "the folder of the run cannot be created";
  }
}

}  // namespace

FileSystemFacts file_system_in(const std::string& mountinfo, const std::string& path) {
  FileSystemFacts found;
  std::istringstream lines(mountinfo);
  for (std::string line; std::getline(lines, line);) {  // "27 1 254:0 / /mnt rw,relatime - ext4 /dev/vda rw"
    std::istringstream words(line);
    std::string word, mount, type;
    for (int i = 0; i < 5; ++i) words >> mount;
    while (words >> word && word != "-") {
    }
    words >> type;
    mount = unescaped(mount);
    if (mount.starts_with('/') && is_below(path, mount) && mount.size() >= found.mount.size()) found = {mount, type};
  }
  return found;
}

FileSystemFacts file_system_facts(const std::string& path) {
  std::ifstream in("/proc/self/mountinfo");
  std::error_code error;
  const fs::path resolved = fs::canonical(path, error);
  return file_system_in({std::istreambuf_iterator<char>(in), {}}, error ? path : resolved.string());
}

FolderFacts folder_facts(const std::string& name, const std::string& path, FolderUse use) {
  FolderFacts facts{name, path, use};
  facts.existing = nearest_existing(path).string();
  std::error_code error;
  const bool exists = fs::exists(path, error);
  struct stat status {};
  struct statvfs space {};
  if (error) facts.error = error.value();
  if (!exists && !facts.error && use == FolderUse::offload) facts.error = ENOENT;
  if (::stat(facts.existing.c_str(), &status) != 0) facts.error = errno;
  if (!facts.error && !S_ISDIR(status.st_mode)) facts.error = ENOTDIR;
  if (facts.error) return facts;
  facts.foreign = status.st_uid != ::geteuid();
  facts.file_system = file_system_facts(facts.existing);
  if (::statvfs(facts.existing.c_str(), &space) == 0) {
    facts.size = static_cast<int64_t>(space.f_blocks * space.f_frsize);
    facts.free = static_cast<int64_t>(space.f_bavail * space.f_frsize);
  }
  if (::access(facts.existing.c_str(), W_OK | X_OK) != 0) facts.write_error = errno;
  if (use == FolderUse::offload && !facts.write_error) facts.direct_error = direct_error_in(facts.existing);
  return facts;
}

Checks folder_checks(const FolderFacts& facts, const JobNeeds& needs, bool is_root) {
  const Verdict unusable = needs.given() ? Verdict::problem : Verdict::warning;
  Check check{"disk", facts.name, Verdict::ok, ""};
  if (facts.error) {
    check.verdict = unusable;
    check.message = fmt::format("{}: {}", facts.path, std::strerror(facts.error));
    if (facts.error == ENOENT)
      check.command = fmt::format("mkdir -p {}", shell_word(facts.path));
    else
      check.message += "; name another folder";
    return {check};
  }
  check.message = fmt::format("{}: {} free of {} (file system {}, {})", facts.path, bytes_text(facts.free),
                              bytes_text(facts.size), facts.file_system.mount, facts.file_system.type);
  if (facts.write_error) {
    check.verdict = unusable;
    check.message += fmt::format("; this user cannot write to {} ({}), so {}", facts.existing,
                                 std::strerror(facts.write_error), contents(facts.use));
    check.command = facts.write_error == EROFS
                        ? as_root(fmt::format("mount -o remount,rw {}", shell_word(facts.file_system.mount)), is_root)
                    : facts.foreign
                        ? as_root(fmt::format("chown \"$(id -un)\" {}", shell_word(facts.existing)), is_root)
                        : fmt::format("chmod u+wx {}", shell_word(facts.existing));
  } else if (facts.size > 0 && facts.free < kFewBytes) {  // some network file systems report no size
    check.verdict = facts.free == 0 ? unusable : Verdict::warning;
    check.message += "; delete files there, or name a folder on a larger disk";
  } else if (facts.use == FolderUse::offload && is_memory(facts.file_system.type)) {
    check.worsen(Verdict::warning, "; this is memory, not a disk: name a folder on a disk");
  }
  Checks checks{check};
  if (facts.direct_error)
    checks.push_back({"disk", facts.name + ", O_DIRECT", *facts.direct_error ? Verdict::warning : Verdict::ok,
                      *facts.direct_error ? fmt::format("not supported by {} ({}), so transfers pass through the page "
                                                        "cache and are slower; name a folder on another file system",
                                                        facts.file_system.type, std::strerror(*facts.direct_error))
                                          : "supported: transfers bypass the page cache"});
  return checks;
}

}  // namespace zr::host::doctor
