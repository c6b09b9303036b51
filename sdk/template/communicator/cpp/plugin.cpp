// The communicator "@ID@": Unix-domain sockets between all ranks of one machine. It has one operation, an all-gather of
// bytes. The host composes every other collective of it and reduces in rank order, so results are bit-identical.
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "zr/communicator.hpp"
#include "zr/names.hpp"

namespace {

constexpr int kConnectMilliseconds = 60'000;

class File {  // an open file descriptor
 public:
  explicit File(int fd = -1) : fd_(fd) {}
  File(File&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  File& operator=(File&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~File() {
    if (fd_ >= 0) ::close(fd_);
  }
  operator int() const { return fd_; }  // -1: none

 private:
  int fd_;
};

[[noreturn]] void fail(zr_code code, const std::string& what, int error = errno) {
  throw zr::PluginError(code, what + (error ? std::string(": ") + std::strerror(error) : ""), error);
}

// A socket in the abstract namespace is open to every user of the machine.
bool is_own(int peer) {
  ucred user{};
  socklen_t bytes = sizeof user;
  return ::getsockopt(peer, SOL_SOCKET, SO_PEERCRED, &user, &bytes) == 0 && user.uid == ::geteuid();
}

// A collective that is under way: the bytes of each rank that are left to send and to receive.
struct Exchange {
  struct Left {
    const char* out;
    char* in;
    std::size_t out_bytes, in_bytes;
  };
  std::vector<Left> left;  // by rank
};

class Mesh {
 public:
  Mesh(const zr::Host& host, const zr_comm_open& how)
      : host_(host), rank_(how.rank), peers_(static_cast<std::size_t>(how.world)), aborted_(::eventfd(0, EFD_CLOEXEC)) {
    if (aborted_ < 0) fail(ZR_IO, "eventfd");
    connect_all(how);
  }

  void submit(const zr_coll& coll, zr_stream* stream, zr_done* done) {
    if (coll.op != ZR_ALL_GATHER || zr::size_of(coll.src.dtype) == 0 || stream)
      throw zr::PluginError(ZR_UNSUPPORTED, "only all_gather of known dtypes, without a stream, is supported");
    all_gather(coll);
    if (done) zr::Done::retained(host_, done).resolve();
  }
  // Wakes submit(), now and in every later call: nobody reads the counter.
  void abort() noexcept {
    const uint64_t one = 1;
    (void)!::write(aborted_, &one, sizeof one);
  }

 private:
  // Every rank listens, connects to all lower ranks and accepts all higher ones.
  void connect_all(const zr_comm_open& how) {
    const auto& store = host_.need<zr_store_service>();
    const std::string key = std::string(how.store_prefix) + "socket.";
    zr_error error = zr::no_error();
    sockaddr_un address{AF_UNIX, {}};
    const File listener(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (listener < 0 || ::bind(listener, reinterpret_cast<sockaddr*>(&address), sizeof(sa_family_t)) != 0 ||
        ::listen(listener, how.world) != 0)
      fail(ZR_IO, "cannot listen at a socket");
    socklen_t length = sizeof address;  // the kernel has chosen a free address
    ::getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length);
    zr::check(store.put(host_.abi(), (key + std::to_string(rank_)).c_str(), &address, length, &error), error);
    for (int32_t peer = 0; peer < rank_; ++peer) {
      uint64_t bytes = sizeof address;
      zr::check(store.get(host_.abi(), (key + std::to_string(peer)).c_str(), -1, &address, &bytes, &error), error);
      File socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
      if (socket < 0 || ::connect(socket, reinterpret_cast<sockaddr*>(&address), static_cast<socklen_t>(bytes)) != 0 ||
          ::send(socket, &rank_, sizeof rank_, MSG_NOSIGNAL) != sizeof rank_)
        fail(ZR_COMM, "cannot connect to rank " + std::to_string(peer));
      if (!is_own(socket)) fail(ZR_COMM, "the socket of rank " + std::to_string(peer) + " has another owner", 0);
      peers_[static_cast<std::size_t>(peer)] = std::move(socket);
    }
    for (int32_t n = rank_ + 1; n < how.world; ++n) accept_one(listener);
  }
  void accept_one(int listener) {
    File socket;
    do {
      pollfd waiting{listener, POLLIN, 0};
      if (::poll(&waiting, 1, kConnectMilliseconds) == 0) fail(ZR_TIMEOUT, "a rank did not connect in 60 seconds", 0);
      socket = File(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC));
      if (socket < 0) fail(ZR_COMM, "cannot accept a rank");
    } while (!is_own(socket));  // other users are turned away
    int32_t peer = -1;
    if (::recv(socket, &peer, sizeof peer, MSG_WAITALL) != sizeof peer || peer <= rank_ ||
        static_cast<std::size_t>(peer) >= peers_.size())
      fail(ZR_COMM, "a peer did not send its rank", 0);
    peers_[static_cast<std::size_t>(peer)] = std::move(socket);
  }

  void all_gather(const zr_coll& coll) {
    const auto size = static_cast<std::size_t>(zr::size_of(coll.src.dtype));
    const auto* own = static_cast<const char*>(coll.src.data);
    const std::size_t own_bytes = static_cast<std::size_t>(coll.src.count) * size;
    char* to = static_cast<char*>(coll.dst.data);
    Exchange exchange;
    for (std::size_t r = 0; r < peers_.size(); ++r) {
      const std::size_t bytes = coll.counts ? static_cast<std::size_t>(coll.counts[r]) * size : own_bytes;
      const bool is_own = r == static_cast<std::size_t>(rank_);
      if (is_own && bytes > 0 && to != own) std::memcpy(to, own, bytes);
      exchange.left.push_back(is_own ? Exchange::Left{} : Exchange::Left{own, to, own_bytes, bytes});
      to += bytes;
    }
    while (advance(exchange)) {
    }
  }

  // Waits until a socket is ready and moves what it takes. False: nothing is left.
  bool advance(Exchange& exchange) {
    std::vector<pollfd> waiting{{aborted_, POLLIN, 0}};
    bool busy = false;
    for (std::size_t r = 0; r < peers_.size(); ++r) {
      const Exchange::Left& left = exchange.left[r];
      const int events = (left.out_bytes ? POLLOUT : 0) | (left.in_bytes ? POLLIN : 0);
      waiting.push_back({events ? static_cast<int>(peers_[r]) : -1, static_cast<short>(events), 0});
      busy = busy || events;
    }
    if (!busy) return false;
    if (::poll(waiting.data(), waiting.size(), -1) < 0) {
      if (errno != EINTR) fail(ZR_COMM, "poll");
      return true;
    }
    if (waiting[0].revents) throw zr::PluginError(ZR_CANCELLED, "the communicator was aborted");
    for (std::size_t r = 0; r < peers_.size(); ++r)
      if (waiting[r + 1].revents) transfer(static_cast<int32_t>(r), peers_[r], exchange.left[r]);
    return true;
  }
  static void transfer(int32_t peer, int socket, Exchange::Left& left) {
    ssize_t n = left.out_bytes ? ::send(socket, left.out, left.out_bytes, MSG_DONTWAIT | MSG_NOSIGNAL) : 0;
    if (n < 0 && errno != EAGAIN && errno != EINTR) fail(ZR_COMM, "cannot send to rank " + std::to_string(peer));
    if (n > 0) {
      left.out += n;
      left.out_bytes -= static_cast<std::size_t>(n);
    }
    if (left.in_bytes == 0) return;
    n = ::recv(socket, left.in, left.in_bytes, MSG_DONTWAIT);
    if (n == 0) fail(ZR_COMM, "rank " + std::to_string(peer) + " closed its socket", 0);
    if (n < 0 && errno != EAGAIN && errno != EINTR) fail(ZR_COMM, "cannot receive from rank " + std::to_string(peer));
    if (n < 0) return;
    left.in += n;
    left.in_bytes -= static_cast<std::size_t>(n);
  }

  const zr::Host host_;
  const int32_t rank_;
  std::vector<File> peers_;  // by rank; none for this one
  const File aborted_;       // an eventfd
};

class Plugin : public zr::Communicator<Plugin, Mesh> {
 public:
  static constexpr const char* description = "Unix-domain sockets between the ranks of one machine";
  explicit Plugin(const zr::Host& host) : host_(host) {}
  zr_comm_caps caps() const {
    zr_comm_caps caps{};
    caps.ops = 1u << ZR_ALL_GATHER;
    for (int dtype = ZR_F32; dtype <= ZR_I64; ++dtype) caps.dtypes |= 1u << dtype;
    caps.device_types = zr::kCpuOnly;
    return caps;
  }
  std::unique_ptr<Mesh> open(const zr_comm_open& how) { return std::make_unique<Mesh>(host_, how); }

 private:
  zr::Host host_;
};

}  // namespace

ZR_COMMUNICATOR(Plugin, "@ID@", "@VENDOR@", "0.1.0");
