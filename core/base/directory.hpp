// A directory held open by its descriptor, the files in it, and a lock on it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/file.hpp"
#include "base/forked.hpp"

namespace zr::host {

/// A directory opened once: later calls use its descriptor, so renaming or replacing its path does not redirect them.
/// Names are single path components, and no call follows a symbolic link that has such a name. All methods throw
/// EnvironmentError. One thread at a time.
class Directory {
 public:
  /// Opens `path`; symbolic links in its parents and in itself are followed. `make`: creates it, and its parents,
  /// first.
  static Directory open(const std::string& path, bool make);
  ~Directory();
  /// Leaves `other` without a directory.
  Directory(Directory&& other) noexcept;
  Directory& operator=(Directory&&) = delete;

  const std::string& path() const { return path_; }  // as passed to open(), for messages
  /// The directory `name` in this one, created if it is missing.
  Directory subdirectory(const std::string& name) const;
  /// The directory `name` in this one, which must exist.
  Directory existing(const std::string& name) const;
  /// Creates the directory `name`; false if the name is taken.
  bool make(const std::string& name) const;
  /// Creates the file `name` for writing; it must not exist.
  File create(const std::string& name) const;
  /// Opens the existing regular file `name` for reading and writing.
  File open_file(const std::string& name) const;
  /// The contents of the regular file `name`; nullopt if there is no such entry.
  std::optional<std::string> read(const std::string& name) const;
  /// Replaces `name` atomically: writes a temporary file in the same directory, syncs and renames it.
  void write(const std::string& name, const std::string& text) const;
  /// Makes `name` a symbolic link to `target`, atomically; replaces an earlier link or file.
  void link(const std::string& target, const std::string& name) const;
  /// The target of the symbolic link `name`; nullopt if there is no such link.
  std::optional<std::string> link_target(const std::string& name) const;
  /// Renames an entry of this directory atomically; replaces a file with the new name.
  void rename(const std::string& from, const std::string& to) const;
  /// Exchanges the names of two entries atomically. False, with errno set, if the file system cannot do that.
  bool exchange(const std::string& a, const std::string& b) const;
  /// Removes a file or a link, if it exists.
  void remove(const std::string& name) const;
  /// Removes an entry and, if it is a directory, everything in it. No effect if it does not exist.
  void remove_all(const std::string& name) const;
  /// True if there is an entry of any kind with that name.
  bool has(const std::string& name) const;
  /// True if there is a regular file, not a link, with that name.
  bool has_file(const std::string& name) const;
  std::vector<std::string> list() const;  // names, sorted
  /// Returns when created and renamed entries would survive a power loss.
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

/// A flock on a file, held until the object is destroyed or the process ends in any way; children that the process has
/// made by fork() do not hold it. The file contains "process PID on HOST".
class FileLock {
 public:
  /// Locks the file `name` in `directory`, and creates it if it is missing. nullopt if the file is locked already;
  /// `holder` then receives its text, and the processes that hold the lock if the process of the text has ended. Two
  /// objects exclude each other, in one process too.
  static std::optional<FileLock> try_take(const Directory& directory, const std::string& name, std::string& holder);

 private:
  explicit FileLock(OwnDescriptor file) : file_(std::move(file)) {}
  OwnDescriptor file_;
};

}  // namespace zr::host
