// tun_delay MICROSECONDS: delays what this host (a network namespace) sends to 10.77.0.0/24. Packets to these addresses
// go to a TUN device; the program holds each of them for that time and sends it through eth0. Run it on all hosts, so
// that both directions of a link have the delay. Needs root. It runs until it is killed.
#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <netinet/ip.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <string>
#include <vector>

namespace {
using Clock = std::chrono::steady_clock;
constexpr const char* kDevice = "delay";
constexpr std::size_t kMaxPackets = 16384;  // more are dropped, as by a router

struct Packet {
  Clock::time_point due;
  std::vector<char> bytes;
};

void check(bool is_good, const char* what) {
  if (is_good) return;
  std::perror((std::string("tun_delay: ") + what).c_str());
  std::exit(1);
}

int open_device() {
  const int device = ::open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
  check(device >= 0, "/dev/net/tun");
  ifreq request{};
  std::strncpy(request.ifr_name, kDevice, IFNAMSIZ - 1);
  request.ifr_flags = IFF_TUN | IFF_NO_PI;
  check(::ioctl(device, TUNSETIFF, &request) == 0, "TUNSETIFF");
  return device;
}

// A socket for packets with their IP headers. With SO_BINDTODEVICE it does not use the route to the TUN device.
int open_socket() {
  const int fd = ::socket(AF_INET, SOCK_RAW | SOCK_CLOEXEC, IPPROTO_RAW);
  check(fd >= 0, "socket");
  check(::setsockopt(fd, SOL_SOCKET, SO_BINDTODEVICE, "eth0", 4) == 0, "eth0");
  constexpr int kBufferBytes = 16 << 20;
  check(::setsockopt(fd, SOL_SOCKET, SO_SNDBUFFORCE, &kBufferBytes, sizeof kBufferBytes) == 0, "SO_SNDBUFFORCE");
  return fd;
}

void send(int socket, const std::vector<char>& packet) {
  ip header;
  if (packet.size() < sizeof header) return;
  std::memcpy(&header, packet.data(), sizeof header);
  if (header.ip_v != 4) return;
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_addr = header.ip_dst;
  ::sendto(socket, packet.data(), packet.size(), 0, reinterpret_cast<sockaddr*>(&to), sizeof to);
}
}  // namespace

int main(int argc, char** argv) {
  if (argc != 2 || std::atoi(argv[1]) < 1) {
    std::fputs("usage: tun_delay MICROSECONDS\n", stderr);
    return 2;
  }
  const std::chrono::microseconds delay(std::atoi(argv[1]));
  const int device = open_device(), socket = open_socket();
  check(std::system("ip link set delay up && ip route add 10.77.0.0/25 dev delay && "
                    "ip route add 10.77.0.128/25 dev delay") == 0,
        "ip route");
  ::prctl(PR_SET_TIMERSLACK, 1);
  std::deque<Packet> packets;
  std::vector<char> buffer(1 << 16);
  for (pollfd wait{device, POLLIN, 0};;) {
    const auto now = Clock::now();
    for (; !packets.empty() && packets.front().due <= now; packets.pop_front()) send(socket, packets.front().bytes);
    const auto left = packets.empty() ? std::chrono::seconds(1) : packets.front().due - now;
    const timespec limit{0, std::min<int64_t>(std::chrono::nanoseconds(left).count(), 999'999'999)};
    if (::ppoll(&wait, 1, &limit, nullptr) <= 0) continue;
    for (ssize_t n; (n = ::read(device, buffer.data(), buffer.size())) > 0;)
      if (packets.size() < kMaxPackets) packets.push_back({Clock::now() + delay, {buffer.data(), buffer.data() + n}});
  }
}
