#include "mpi_thread.hpp"

#include <mpi.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <map>

#include "requests.hpp"
#include "zr/base.hpp"

namespace mpi {

namespace {
using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;
constexpr auto kSpin = microseconds(50);
constexpr auto kNap = microseconds(20);                    // shorter than a socket's buffer takes to fill
constexpr auto kLongWait = std::chrono::milliseconds(10);  // for a rank that is late
constexpr auto kLongNap = microseconds(200);
constexpr auto kLongestNap = microseconds(500);        // while the program computes on what may be the only core
constexpr auto kHurry = std::chrono::milliseconds(2);  // since the last hurry(); a wait calls it more often
// What MPI still owes its peers, after an operation and later.
constexpr auto kIdleProgress = std::chrono::milliseconds(1), kLongIdleProgress = std::chrono::milliseconds(10);
constexpr int kIdleRounds = 20;
constexpr int64_t kHeaderBytes = int64_t{8} << 10;  // at least those of OpenMPI in front of a message

// Without destructors: the process may use them until its end.
MpiThread* g_thread = nullptr;
std::atomic<bool> g_has_failed{false};
std::atomic<int> g_clients{0};
MPI_Comm g_own = MPI_COMM_NULL;  // of this process alone, without messages

// True if a launcher of MPI has started this process. Without one, MPI_Init would start a daemon for it alone.
bool started_by_mpi() {
  for (const char* name : {"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"})
    if (std::getenv(name)) return true;
  return false;
}

pid_t g_process = 0;  // that has initialized MPI

// Not in a child that this process has made, not after a failure, and not if the process reports one or exits while a
// communicator is open: the end of MPI waits for the other ranks, which may wait for this one.
void end_mpi(int exit_code, void*) {
  if (exit_code == 0 && !g_has_failed && g_clients == 0 && ::getpid() == g_process) MPI_Finalize();
}

// OpenMPI sends a message at once only up to its eager limit (TCP: 64 KiB). What is longer waits for an answer of the
// peer, which queues behind all that the peer sends itself. A piece of a reduction shall not wait.
// MPI_Init reads the limit in the environment, as it reads and writes other variables; it is there only meanwhile.
class RaisedEagerLimit {
 public:
  RaisedEagerLimit() {
    for (const char* name : kNames)
      if (std::getenv(name)) return;  // the user's choice
    is_set_ = true;
    for (const char* name : kNames) ::setenv(name, std::to_string(kPieceBytes + kHeaderBytes).c_str(), 1);
  }
  ~RaisedEagerLimit() {
    for (const char* name : kNames)
      if (is_set_) ::unsetenv(name);
  }
  RaisedEagerLimit(const RaisedEagerLimit&) = delete;

