#include "api/at_exit.hpp"

#include <cstdlib>
#include <utility>
#include <vector>

#include "base/process_exit.hpp"
#include "zr/mutex.hpp"

namespace zr {

namespace {
struct AllAtExit {
  Mutex mutex;
  std::vector<const AtExit*> objects ZR_GUARDED_BY(mutex);
};

AllAtExit& all_at_exit() {
  static auto* all = new AllAtExit;  // never destroyed: engines may be destroyed after statics
  return *all;
}

// Expires when the calling thread ends.
std::weak_ptr<const void> life_of_thread() {
  thread_local bool has_ended = false;
  struct Life {
    std::shared_ptr<const void> token = std::make_shared<char>();
    ~Life() { has_ended = true; }
  };
  if (has_ended) return {};
  thread_local const Life life;  // destroyed: at the end of the thread
  return life.token;
}
}  // namespace

// The C library runs the function registered last first, so each object registers it: another plug-in may have been
// loaded since the last time.
AtExit::AtExit(std::function<void(int exit_code)> end) : end_(std::move(end)), thread_life_(life_of_thread()) {
  AllAtExit& all = all_at_exit();
  const MutexLock lock(all.mutex);
  all.objects.push_back(this);
  ::on_exit(&AtExit::run_all, nullptr);
}

bool AtExit::process_exits() { return host::process_exits(); }

AtExit::~AtExit() {
  AllAtExit& all = all_at_exit();
  const MutexLock lock(all.mutex);
  std::erase(all.objects, this);
}

// The newest first. A function may destroy objects, also others.
void AtExit::run_all(int exit_code, void*) {
  AllAtExit& all = all_at_exit();
  host::note_process_exit();
  for (;;) {
    MutexLock lock(all.mutex);
    const AtExit* next = nullptr;
    for (const AtExit* object : all.objects)
      if (!object->in_child() && object->is_of_this_thread()) next = object;
    if (!next) return;
    std::erase(all.objects, next);
    lock.unlock();
    next->end_(exit_code);
  }
}

}  // namespace zr
