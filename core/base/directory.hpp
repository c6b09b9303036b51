// A directory held open by its descriptor, the files in it, and a lock on it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/file.hpp"

namespace zr::host {

/// A directory opened once: later calls use its descriptor, so renaming or replacing its path does not redirect them.
/// Names are single path components, and no call follows a symbolic link that has such a name. All methods throw
/// Failure(environment). One thread at a time.
class Directory {
 public:
  /// Opens `path`; symbolic links in its parents and in itself are followed. `make`: creates it, and its parents,
  /// first.
  static Directory open(const std::string& path, bool make);
  ~Directory();
  /// The other has no directory then.
  Directory(Directory&& other) noexcept;
  Directory& operator=(Directory&&) = delete;

  const std::string& path() const { return path_; }  // as it was opened, for messages
  /// The directory `name` in this one, created if it is missing.
  Directory subdirectory(const std::string& name) const;
  /// The directory `name` in this one, which must exist.
  Directory existing(const std::string& name) const;
  /// Creates the directory `name`; false: the name is taken.
  bool make(const std::string& name) const;
  /// Creates the file `name`, which must not exist, for writing.
  File create(const std::string& name) const;
  /// Opens the regular file `name`, which must exist, for reading and writing.
  File open_file(const std::string& name) const;
  /// The contents of the regular file `name`; nothing if there is no such entry.
  std::optional<std::string> read(const std::string& name) const;
  /// Replaces `name` in one step: writes a temporary file beside it, syncs and renames it.
  void write(const std::string& name, const std::string& text) const;
  /// Makes `name` a symbolic link to `target`, in one step; replaces an earlier link or file.
  void link(const std::string& target, const std::string& name) const;
  /// What the symbolic link `name` points to; nothing if there is no such link.
  std::optional<std::string> link_target(const std::string& name) const;
  /// Moves `name` to `to`, which may be this directory, under the same name.
  void move(const std::string& name, const Directory& to) const;
  /// Renames an entry of this directory in one step; a file of the new name is replaced.
  void rename(const std::string& from, const std::string& to) const;
  /// Two entries change names in one step. False, with errno set: the file system cannot do that.
  bool exchange(const std::string& a, const std::string& b) const;
  /// Removes a file or a link, if it exists.
  void remove(const std::string& name) const;
  /// Removes an entry and, if it is a directory, everything in it. Nothing happens if it does not exist.
  void remove_all(const std::string& name) const;
  /// True if there is an entry of any kind of that name.
  bool has(const std::string& name) const;
  /// True if there is a regular file, not a link, of that name.
  bool has_file(const std::string& name) const;
  std::vector<std::string> list() const;  // names, sorted
  /// Returns when created and renamed entries survive a loss of power.
  void sync() const;
  /// The user who owns this directory, as the file system reports it.
  uint32_t owner() const;

 private:
  friend class FileLock;
  Directory(std::string path, int fd);
  std::string in(const std::string& name) const;
  std::string path_;
  int fd_ = -1;
};

/// A flock on a file, held until the object is destroyed or the process ends in any way. The file holds
/// "process PID on HOST".
class FileLock {
 public:
  /// Locks `name` in `directory`, which it creates if missing. Nothing if another holder has it; `holder` is then its
  /// text. The lock is between objects, also of one process.
  static std::optional<FileLock> try_take(const Directory& directory, const std::string& name, std::string& holder);
  ~FileLock();
  FileLock(FileLock&& other) noexcept;  // the other has no lock then
  FileLock& operator=(FileLock&&) = delete;

 private:
  explicit FileLock(int fd) : fd_(fd) {}
  int fd_ = -1;
};

}  // namespace zr::host
