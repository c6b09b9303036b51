// Processes made by fork(): what belongs to the parent only.
#pragma once

#include <cstdint>
#include <functional>

namespace zr::host {

/// The number of fork() calls from the process that loaded this library to the calling process. [any]
uint64_t fork_depth();

/// Remembers the process that made the object: its threads, sockets, locks and peers do not exist in a child.
class OwnerProcess {
 public:
  /// True in a process that fork() made after this object was made. [any]
  bool is_parent() const { return depth_ != fork_depth(); }

 private:
  uint64_t depth_ = fork_depth();
};

/// A descriptor that the children of fork() do not inherit, so that a lock on its file ends with this process.
/// (O_CLOEXEC closes it only at exec.) [any]
class OwnDescriptor {
 public:
  /// Calls `open`, which returns a descriptor or -1. No other thread forks in the meantime; `open` must not fork.
  explicit OwnDescriptor(const std::function<int()>& open);
  /// Closes the descriptor, unless in a child.
  ~OwnDescriptor();
  OwnDescriptor(OwnDescriptor&& other) noexcept;  // leaves `other` without a descriptor
  OwnDescriptor& operator=(OwnDescriptor&&) = delete;
  int get() const { return fd_; }  // -1: none

 private:
  int fd_;
  OwnerProcess owner_;
};

}  // namespace zr::host
