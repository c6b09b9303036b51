// The one thread of a process that calls MPI, for all communicators of the process.
#pragma once

#include <condition_variable>
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

  /// Starts the thread, and MPI on it, with the first call. Throws PluginError if the process was not started by MPI.
  /// MPI ends when the process exits, because it cannot start twice.
  static MpiThread& get();
  /// Runs the function on the thread and waits; throws what it throws.
  void run(const std::function<void()>& function);
  /// Advances the client from now on, and until remove() has returned.
  void add(Client& client);
  /// Waits while the client advances.
  void remove(Client& client) noexcept;
  /// Call when a client has become active.
  void wake() noexcept;
  /// Call after a failure: MPI then does not end in order, which would wait for ranks that may be gone.
  void give_up() noexcept;
  ~MpiThread();

 private:
  MpiThread();
  void loop();
  void start_mpi();
  void end_mpi();
  struct Call {
    const std::function<void()>* function;
    std::exception_ptr failure;
    bool is_done = false;
  };

  std::mutex mutex_;
  std::condition_variable changed_, done_;
  std::vector<Call*> calls_;
  std::vector<Client*> clients_;  // [MPI thread]
  bool is_woken_ = false, is_ending_ = false, has_given_up_ = false, owns_mpi_ = false;
  std::thread thread_;
};

}  // namespace mpi
