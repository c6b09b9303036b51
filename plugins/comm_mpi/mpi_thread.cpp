#include "mpi_thread.hpp"

#include <mpi.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <memory>

#include "zr/base.hpp"

namespace mpi {

namespace {
using Clock = std::chrono::steady_clock;
constexpr auto kSpin = std::chrono::microseconds(50);
constexpr timespec kNap{0, 20000};  // shorter than a socket's buffer takes to fill

// True if a launcher of MPI has started this process. Without one, MPI_Init would start a daemon for it alone.
bool started_by_mpi() {
  for (const char* name : {"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"})
    if (std::getenv(name)) return true;
  return false;
}
}  // namespace

void check(int code, const std::string& call) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0, kind = 0;
  MPI_Error_string(code, text, &length);
  MPI_Error_class(code, &kind);
  if (kind == MPI_ERR_TRUNCATE)
    throw zr::PluginError(ZR_MISMATCH, call + ": a peer sent more than this rank expects; the ranks disagree about it");
  throw zr::PluginError(ZR_COMM, call + ": " + text, code);
}

MpiThread& MpiThread::get() {
  static std::mutex mutex;
  static std::unique_ptr<MpiThread> thread;
  const std::lock_guard lock(mutex);
  if (thread) return *thread;
  if (!started_by_mpi())
    throw zr::PluginError(ZR_UNSUPPORTED,
                          "communicator \"mpi\" needs ranks that MPI has started; start the program with mpirun, for "
                          "example: mpirun -n 4 ./program job.toml");
  std::unique_ptr<MpiThread> starting(new MpiThread);
  starting->run([&] { starting->start_mpi(); });
  thread = std::move(starting);
  return *thread;
}

MpiThread::MpiThread() {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);  // inherited by MPI's own threads
  thread_ = std::thread([this] { loop(); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

MpiThread::~MpiThread() {
  {
    const std::lock_guard lock(mutex_);
    is_ending_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void MpiThread::start_mpi() {
  int is_initialized = 0, level = 0;
  check(MPI_Initialized(&is_initialized), "MPI_Initialized");
  if (!is_initialized) {
    check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &level), "MPI_Init_thread");
    owns_mpi_ = true;
    return;
  }
  check(MPI_Query_thread(&level), "MPI_Query_thread");
  if (level < MPI_THREAD_MULTIPLE)
    throw zr::PluginError(
        ZR_UNSUPPORTED,
        "communicator \"mpi\" calls MPI on a thread of its own, but the program has initialized MPI for "
        "fewer threads; call MPI_Init_thread with MPI_THREAD_MULTIPLE, or let Zeroth initialize MPI");
}

void MpiThread::end_mpi() {
  if (owns_mpi_ && !has_given_up_) MPI_Finalize();
}

void MpiThread::run(const std::function<void()>& function) {
  Call call{&function, {}};
  std::unique_lock lock(mutex_);
  calls_.push_back(&call);
  changed_.notify_all();
  done_.wait(lock, [&] { return call.is_done; });
  if (call.failure) std::rethrow_exception(call.failure);
}

void MpiThread::add(Client& client) {
  run([&] { clients_.push_back(&client); });
}

void MpiThread::remove(Client& client) noexcept {
  run([&] { clients_.erase(std::remove(clients_.begin(), clients_.end(), &client), clients_.end()); });
}

void MpiThread::wake() noexcept {
  {
    const std::lock_guard lock(mutex_);
    is_woken_ = true;
  }
  changed_.notify_all();
}

void MpiThread::give_up() noexcept {
  const std::lock_guard lock(mutex_);
  has_given_up_ = true;
}

// Sleeps while no client is active. While one is, it calls MPI again and again, because OpenMPI moves data only then.
void MpiThread::loop() {
  ::prctl(PR_SET_NAME, "zr-mpi");
  ::prctl(PR_SET_TIMERSLACK, 1);
  bool is_active = false;
  Clock::time_point moved = Clock::now();
  for (;;) {
    std::vector<Call*> calls;
    {
      std::unique_lock lock(mutex_);
      if (!is_active) changed_.wait(lock, [&] { return is_woken_ || is_ending_ || !calls_.empty(); });
      if (is_ending_) break;
      if (is_woken_ || !calls_.empty()) moved = Clock::now();
      is_woken_ = false;
      calls.swap(calls_);
    }
    for (Call* call : calls) {
      try {
        (*call->function)();
      } catch (...) {
        call->failure = std::current_exception();
      }
      const std::lock_guard lock(mutex_);
      call->is_done = true;
      done_.notify_all();
    }
    is_active = false;
    for (Client* client : clients_) {
      const Client::State state = client->advance();
      is_active |= state.is_active;
      if (state.has_moved) moved = Clock::now();
    }
    if (is_active && Clock::now() - moved > kSpin) ::nanosleep(&kNap, nullptr);
  }
  end_mpi();
}

}  // namespace mpi
