// Ranks that save together: forked processes that communicate over sockets and can be killed at a failpoint.
#pragma once

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "checkpoint/folder.hpp"
#include "checkpoint/load.hpp"
#include "checkpoint/save.hpp"

namespace zr::test {

using namespace zr::host;

/// Tensors of several types and sizes, one of which is empty; the seed determines their bytes.
struct Model {
  explicit Model(unsigned seed) {
    const auto add = [&](const std::string& kind, const std::string& name, const std::string& dtype,
                         std::vector<int64_t> shape) {
      tensors.push_back({kind, name, dtype, std::move(shape), {}});
      std::mt19937_64 random(seed * 1000 + static_cast<unsigned>(tensors.size()));
      std::string& one = bytes.emplace_back(static_cast<std::size_t>(tensors.back().bytes()), '\0');
      for (char& c : one) c = static_cast<char>(random());
    };
    for (const std::string name : {"embedding", "block.weight", "block.bias", "empty", "scalar"}) {
      const std::vector<int64_t> shape = name == "embedding"      ? std::vector<int64_t>{700, 33}
                                         : name == "block.weight" ? std::vector<int64_t>{128, 128}
                                         : name == "block.bias"   ? std::vector<int64_t>{129}
                                         : name == "empty"        ? std::vector<int64_t>{0, 7}
                                                                  : std::vector<int64_t>{};
      add("weight", name, "BF16", shape);
      add("master", name, "F32", shape);
      add("state.exp_avg", name, "F32", shape);
    }
    add("buffer", "count", "I64", {3});
  }
  std::vector<checkpoint::TensorInfo> tensors;
  std::vector<std::string> bytes;
};

/// The slabs of rank r of n: every tensor is cut into uneven runs, which are assigned to the ranks in turn.
inline std::vector<checkpoint::Slab> slabs_of(const Model& model, int r, int n, unsigned how) {
  std::vector<checkpoint::Slab> slabs;
  int turn = static_cast<int>(how);
  for (uint32_t i = 0; i < model.tensors.size(); ++i) {
    const auto bytes = static_cast<int64_t>(model.bytes[i].size());
    const int64_t run = how == 0 ? std::max<int64_t>(1, (bytes + n - 1) / n) : 1000 + 777 * static_cast<int64_t>(how);
    for (int64_t first = 0; first < bytes; first += run, ++turn)
      if (turn % n == r) slabs.push_back({i, first, std::min(run, bytes - first), model.bytes[i].data() + first});
  }
  return slabs;
}

inline checkpoint::CheckpointContents image_of(const Model& model, int64_t step, int r, int n, unsigned how = 0) {
  return {step, "job", to_text(checkpoint::CheckpointMetadata()), true, model.tensors, slabs_of(model, r, n, how)};
}

constexpr checkpoint::SaveOptions kSmall{0, 50000, 4096};

/// Forks n ranks, runs `work` in each, and returns their waitpid() statuses.
inline std::vector<int> on_ranks(int n, const std::function<void(const checkpoint::CheckpointComm&)>& work) {
  std::vector<std::array<int, 2>> sockets(static_cast<std::size_t>(n));
  for (auto& pair : sockets) ::socketpair(AF_UNIX, SOCK_STREAM, 0, pair.data());
  const auto send = [](int fd, const std::string& message) {
    const uint64_t length = message.size();
    if (::send(fd, &length, 8, MSG_NOSIGNAL) != 8) ::_exit(9);
    for (std::size_t at = 0; at < message.size();) {
      const ssize_t sent = ::send(fd, message.data() + at, message.size() - at, MSG_NOSIGNAL);
      if (sent <= 0) ::_exit(9);
      at += static_cast<std::size_t>(sent);
    }
  };
  const auto receive = [](int fd) {
    uint64_t length = 0;
    if (::recv(fd, &length, 8, MSG_WAITALL) != 8) ::_exit(9);  // the peer is gone
    std::string message(length, '\0');
    if (length > 0 && ::recv(fd, message.data(), length, MSG_WAITALL) != static_cast<ssize_t>(length)) ::_exit(9);
    return message;
  };
  std::vector<pid_t> ranks;
  for (int r = 0; r < n; ++r) {
    const pid_t pid = ::fork();
    if (pid > 0) {
      ranks.push_back(pid);
      continue;
    }
    for (int other = 0; other < n; ++other) {
      if (r != 0 && other != r) ::close(sockets[static_cast<std::size_t>(other)][1]);
      if (r == 0 || other != r) ::close(sockets[static_cast<std::size_t>(other)][r == 0 ? 1 : 0]);
      if (r != 0 && other == r) ::close(sockets[static_cast<std::size_t>(other)][0]);
    }
    checkpoint::CheckpointComm peers;
    peers.rank = r;
    peers.world = n;
    peers.gather = [&](const std::string& text) {
      std::vector<std::string> all;
      if (r != 0) send(sockets[static_cast<std::size_t>(r)][1], text);
      for (int other = 0; r == 0 && other < n; ++other)
        all.push_back(other == 0 ? text : receive(sockets[static_cast<std::size_t>(other)][0]));
      return all;
    };
    peers.broadcast = [&](const std::string& message) {
      for (int other = 1; r == 0 && other < n; ++other) send(sockets[static_cast<std::size_t>(other)][0], message);
      return r == 0 ? message : receive(sockets[static_cast<std::size_t>(r)][1]);
    };
    try {
      work(peers);
      ::_exit(0);
    } catch (const Error& failure) {
      std::fprintf(stderr, "rank %d: %s\n", r, failure.what());
      ::_exit(failure.exit_code());
    }
  }
  for (auto& pair : sockets)
    for (const int fd : pair) ::close(fd);
  std::vector<int> ends;
  for (const pid_t pid : ranks) {
    int status = 0;
    ::waitpid(pid, &status, 0);
    ends.push_back(status);
  }
  return ends;
}

inline bool killed(int status) { return WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL; }
inline bool good(const std::vector<int>& ends) {
  for (const int status : ends)
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) return false;
  return true;
}

/// Checks all bytes of every tensor, read in the parts that n ranks would load.
inline void expect_holds(const std::string& folder, const Model& model, int n = 1, unsigned how = 0) {
  const checkpoint::Checkpoint checkpoint(folder);
  ASSERT_EQ(checkpoint.manifest().tensors.size(), model.tensors.size());
  for (int r = 0; r < n; ++r)
    for (const checkpoint::Slab& slab : slabs_of(model, r, n, how)) {
      const checkpoint::TensorInfo& tensor = model.tensors[slab.tensor];
      const checkpoint::SavedTensor* saved = checkpoint.find(tensor.kind, tensor.name);
      ASSERT_NE(saved, nullptr) << tensor.name;
      ASSERT_EQ(saved->shape, tensor.shape);
      std::string there(static_cast<std::size_t>(slab.bytes), '\0');
      checkpoint.read(*saved, slab.first, slab.bytes, there.data());
      ASSERT_TRUE(there.compare(0, there.size(), static_cast<const char*>(slab.data), there.size()) == 0)
          << tensor.kind << " " << tensor.name << " from " << slab.first;
    }
}

}  // namespace zr::test
