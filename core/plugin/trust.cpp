#include "plugin/trust.hpp"

#include <dlfcn.h>
#include <fmt/format.h>
#include <grp.h>
#include <pwd.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <fstream>
#include <map>
#include <system_error>

#include "zr/mutex.hpp"

namespace zr::host::plugin {

namespace fs = std::filesystem;

namespace {
constexpr int kMaxLinks = 40;  // as in Linux

// The uid that the kernel reports for all users unknown in a user namespace; several users share it.
uid_t unknown_user() {
  uid_t user = 65534;
  std::ifstream("/proc/sys/kernel/overflowuid") >> user;
  return user;
}

const std::vector<uid_t>& trusted_users() {
  static const auto* users = new std::vector<uid_t>([] {
    std::vector<uid_t> all;
    struct stat status {};
    if (::stat("/proc/self/exe", &status) == 0) all.push_back(status.st_uid);
    Dl_info self{};
    const auto* here = reinterpret_cast<const void*>(&trust_problem);
    if (::dladdr(here, &self) && self.dli_fname && self.dli_fname[0] == '/' && ::stat(self.dli_fname, &status) == 0)
      all.push_back(status.st_uid);
    std::erase(all, unknown_user());
    all.insert(all.end(), {0, ::geteuid()});
    return all;
  }());
  return *users;
}

bool is_trusted(uid_t user) {
  const auto& all = trusted_users();
  return std::find(all.begin(), all.end(), user) != all.end();
}

std::string user_text(uid_t user) {
  const passwd* entry = ::getpwuid(user);
  return entry ? fmt::format("'{}' (uid {})", entry->pw_name, user) : fmt::format("uid {}", user);
}

// True if `group` is the owner's private group, and all its members in this machine's user tables are trusted.
bool is_private_group(gid_t group, uid_t owner) {
  static Mutex mutex;  // getgrgid(), getpwuid() and getpwent() are not thread-safe
  static std::map<std::pair<gid_t, uid_t>, bool> results ZR_GUARDED_BY(mutex);
  const MutexLock lock(mutex);
  const auto [at, fresh] = results.try_emplace({group, owner}, false);
  if (!fresh) return at->second;
  const struct group* entry = ::getgrgid(group);
  if (!entry) return false;
  const std::string name = entry->gr_name;
  std::vector<std::string> members;
  for (char** member = entry->gr_mem; *member; ++member) members.emplace_back(*member);
  const passwd* user = ::getpwuid(owner);
  bool trusted = user && name == user->pw_name;
  for (const std::string& member : members) {
    user = ::getpwnam(member.c_str());
    trusted = trusted && user && is_trusted(user->pw_uid);
  }
  ::setpwent();
  while (trusted && (user = ::getpwent()))
    if (user->pw_gid == group) trusted = is_trusted(user->pw_uid);
  ::endpwent();
  return at->second = trusted;
}

// A problem with a component of the path.
struct Problem {
  RejectionCause cause = RejectionCause::none;
  std::string text;
  bool empty() const { return text.empty(); }
};

// Why other users can change the component at `path`, or no problem.
Problem component_problem(const fs::path& path, const struct stat& status, const std::string& what) {
  if (!is_trusted(status.st_uid))
    return {RejectionCause::foreign_owner,
            fmt::format("{} belongs to user {}, who could run code as you; use a copy owned by you, root or the owner "
                        "of zeroth, in a folder with the same owner",
                        what, user_text(status.st_uid))};
  if (S_ISLNK(status.st_mode)) return {};  // the mode of a link has no meaning
  if (S_ISDIR(status.st_mode) && (status.st_mode & S_ISVTX)) return {};
  const bool listed = ::getxattr(path.c_str(), "system.posix_acl_access", nullptr, 0) > 0;
  if ((status.st_mode & S_IWGRP) && (listed || !is_private_group(status.st_gid, status.st_uid)))
    return {
        RejectionCause::writable_by_others,
        fmt::format("{} can be changed by other users, who could run code as you; chmod g-w {}", what, path.string())};
  if (status.st_mode & S_IWOTH)
    return {
        RejectionCause::writable_by_others,
        fmt::format("{} can be changed by other users, who could run code as you; chmod o-w {}", what, path.string())};
  return {};
}

void put_before(const fs::path& path, std::deque<std::string>& rest) {
  std::vector<std::string> parts;
  for (const fs::path& part : path)
    if (!part.empty() && part != "/" && part != ".") parts.push_back(part.string());
  rest.insert(rest.begin(), parts.begin(), parts.end());
}

// Follows a path from / as the kernel does, one component at a time, links included, and checks each component.
class PathWalk {
 public:
  explicit PathWalk(const fs::path& file) { put_before(file, rest_); }

