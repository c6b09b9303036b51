// Real ranks for tests: N forked processes that each run a function; returns what each rank sent and how it ended.
//
//   const auto ranks = run_ranks(3, [&](Rank& rank) { EXPECT_EQ(...); rank.give("bytes for the parent"); });
//   expect_success(ranks);
//
// A rank fails on a failed EXPECT_ or ASSERT_, an exception or a signal. The caller must have only one thread when it
// forks.
#pragma once

#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <functional>
#include <iostream>
#include <stdexcept>
#include <string>
#include <vector>

extern "C" void __lsan_do_leak_check() __attribute__((weak));

namespace zr::testing {

struct RankResult {
  int exit = -1;   // exit status; -1 if a signal ended the rank
  int signal = 0;  // the signal that ended the rank
  bool late = false;
  std::string gave;  // Rank::give
  std::string threw;
  bool ok() const { return exit == 0; }
};

struct Rank {
  int rank, world;
  std::string given{};
  /// Bytes for the parent: RankResult::gave.
  void give(const std::string& bytes) { given += bytes; }
};

struct RankOptions {
  std::chrono::milliseconds limit = std::chrono::seconds(60);  // then all ranks are killed
  /// Runs in the parent while the ranks run.
  std::function<void(const std::vector<pid_t>&)> meanwhile = {};
};

namespace ranks {

inline void write_all(int fd, const std::string& bytes) {
  for (std::size_t done = 0; done < bytes.size();) {
    const ssize_t n = ::write(fd, bytes.data() + done, bytes.size() - done);
    if (n <= 0) return;
    done += static_cast<std::size_t>(n);
  }
}

// Writes a tag byte and then data: 'g' and the bytes of Rank::give(), or 't' and the message of an exception.
[[noreturn]] inline void live(Rank rank, int pipe, const std::function<void(Rank&)>& body) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  int code = 0;
  try {
    body(rank);
    write_all(pipe, "g" + rank.given);
    code = ::testing::Test::HasFailure() ? 1 : 0;
  } catch (const std::exception& failure) {
    write_all(pipe, std::string("t") + failure.what());
    code = 2;
  }
  std::fflush(nullptr);
  std::cout.flush();
  if (__lsan_do_leak_check) __lsan_do_leak_check();
  ::_exit(code);
}

}  // namespace ranks

inline std::vector<RankResult> run_ranks(int world, const std::function<void(Rank&)>& body, RankOptions options = {}) {
  std::fflush(nullptr);
  std::vector<pid_t> pids;
  std::vector<pollfd> pipes;
  for (int rank = 0; rank < world; ++rank) {
    int ends[2];
    if (::pipe(ends) != 0) throw std::runtime_error("pipe() failed");
    const pid_t pid = ::fork();
    if (pid == 0) {
      for (const pollfd& other : pipes) ::close(other.fd);
      ::close(ends[0]);
      ranks::live(Rank{rank, world}, ends[1], body);
    }
    ::close(ends[1]);
    pids.push_back(pid);
    pipes.push_back({ends[0], POLLIN, 0});
  }
  if (options.meanwhile) options.meanwhile(pids);
  std::vector<RankResult> results(static_cast<std::size_t>(world));
  std::vector<std::string> said(results.size());
  const auto deadline = std::chrono::steady_clock::now() + options.limit;
  for (std::size_t open = pipes.size(); open > 0;) {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now()).count();
    if (left <= 0) {
      for (std::size_t i = 0; i < pids.size(); ++i) {
        results[i].late = pipes[i].fd >= 0;
        if (results[i].late) ::kill(pids[i], SIGKILL);
      }
      break;
    }
    ::poll(pipes.data(), pipes.size(), static_cast<int>(left));
    for (std::size_t i = 0; i < pipes.size(); ++i) {
      if (pipes[i].fd < 0 || !pipes[i].revents) continue;
      char buffer[65536];
      const ssize_t n = ::read(pipes[i].fd, buffer, sizeof buffer);
      if (n > 0) {
        said[i].append(buffer, static_cast<std::size_t>(n));
        continue;
      }
      ::close(pipes[i].fd);
      pipes[i].fd = -1;  // poll skips it
      --open;
    }
  }
  for (std::size_t i = 0; i < pids.size(); ++i) {
    int status = 0;
    ::waitpid(pids[i], &status, 0);
    if (pipes[i].fd >= 0) ::close(pipes[i].fd);
    if (WIFEXITED(status)) results[i].exit = WEXITSTATUS(status);
    if (WIFSIGNALED(status)) results[i].signal = WTERMSIG(status);
    if (!said[i].empty()) (said[i][0] == 'g' ? results[i].gave : results[i].threw) = said[i].substr(1);
  }
  return results;
}

inline void expect_success(const std::vector<RankResult>& results) {
  for (std::size_t i = 0; i < results.size(); ++i) {
    const RankResult& r = results[i];
    EXPECT_TRUE(r.ok()) << "rank " << i << " of " << results.size() << (r.late ? " did not end in time" : "")
                        << " exit " << r.exit << " signal " << r.signal << " " << r.threw;
  }
}

}  // namespace zr::testing
