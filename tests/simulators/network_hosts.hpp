// Hosts on this machine, for tests of jobs on several hosts: network_hosts.sh.
#pragma once

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "support/shell.hpp"

namespace zr::testing {

/// Hosts that exist as long as the object: network namespaces, of which the first has the address 10.77.0.1. They need
/// root. Jobs are launched on the first one, with the store at port 29600.
class Hosts {
 public:
  static constexpr uint16_t kStorePort = 29600;
  struct Process {
    pid_t pid;  // outside of the hosts
    std::string command;
  };

  explicit Hosts(int count) : count_(count) {
    for (const std::string& words : {"up " + all(), "run " + name(0) + " true"})
      if (const auto done = script(words); unavailable_.empty() && done.code != 0)
        unavailable_ = words + ": " + done.output;
  }
  /// Hosts that exist already, the nodes of a cluster (slurm_cluster.sh).
  Hosts(std::string name, int count) : count_(count), name_(std::move(name)), is_owner_(false) {}
  ~Hosts() {
    if (is_owner_) script("down " + all());
  }
  Hosts(const Hosts&) = delete;
  /// Why there are no hosts; empty: there are.
  const std::string& unavailable() const { return unavailable_; }
  int count() const { return count_; }
  std::string name(int host) const { return name_ + std::to_string(host); }
  /// Bytes that a host has sent.
  int64_t sent(int host = 0) const { return std::stoll(script("bytes " + name(host)).output); }

  /// The command `zeroth` on the first host, from which it reaches the others.
  std::string zeroth() const {
    return "OMPI_MCA_plm_rsh_agent='" + kScript + " run' ZR_STORE=" + store() + " " + kScript + " run " + name(0) +
           " " ZR_BUILD_DIR "/bin/zeroth";
  }
  /// The starts of commands that run a program on all hosts, with so many ranks on each.
  std::string launch(int ranks_per_host) const { return zeroth() + " launch --hosts " + list(ranks_per_host) + " --"; }
  std::string mpirun(int ranks_per_host) const { return mpirun("-H " + list(ranks_per_host)); }
  /// where: the options of mpirun that name the hosts. variables: what the ranks get, such as "ZR_TOKEN=secret".
  std::string mpirun(const std::string& where, const std::string& variables = kStoreAndToken) const {
    std::istringstream words(variables);
    std::string options;
    for (std::string word; words >> word;) options += " -x " + word;
    return kScript + " run " + name(0) + " mpirun.openmpi --bind-to none --mca plm_rsh_agent \"'" + kScript +
           " run'\" " + where + options;
  }

  /// The actions of the script.
  void limit_rate(const std::string& rate) const { must("rate " + all() + " " + rate); }
  void delay(int microseconds) const {
    must("delay " + all() + " " + std::to_string(microseconds) + " " ZR_BUILD_DIR "/tests/tun_delay");
  }
  void cut(int host) const { must("cut " + name(host)); }
  void lose(int host) const { must("lose " + name(host)); }
  void restore(int host) const { must("restore " + name(host)); }
  void kill(int host) const { must("kill " + name(host)); }
  std::string run(int host, const std::string& command) const { return must("run " + name(host) + " " + command); }

  std::vector<Process> processes(int host) const {
    std::istringstream text(must("processes " + name(host)));
    std::vector<Process> all;
    Process process;
    while (text >> process.pid && std::getline(text >> std::ws, process.command)) all.push_back(process);
    return all;
  }
  /// The processes on a host that run this program.
  std::vector<pid_t> processes(int host, const std::string& program) const {
    std::vector<pid_t> all;
    for (const Process& process : processes(host))
      if (process.command.rfind(program + " ", 0) == 0) all.push_back(process.pid);
    return all;
  }
  /// A connection from this host to the store, or to another port of a host, or -1.
  int connect_to_store(int host) const { return connect(host, kAddress, kStorePort); }
  int connect(int host, const std::string& to, uint16_t port) const {
    return socket_of(host, to, port,
                     [](int fd, const sockaddr* address, socklen_t size) { return ::connect(fd, address, size) == 0; });
  }
  /// A socket on this host that listens on the port, on all addresses, or -1.
  int listen(int host, uint16_t port) const {
    return socket_of(host, "0.0.0.0", port, [](int fd, const sockaddr* address, socklen_t size) {
      return ::bind(fd, address, size) == 0 && ::listen(fd, 1) == 0;
    });
  }

 private:
  // open(fd, address, size): connects or binds the socket, and returns whether it has.
  template <class F>
  int socket_of(int host, const std::string& ip, uint16_t port, const F& open) const {
    int fd = -1;
    std::thread([&] {  // the thread moves to the host
      const int network = ::open(("/run/netns/" + name(host)).c_str(), O_RDONLY | O_CLOEXEC);
      const bool is_there = ::setns(network, CLONE_NEWNET) == 0;
      ::close(network);
      if (!is_there) return;
      fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
      sockaddr_in address{};
      address.sin_family = AF_INET;
      address.sin_port = htons(port);
      ::inet_pton(AF_INET, ip.c_str(), &address.sin_addr);
      if (open(fd, reinterpret_cast<sockaddr*>(&address), sizeof address)) return;
      ::close(fd);
      fd = -1;
    })
        .join();
    return fd;
  }
  static constexpr const char* kAddress = "10.77.0.1";
  static std::string store() { return kAddress + (":" + std::to_string(kStorePort)); }
  static std::string new_name() {
    static int number = 0;
    return "zr" + std::to_string(::getpid()) + "x" + std::to_string(number++);
  }
  std::string all() const { return name_ + " " + std::to_string(count_); }
  std::string list(int ranks_per_host) const {
    std::string text;
    for (int host = 0; host < count_; ++host)
      text += (host ? "," : "") + name(host) + ":" + std::to_string(ranks_per_host);
    return text;
  }
  static Outcome script(const std::string& words) { return shell(kScript + " " + words); }
  static std::string must(const std::string& words) {
    const Outcome done = script(words);
    if (done.code != 0) throw std::runtime_error("network_hosts.sh " + words + ": " + done.output);
    return done.output;
  }

  inline static const std::string kStoreAndToken = "ZR_STORE=" + store() + " ZR_TOKEN=secret";
  inline static const std::string kScript = ZR_SOURCE_DIR "/tests/simulators/network_hosts.sh";
  const int count_;
  const std::string name_ = new_name();
  const bool is_owner_ = true;
  std::string unavailable_;
};

/// Sends bytes on a connection of Hosts, closes it, and returns what the peer has answered within 10 s.
inline std::string answer_on(int connection, const std::string& bytes) {
  if (connection < 0) return "cannot connect";
  const timeval limit{10, 0};
  ::setsockopt(connection, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  ::send(connection, bytes.data(), bytes.size(), MSG_NOSIGNAL);
  char buffer[4096];
  const ssize_t n = ::recv(connection, buffer, sizeof buffer, 0);
  ::close(connection);
  return n > 0 ? std::string(buffer, static_cast<std::size_t>(n)) : "";
}

}  // namespace zr::testing
