// What processes must have in common for communicator = "auto", and for comm_mpi, to regard them as on one host.
#include "hosts.hpp"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <string>

#include "control/protocol.hpp"

namespace {

enum class Network : uint8_t { same, own };

std::string node() { return zr::host::control::protocol::this_peer().node; }

// What the function returns in a child process, which can have a network namespace of its own. Empty: the kernel does
// not let this user create one.
std::string in_child(Network network, std::string (*function)()) {
  std::array<int, 2> ends{};
  if (::pipe(ends.data()) != 0) return "";
  const pid_t child = ::fork();
  if (child == 0) {
    const bool is_there =
        network == Network::same || ::unshare(CLONE_NEWNET) == 0 || ::unshare(CLONE_NEWUSER | CLONE_NEWNET) == 0;
    const std::string result = is_there ? function() : "";
    const bool is_written = ::write(ends[1], result.data(), result.size()) == static_cast<ssize_t>(result.size());
    ::_exit(is_written ? 0 : 1);
  }
  ::close(ends[1]);
  std::string all;
  std::array<char, 4096> buffer{};
  for (ssize_t n = 0; (n = ::read(ends[0], buffer.data(), buffer.size())) > 0;)
    all.append(buffer.data(), static_cast<std::size_t>(n));
  ::close(ends[0]);
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  return all;
}

class HostIdentityTest : public testing::TestWithParam<std::string (*)()> {
 protected:
  HostIdentityTest() { ::unsetenv("ZR_HOST_ID"); }
  ~HostIdentityTest() override { ::unsetenv("ZR_HOST_ID"); }
};

TEST_P(HostIdentityTest, IncludesTheNetworkNamespace) {
  EXPECT_EQ(in_child(Network::same, GetParam()), GetParam()());
  const std::string other = in_child(Network::own, GetParam());
  if (other.empty()) GTEST_SKIP() << "this user cannot create network namespaces";
  EXPECT_NE(other, GetParam()());
}

TEST_P(HostIdentityTest, UsesZrHostIdInsteadOfTheNetworkNamespace) {
  const std::string without = GetParam()();
  ::setenv("ZR_HOST_ID", "left", 1);
  const std::string left = GetParam()();
  EXPECT_NE(left, without);
  const std::string other = in_child(Network::own, GetParam());
  ::setenv("ZR_HOST_ID", "right", 1);
  EXPECT_NE(GetParam()(), left);
  if (other.empty()) GTEST_SKIP() << "this user cannot create network namespaces";
  EXPECT_EQ(other, left);
}

INSTANTIATE_TEST_SUITE_P(Identities, HostIdentityTest, testing::Values(&node, &mpi::host_identity),
                         [](const auto& info) { return info.index == 0 ? "Auto" : "CommMpi"; });

}  // namespace
