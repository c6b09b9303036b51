// The links between the hosts of tests (network_hosts.sh) have the rate and the delay that tests give them.
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <vector>

#include "simulators/network_hosts.hpp"
#include "support/launch_job.hpp"

namespace {

using zr::test::Clock;
using zr::test::eventually;
using zr::testing::Hosts;

// Without a limit, or with another congestion control, figures and faults would be those of another link. On a busy
// machine a transfer takes longer, so only the fastest of several tries counts: it must reach a tenth of the rate.
TEST(CommMpiHostLinksTest, SLOW_HaveTheirRate) {
  constexpr int64_t kBytes = 25'000'000, kBurst = 5'000'000;  // 0.16 s or more at 1 Gbit/s
  const Hosts hosts(2);
  if (!hosts.unavailable().empty()) GTEST_SKIP() << "cannot create network namespaces: " << hosts.unavailable();
  EXPECT_EQ(hosts.run(1, "cat /proc/sys/net/ipv4/tcp_congestion_control"), "reno\n");
  const int listener = hosts.listen(0, 9000);
  ASSERT_GE(listener, 0);
  const auto seconds_of_transfer = [&] {
    const int from = hosts.connect(1, "10.77.0.1", 9000), to = ::accept(listener, nullptr, nullptr);
    EXPECT_GE(to, 0);
    const auto begin = Clock::now();
    std::thread sender([&] {
      const std::vector<char> bytes(1 << 20);
      for (int64_t left = kBytes; left > 0;) {
        const ssize_t n =
            ::send(from, bytes.data(), std::min<std::size_t>(bytes.size(), static_cast<std::size_t>(left)), 0);
        if (n <= 0) break;
        left -= n;
      }
    });
    std::vector<char> buffer(1 << 20);
    int64_t received = 0;
    for (ssize_t n = 1; n > 0 && received < kBytes; received += n) n = ::recv(to, buffer.data(), buffer.size(), 0);
    const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
    sender.join();
    for (const int fd : {from, to}) ::close(fd);
    EXPECT_EQ(received, kBytes);
    return seconds;
  };
  for (const int gbit : {1, 10}) {
    hosts.limit_rate(std::to_string(gbit) + "gbit");
    const double least = static_cast<double>(kBytes - kBurst) * 8 / (gbit * 1e9);
    double fastest = 1e9;
    int tries = 0;
    EXPECT_TRUE(eventually(
        [&] {
          fastest = std::min(fastest, seconds_of_transfer());
          return ++tries >= 10 && fastest < 10 * least;
        },
        std::chrono::seconds(60)))
        << gbit << " Gbit/s: " << fastest << " s";
    EXPECT_GE(fastest, least) << gbit << " Gbit/s";
  }
  ::close(listener);
}

// A closed port answers a connection at once, so that takes one round trip. On a busy machine it takes longer, so only
// the fastest of several tries counts.
TEST(CommMpiHostLinksTest, SLOW_HaveTheirDelay) {
  for (const int delay : {200, 5000}) {
    const Hosts hosts(2);
    if (!hosts.unavailable().empty()) GTEST_SKIP() << "cannot create network namespaces: " << hosts.unavailable();
    hosts.delay(delay);
    int64_t fastest = 1'000'000;
    int tries = 0;
    EXPECT_TRUE(eventually(
        [&] {
          const auto begin = Clock::now();
          EXPECT_EQ(hosts.connect(1, "10.77.0.1", 9), -1);
          const auto time = std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - begin);
          fastest = std::min<int64_t>(fastest, time.count());
          return ++tries >= 10 && fastest < 2 * delay + 4000;
        },
        std::chrono::seconds(60)))
        << delay << ": " << fastest;
    EXPECT_GE(fastest, 2 * delay);
  }
}

}  // namespace
