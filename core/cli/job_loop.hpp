// What every launcher of a job does: one loop for the signals of the user, the output of its processes and their ends.
#pragma once

#include <signal.h>
#include <sys/types.h>

#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/address.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/signal_set.hpp>
#include <boost/asio/steady_timer.hpp>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "cli/launch_output.hpp"
#include "cli/launch_process.hpp"
#include "control/store.hpp"

namespace zr::host::cli {

/// SIGPIPE is ignored while the object exists. Not thread-safe.
class JobLoop {
 public:
  JobLoop(const JobLoop&) = delete;

 protected:
  /// The output of a process.
  class Pipe {
   public:
    using Take = std::function<void(std::string_view bytes)>;
    /// Reads `fd`, which it closes. `take` gets the bytes of each read(), of at most packet_bytes() or 64 KiB.
    void open(JobLoop& loop, int fd, Take take);
    /// Continues to read if it has stopped because the writer is congested.
    void resume();
    /// Reads the remaining output of a process that has ended, and closes the pipe. Does not wait for the end of the
    /// pipe, which another process may hold open.
    void drain();

   private:
    ssize_t read_once();
    void read();

    JobLoop* loop_ = nullptr;
    Take take_;
    std::unique_ptr<boost::asio::posix::stream_descriptor> from_;
    bool paused_ = false;
  };

  /// `raw_rank0`: see Output.
  JobLoop(int ranks, bool raw_rank0);
  virtual ~JobLoop();

  /// SIGINT, SIGTERM or SIGHUP has arrived, or SIGPIPE: the output cannot be written.
  virtual void on_signal(int signal) = 0;
  /// A child process has ended.
  virtual void on_child() = 0;
  /// Called ten times per second.
  virtual void on_tick() = 0;
  /// The store reports a failure of a rank, with the table that the user gets.
  virtual void on_failure(const std::string& table) = 0;
  /// True if all processes have ended and all reports have arrived.
  virtual bool is_done() const = 0;

  /// Opens the store at an address, on one of the ports. `launched`: see Store::Options.
  void open_store(const boost::asio::ip::address& address, const std::vector<uint16_t>& ports, bool launched);
  /// From now on on_signal() and on_child() are called, by run_loop().
  void listen_to_signals();
  /// Returns when is_done().
  void run_loop();
  /// Ends the loop if is_done().
  void finish_if_done();
  /// Writes the rest of the output; from now on signals end the launcher. Returns the errno if it could not be written,
  /// after an error message; else 0.
  int finish_output();
  /// Prints the report of a failure.
  void report(const std::string& table);
  /// True if the value of this key is "yes" for all ranks.
  bool all_set(std::string (*key)(int rank)) const;

  const int ranks_;
  boost::asio::io_context io_;
  boost::asio::steady_timer deadline_;
  OutputWriter writer_;
  Output output_;
  const std::string job_, token_;
  std::unique_ptr<control::Store> store_;
  const OrphanAdoption orphans_;  // processes of the job whose parents have ended
  int stop_signal_ = 0;           // the signal that stopped the job
  bool reported_ = false;         // the failure report is printed

 private:
  void tick();

  boost::asio::signal_set signals_;
  boost::asio::steady_timer tick_;
  std::vector<Pipe*> pipes_;
  std::vector<char> buffer_;  // of one read()
  struct sigaction sigpipe_action_before_ {};
};

}  // namespace zr::host::cli
