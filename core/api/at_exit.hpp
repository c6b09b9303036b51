// What still has to happen when the process exits while engines exist.
#pragma once

#include <functional>
#include <memory>
#include <thread>

#include "base/forked.hpp"

namespace zr {

/// Calls a function when the process exits, before the destructors of static objects that exist when this object is
/// made: plug-ins, libtorch and the program have such objects, and no destructor of them may run before the engine's.
/// Does not call it in a child of the process, or after this object is destroyed. Made on the thread that the function
/// belongs to.
class AtExit {
 public:
  /// `end(exit_code)` must not throw. It may run on another thread only if this one has ended.
  explicit AtExit(std::function<void(int exit_code)> end);
  ~AtExit();
  AtExit(const AtExit&) = delete;
  AtExit& operator=(const AtExit&) = delete;
  /// True in a process that fork() made after this object was made.
  bool in_child() const { return owner_.is_parent(); }
  /// True if what belongs to this object must not be destroyed: in a child, or if the process exits while the thread of
  /// this object may use it.
  bool forbids_destruction() const { return in_child() || (process_exits() && !is_of_this_thread()); }
  /// True from the time at which the process, when it exits, calls the functions of these objects.
  static bool process_exits();

 private:
  static void run_all(int exit_code, void*);
  bool is_of_this_thread() const { return thread_ == std::this_thread::get_id() || thread_life_.expired(); }

  const std::function<void(int exit_code)> end_;
  const std::thread::id thread_ = std::this_thread::get_id();
  const std::weak_ptr<const void> thread_life_;
  const host::OwnerProcess owner_;
};

}  // namespace zr
