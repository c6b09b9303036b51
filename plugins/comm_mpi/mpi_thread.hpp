// The one thread of a process that calls MPI, for all communicators of the process.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace mpi {

/// Throws PluginError if `code` is an error of MPI; `call` names what failed. [MPI thread]
void check(int code, const std::string& call);

/// [any], except where it says otherwise.
class MpiThread {
 public:
  /// What the thread advances. Its methods run on the thread.
  class Client {
   public:
    struct State {
      bool is_active, has_moved;  // there are operations to advance; one of them has advanced
    };
    virtual ~Client() = default;
    virtual State advance() noexcept = 0;
  };

  /// Starts the thread, and with the first call MPI, which ends when the process exits, because it cannot start twice.
  /// Throws PluginError if MPI has not started this process, or has failed in it. [control]
  static MpiThread& start();
  /// Why the next start() may end the process, which OpenMPI does if the launcher does not suit it; or "". [control]
  static std::string doubt();
  /// Ends the thread, if it runs. [control]
  static void stop() noexcept;

  /// Runs the function on the thread and waits; throws what it throws.
  void run(const std::function<void()>& function);
  /// Advances the client from now on, and until remove() has returned.
  void add(Client& client);
  /// Waits while the client advances.
  void remove(Client& client) noexcept;
  /// Call when a client has become active.
  void wake() noexcept;
  /// Call at least once per millisecond while the program waits for an operation: the thread then polls more often.
  void hurry() noexcept;
  /// Call after a failure. MPI is not called again in this process: messages in flight may use memory that is free, and
  /// the end of MPI would wait for ranks that may be gone.
  static void give_up() noexcept;
  static bool has_given_up() noexcept;
  ~MpiThread();

 private:
  struct Call {
    const std::function<void()>* function;
    std::exception_ptr failure;
    bool is_done = false;
  };
  MpiThread();
  void loop();
  bool is_due() const { return is_woken_ || is_ending_ || !calls_.empty(); }  // holding mutex_
  void pause(std::chrono::steady_clock::time_point moved);
  bool take_calls(bool is_active);
  void make_calls();

  std::mutex mutex_;
  std::condition_variable changed_, done_;
  std::vector<Call*> calls_, taken_;
  std::vector<Client*> clients_;  // [MPI thread]
  int idle_rounds_ = 0;           // [MPI thread] since an operation was in progress
  std::atomic<std::chrono::steady_clock::time_point> hurried_{};
  bool is_woken_ = false, is_ending_ = false;
  std::thread thread_;
};

}  // namespace mpi