 private:
  static constexpr const char* kNames[] = {"OMPI_MCA_btl_tcp_eager_limit", "OMPI_MCA_btl_tcp_max_send_size"};
  bool is_set_ = false;
};

// OpenMPI installs handlers that print a stack; the process keeps its own.
void initialize_mpi() {
  const RaisedEagerLimit raised;
  constexpr int kSignals = 31;
  std::map<int, struct sigaction> handlers;
  for (int signal = 1; signal <= kSignals; ++signal) {
    struct sigaction handler;
    if (sigaction(signal, nullptr, &handler) == 0) handlers[signal] = handler;
  }
  int level = 0;
  check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &level), "MPI_Init_thread");
  for (const auto& [signal, handler] : handlers) sigaction(signal, &handler, nullptr);
  check(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  g_process = ::getpid();
  ::on_exit(end_mpi, nullptr);
}

void start_mpi() {
  static bool is_started = false;
  if (is_started) return;
  int is_initialized = 0, is_finalized = 0, level = 0;
  check(MPI_Initialized(&is_initialized), "MPI_Initialized");
  check(MPI_Finalized(&is_finalized), "MPI_Finalized");
  if (is_finalized)
    throw zr::PluginError(ZR_UNSUPPORTED,
                          "communicator \"mpi\": the program has called MPI_Finalize; call it after the "
                          "engine is destroyed");
  if (is_initialized) {
    check(MPI_Query_thread(&level), "MPI_Query_thread");
    if (level < MPI_THREAD_MULTIPLE)
      throw zr::PluginError(
          ZR_UNSUPPORTED,
          "communicator \"mpi\" calls MPI on a thread of its own, but the program has initialized MPI for fewer "
          "threads; call MPI_Init_thread with MPI_THREAD_MULTIPLE, or let Zeroth initialize MPI");
  } else if (started_by_mpi()) {
    initialize_mpi();
  } else {
    throw zr::PluginError(ZR_UNSUPPORTED,
                          std::string("communicator \"mpi\" needs ranks that MPI has started; ") +
                              (std::getenv("SLURM_STEP_NUM_TASKS")
                                   ? "start them with srun --mpi=pmix (srun --mpi=list prints what this Slurm has), or "
                                     "in an allocation of salloc or sbatch with mpirun or `zeroth launch --hosts`"
                                   : "start the program with mpirun, for example: mpirun --bind-to none -n 4 "
                                     "./program job.toml"));
  }
  check(MPI_Comm_dup(MPI_COMM_SELF, &g_own), "MPI_Comm_dup");
  is_started = true;
}

// Advances all messages, also of operations that wait for something else now. A probe that finds a message would not.
void advance_mpi() {
  int is_waiting = 0;
  MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, g_own, &is_waiting, MPI_STATUS_IGNORE);
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

std::string MpiThread::doubt() {
#ifdef OPEN_MPI  // else PMI may be what it needs
  const auto has = [](const char* name) { return std::getenv(name) != nullptr; };
  if (!g_thread && has("SLURM_STEP_NUM_TASKS") && has("PMI_RANK") && !has("PMIX_RANK") && !has("OMPI_COMM_WORLD_RANK"))
    return "srun offers the ranks PMI-1 or PMI-2, which few builds of OpenMPI support; if OpenMPI ends the ranks now, "
           "start them with srun --mpi=pmix";
#endif
  return "";
}

MpiThread& MpiThread::start() {
  if (g_has_failed)
    throw zr::PluginError(ZR_COMM,
                          "communicator \"mpi\": a communicator of this process has failed; start the job again");
  if (g_thread) return *g_thread;
  g_thread = new MpiThread;
  try {
    g_thread->run(start_mpi);
  } catch (...) {
    stop();
    throw;
  }
  return *g_thread;
}

void MpiThread::stop() noexcept {
  delete g_thread;
  g_thread = nullptr;
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
  ++g_clients;
}

void MpiThread::remove(Client& client) noexcept {
  run([&] { clients_.erase(std::remove(clients_.begin(), clients_.end(), &client), clients_.end()); });
  --g_clients;
}

void MpiThread::wake() noexcept {
  {
    const std::lock_guard lock(mutex_);
    is_woken_ = true;
  }
  changed_.notify_all();
}

void MpiThread::hurry() noexcept {
  const auto now = Clock::now();
  if (now - hurried_.exchange(now) >= kHurry) wake();
}

void MpiThread::give_up() noexcept { g_has_failed = true; }
bool MpiThread::has_given_up() noexcept { return g_has_failed; }

// Waits for something to do, if no client is active. False at the end.
bool MpiThread::take_calls(bool is_active) {
  std::unique_lock lock(mutex_);
  const auto due = [&] { return is_due(); };
  idle_rounds_ = is_active ? 0 : idle_rounds_ + 1;
  if (!is_active && clients_.empty()) changed_.wait(lock, due);
  if (!is_active && !clients_.empty())
    changed_.wait_for(lock, idle_rounds_ > kIdleRounds ? kLongIdleProgress : kIdleProgress, due);
  if (is_ending_ && calls_.empty()) return false;
  is_woken_ = false;
  taken_.swap(calls_);
  return true;
}

void MpiThread::make_calls() {
  for (Call* call : taken_) {
    try {
      (*call->function)();
    } catch (...) {
      call->failure = std::current_exception();
    }
    const std::lock_guard lock(mutex_);
    call->is_done = true;
    done_.notify_all();
  }
  taken_.clear();
}

// Polls without a pause, then with short ones, as long as the program waits. Otherwise each pause is longer than the
// one before, because the thread may take the core from a thread that computes.
void MpiThread::pause(Clock::time_point moved) {
  const auto now = Clock::now();
  const auto waited = std::chrono::duration_cast<microseconds>(now - moved);
  if (now - hurried_.load() < kHurry) {
    if (waited > kSpin) std::this_thread::sleep_for(waited > kLongWait ? kLongNap : kNap);
  } else if (waited.count() > 0) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, std::clamp(waited / 2, kNap, kLongestNap), [&] { return is_due(); });
  }
}

// The thread calls MPI again and again, because OpenMPI moves data only then.
void MpiThread::loop() {
  ::prctl(PR_SET_NAME, "zr-mpi");
  ::prctl(PR_SET_TIMERSLACK, 1);
  bool is_active = false;
  Clock::time_point moved = Clock::now();
  while (take_calls(is_active)) {
    make_calls();
    const bool was_active = is_active;
    is_active = false;
    for (Client* client : clients_) {
      const Client::State state = client->advance();
      is_active |= state.is_active;
      if (state.has_moved || (state.is_active && !was_active)) moved = Clock::now();
    }
    if (!clients_.empty() && !g_has_failed) advance_mpi();
    if (is_active) pause(moved);
  }
}

}  // namespace mpi