  bool at_end() const { return rest_.empty(); }
  void enter_next() {
    const std::string name = rest_.front();
    rest_.pop_front();
    at_ = name == ".." ? at_.parent_path() : at_ / name;
  }
  /// Checks the current component, and follows it if it is a link.
  Problem check_component() {
    if (::lstat(at_.c_str(), &status_) != 0) return missing_problem(errno);
    Problem problem = component_problem(at_, status_, component_text());
    if (!problem.empty() || !is_link()) return problem;
    return follow_link();
  }
  const fs::path& at() const { return at_; }
  const struct stat& status() const { return status_; }  // of the component that was checked last

 private:
  bool is_link() const { return S_ISLNK(status_.st_mode); }

  Problem missing_problem(int error) const {
    if (links_ == 0) return {RejectionCause::bad_path, at_.string() + ": " + std::strerror(error)};
    return {RejectionCause::broken_link, "it is a link to " + at_.string() + ", which cannot be opened: " +
                                             std::strerror(error) + "; correct or remove the link"};
  }
  // The current component, for messages.
  std::string component_text() const {
    if (is_link()) return "the link " + at_.string();
    if (at_end()) return links_ ? fmt::format("the file it links to, {},", at_.string()) : "it";
    return at_ == "/" ? "the root folder /" : "its folder " + at_.string();
  }
  Problem follow_link() {
    constexpr auto kCause = RejectionCause::broken_link;
    if (++links_ > kMaxLinks) return {kCause, "more than 40 symbolic links lead to it; name the file itself"};
    std::error_code error;
    const fs::path target = fs::read_symlink(at_, error);
    if (error) return {kCause, fmt::format("the link {} cannot be read: {}", at_.string(), error.message())};
    at_ = target.is_absolute() ? fs::path("/") : at_.parent_path();
    put_before(target, rest_);
    return {};
  }

  fs::path at_ = "/";
  std::deque<std::string> rest_;  // the components after at_
  struct stat status_ {};
  int links_ = 0;  // followed so far
};

}  // namespace

std::string trust_problem(const fs::path& file, TrustedFile& result, Rejection* rejection) {
  Rejection unused;
  Rejection& why = rejection ? *rejection : unused;
  std::string text;
  // After the first problem, only finds the other components that its remedy must change.
  PathWalk walk(file);
  for (;;) {
    const Problem problem = walk.check_component();
    const bool writable = problem.cause == RejectionCause::writable_by_others;
    if (text.empty() && !problem.empty()) {
      text = problem.text;
      why = {problem.cause, {problem.cause == RejectionCause::broken_link ? file.string() : walk.at().string()}};
    } else if (writable) {
      why.subjects.push_back(walk.at().string());
    }
    if (walk.at_end() || (!problem.empty() && !writable)) break;
    walk.enter_next();
  }
  if (!text.empty()) return text;
  if (!S_ISREG(walk.status().st_mode)) {
    why = {RejectionCause::not_a_file, {file.string()}};
    return "it is not a regular file";
  }
  result = {walk.at(), walk.status().st_dev, walk.status().st_ino};
  return "";
}

bool is_unchanged(const TrustedFile& file) {
  struct stat status {};
  return ::lstat(file.path.c_str(), &status) == 0 && S_ISREG(status.st_mode) && status.st_dev == file.device &&
         status.st_ino == file.inode;
}

}  // namespace zr::host::plugin
