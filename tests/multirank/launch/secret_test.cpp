// Jobs of launchers that pass no secret: who can join, who can read the job's secret, and how much memory a peer can
// make the store use.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <memory>
#include <random>
#include <regex>
#include <sstream>

#include "control/job_secret.hpp"
#include "control/protocol.hpp"
#include "support/golden_cases.hpp"
#include "support/launch_job.hpp"
#include "support/sanitizers.hpp"

using namespace zr::test;
namespace protocol = zr::host::control::protocol;
using testing::ContainsRegex;
using testing::HasSubstr;

namespace {
namespace fs = std::filesystem;

int some_port() {
  static std::mt19937 random{std::random_device{}()};
  return 9000 + int(random() % 4000);
}

class JobSecretTest : public testing::Test {
 protected:
  JobSecretTest() {
    fs::create_directory(runtime_);
    fs::permissions(runtime_, fs::perms::owner_all);
    setenv("XDG_RUNTIME_DIR", runtime_.c_str(), 1);
    unsetenv("ZR_TOKEN");
  }
  ~JobSecretTest() override { unsetenv("XDG_RUNTIME_DIR"); }

  Environment torchrun(int rank, int world, int local_world, const std::string& address = "127.0.0.1") const {
    return {{"RANK", std::to_string(rank)},
            {"WORLD_SIZE", std::to_string(world)},
            {"LOCAL_RANK", std::to_string(rank % local_world)},
            {"LOCAL_WORLD_SIZE", std::to_string(local_world)},
            {"MASTER_ADDR", address},
            {"MASTER_PORT", std::to_string(port_)},
            {"TORCHELASTIC_RUN_ID", "none"}};
  }
  std::string job_name(const std::string& address = "127.0.0.1") const {
    return "torchrun-none-" + address + "-" + std::to_string(port_) + "-";
  }
  std::vector<std::string> program(const std::string& options = "steps=3") const { return {rank_program(), options}; }
  fs::path secret() const {
    for (const auto& file : fs::directory_iterator(runtime_ / "zeroth"))
      if (!file.path().has_extension()) return file.path();  // "job-<hash>.<pid>" is a secret that is being written
    return {};
  }
  bool has_secret() const { return fs::exists(runtime_ / "zeroth") && !secret().empty(); }

  Scene scene_;
  const fs::path runtime_ = scene_.folder() / "runtime";
  const int port_ = some_port();
};

// A port at which no connection is accepted, and at which no other process can listen.
class BoundPort {
 public:
  explicit BoundPort(int port) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(uint16_t(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(bind(fd_, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  }
  ~BoundPort() { close(fd_); }
  BoundPort(const BoundPort&) = delete;

 private:
  const int fd_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
};

// A connection to the store of rank 0, which listens on one of the eight ports after the launcher's port.
class Peer {
 public:
  explicit Peer(int port) {
    for (int at = port + 1; at <= port + 8; ++at) {
      fd_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
      sockaddr_in address{};
      address.sin_family = AF_INET;
      address.sin_port = htons(uint16_t(at));
      address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
      if (connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0) return;
      close(std::exchange(fd_, -1));
    }
  }
  ~Peer() {
    if (fd_ >= 0) close(fd_);
  }
  bool connected() const { return fd_ >= 0; }
  bool say(const std::string& bytes) {
    for (std::size_t at = 0; at < bytes.size();) {
      const ssize_t n = send(fd_, bytes.data() + at, bytes.size() - at, MSG_NOSIGNAL);
      if (n <= 0) return false;
      at += size_t(n);
    }
    return true;
  }
  std::string read_some() {
    char buffer[4096];
    const ssize_t n = recv(fd_, buffer, sizeof buffer, 0);
    return n > 0 ? std::string(buffer, size_t(n)) : "";
  }

 private:
  int fd_ = -1;
};

TEST_F(JobSecretTest, StoreRejectsTokenGuessedFromLauncherVariables) {
  Job store_host(scene_, program(), torchrun(0, 2, 2));
  ASSERT_TRUE(eventually([&] { return has_secret() && Peer(port_).connected(); })) << store_host.err();
  for (const std::string& token : {job_name(), std::string()}) {
    Peer unauthenticated(port_);
    ASSERT_TRUE(
        unauthenticated.say(protocol::encode(protocol::JoinRequest{job_name(), token, 1, 2, protocol::this_peer()})));
    EXPECT_THAT(unauthenticated.read_some(), HasSubstr("this store belongs to another job"));
  }
  Job other(scene_, program(), torchrun(1, 2, 2));
  EXPECT_EQ(other.wait(), 0) << other.err();
  EXPECT_EQ(store_host.wait(), 0) << store_host.err();
}

// A connection without a token may stay for 5 s, if there are not too many.
TEST_F(JobSecretTest, StoreAdmitsRanksWhileOthersHoldItsConnections) {
  Job store_host(scene_, program(), torchrun(0, 2, 2));
  ASSERT_TRUE(eventually([&] { return has_secret() && Peer(port_).connected(); })) << store_host.err();
  std::vector<std::unique_ptr<Peer>> silent;
  for (int i = 0; i < 300; ++i) silent.push_back(std::make_unique<Peer>(port_));
  Job other(scene_, program(), torchrun(1, 2, 2));
  EXPECT_EQ(other.wait(), 0) << other.err();
  EXPECT_EQ(store_host.wait(), 0) << store_host.err();
  EXPECT_LT(scene_.page().ranks[1].join_us, 3000000);
}

TEST_F(JobSecretTest, FileIsPrivateAndRemovedWhenJobEnds) {
  Job store_host(scene_, program(), torchrun(0, 2, 2));
  ASSERT_TRUE(eventually([&] { return has_secret(); })) << store_host.err();
  struct stat file {
  }, folder{};
  ASSERT_EQ(stat(secret().c_str(), &file), 0);
  ASSERT_EQ(stat((runtime_ / "zeroth").c_str(), &folder), 0);
  EXPECT_EQ(file.st_mode & 07777, 0600u);
  EXPECT_EQ(folder.st_mode & 07777, 0700u);
  EXPECT_EQ(file.st_size, 37);
  Job other(scene_, program(), torchrun(1, 2, 2));
  EXPECT_EQ(other.wait(), 0) << other.err();
  EXPECT_EQ(store_host.wait(), 0) << store_host.err();
  EXPECT_FALSE(has_secret());
}

TEST_F(JobSecretTest, ReplacesSecretOfEarlierJobWithSameName) {
  zr::host::control::JobSecret earlier(job_name());
  earlier.create({zr::host::control::new_secret(), uint16_t(port_ + 1)});
  Job other(scene_, program(), torchrun(1, 2, 2));
  Job store_host(scene_, program(), torchrun(0, 2, 2));
  EXPECT_EQ(other.wait(), 0) << other.err();
  EXPECT_EQ(store_host.wait(), 0) << store_host.err();
}

TEST_F(JobSecretTest, RanksDoNotConnectToOtherListenerOnEarlierPort) {
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(uint16_t(port_ + 1));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  ASSERT_EQ(bind(listener, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  ASSERT_EQ(listen(listener, 8), 0);
  Job other(scene_, program(), torchrun(1, 2, 2));
  Job store_host(scene_, program(), torchrun(0, 2, 2));
  EXPECT_EQ(other.wait(), 0) << other.err();
  EXPECT_EQ(store_host.wait(), 0) << store_host.err();
  EXPECT_EQ(accept(listener, nullptr, nullptr), -1) << "no rank may connect to this listener";
  close(listener);
}

TEST_F(JobSecretTest, DoesNotFollowSymbolicLink) {
  zr::host::control::JobSecret mine(job_name());
  const std::string target = (scene_.folder() / "planted").string();
  std::ofstream(target) << std::string(32, 'a') + "29600";
  ASSERT_EQ(symlink(target.c_str(), mine.path().c_str()), 0);
  EXPECT_EQ(mine.read(), std::nullopt);
  const zr::host::control::JobSecret::Shared shared{zr::host::control::new_secret(), 29601};
  mine.create(shared);
  EXPECT_EQ(mine.read(), shared);
  EXPECT_EQ(fs::file_size(target), 37u);
  EXPECT_FALSE(fs::is_symlink(mine.path()));
}

TEST_F(JobSecretTest, StoreOfSingleHostJobListensOnLoopbackOnly) {
  const std::string own(protocol::this_peer().host);
  Job store_host(scene_, program(), torchrun(0, 2, 2, own));
  ASSERT_TRUE(eventually([&] { return Peer(port_).connected(); })) << store_host.err();
  std::ifstream table("/proc/net/tcp");
  int loopback = 0, others = 0;
  for (std::string line; std::getline(table, line);) {
    std::smatch at;
    if (!std::regex_search(line, at, std::regex("^ *[0-9]+: ([0-9A-F]{8}):([0-9A-F]{4}) [0-9A-F:]+ 0A "))) continue;
    const int port = std::stoi(at[2], nullptr, 16);
    if (port > port_ && port <= port_ + 8) ++(at[1] == "0100007F" ? loopback : others);
  }
  EXPECT_EQ(loopback, 1);
  EXPECT_EQ(others, 0);
  Job other(scene_, program(), torchrun(1, 2, 2, own));
  EXPECT_EQ(other.wait(), 0) << other.err();
  EXPECT_EQ(store_host.wait(), 0) << store_host.err();
}

TEST_F(JobSecretTest, ReportOfMissingRanksSaysWhyRequestsWereRefused) {
  Environment first = torchrun(0, 2, 2, "127.0.0.1"), second = torchrun(1, 2, 2, "127.0.0.1");
  first.emplace_back("ZR_TOKEN", "one");
  second.emplace_back("ZR_TOKEN", "another");
  const BoundPort taken(port_ + 1);  // so the store listens on the port after it
  Job store_host(scene_, program("join_timeout_ms=2000"), first);
  ASSERT_TRUE(eventually([&] { return Peer(port_).connected(); })) << store_host.err();
  Job other(scene_, program("join_timeout_ms=1000"), second);
  EXPECT_EQ(other.wait(), 3);
  EXPECT_THAT(other.err(),
              ContainsRegex("cannot find the store of its job at 127.0.0.1 port " + std::to_string(port_ + 1) + " to " +
                            std::to_string(port_ + 8) + ": (Connection refused, and at 127.0.0.1 port " +
                            std::to_string(port_ + 2) + ": )?this store belongs to another job, or the ranks have " +
                            "different values of ZR_TOKEN"))
      << "it may try the first port last, which refuses the connection";
  EXPECT_EQ(store_host.wait(), 4);
  EXPECT_THAT(store_host.err(),
              ContainsRegex("not all ranks have joined within 2.0s; rank 1 has not joined; .* to join w.* refused, the "
                            "last one because this store belongs to another job, or the ranks have different values "
                            "of ZR_TOKEN"));
}

// Ranks of a job at another port look for their store at this one too.
TEST_F(JobSecretTest, ReportOfMissingRanksDoesNotCountRanksOfOtherJobs) {
  Job store_host(scene_, program("join_timeout_ms=2000"), torchrun(0, 2, 2, "127.0.0.1"));
  ASSERT_TRUE(eventually([&] { return Peer(port_).connected(); })) << store_host.err();
  Peer neighbour(port_);
  ASSERT_TRUE(
      neighbour.say(protocol::encode(protocol::JoinRequest{"neighbour", "known", 1, 2, protocol::this_peer()})));
  EXPECT_THAT(neighbour.read_some(), HasSubstr("this store belongs to another job"));
  EXPECT_EQ(store_host.wait(), 4);
  EXPECT_THAT(store_host.err(), HasSubstr("not all ranks have joined within 2.0s; rank 1 has not joined"));
  EXPECT_THAT(store_host.err(), Not(HasSubstr("refused")));
}

// A job whose rank 0 is killed leaves its secret.
TEST_F(JobSecretTest, RemovesSecretsThatAreOlderThanADay) {
  using zr::host::control::JobSecret;
  const JobSecret::Shared shared{zr::host::control::new_secret(), 1};
  JobSecret old_job("old"), recent("recent"), mine("mine");
  old_job.create(shared);
  recent.create(shared);
  const timespec times[] = {{0, UTIME_OMIT}, {::time(nullptr) - 25 * 3600, 0}};
  ASSERT_EQ(::utimensat(AT_FDCWD, old_job.path().c_str(), times, 0), 0);
  mine.create(shared);
  EXPECT_FALSE(fs::exists(old_job.path()));
  EXPECT_TRUE(fs::exists(recent.path()));
  EXPECT_TRUE(fs::exists(mine.path()));
}

// The peak resident memory of a process, in MiB.
int64_t peak_mib(pid_t pid) {
  std::ifstream status("/proc/" + std::to_string(pid) + "/status");
  for (std::string word; status >> word;)
    if (word == "VmHWM:") {
      int64_t kib = 0;
      status >> kib;
      return kib >> 10;
    }
  return -1;
}

TEST_F(JobSecretTest, StoreLimitsBytesPerRank) {
  if (kSanitized) GTEST_SKIP() << kSanitizerMemory;
  auto environment = torchrun(0, 2, 2);
  environment.emplace_back("ZR_TOKEN", "known");
  Job store_host(scene_, program("steps=1000000"), environment);
  ASSERT_TRUE(eventually([&] { return Peer(port_).connected(); })) << store_host.err();
  Peer peer(port_);
  ASSERT_TRUE(peer.say(protocol::encode(protocol::JoinRequest{job_name(), "known", 1, 2, protocol::this_peer()})));
  ASSERT_NE(peer.read_some(), "");
  int64_t peak = 0;
  for (int i = 0; i < 300; ++i) {
    const std::string key = "k" + std::to_string(i);
    if (!peer.say(protocol::Writer().text(key).text(std::string(1 << 20, 'x')).message(protocol::Type::put))) break;
    peak = std::max(peak, peak_mib(store_host.pid()));
  }
  EXPECT_EQ(store_host.wait(), 4);
  EXPECT_THAT(
      store_host.err(),
      ContainsRegex("rank 1: the job's store is full: cannot put 'k63', because the values of one rank may use at most "
                    "64.00 MiB; put less data, or put \"\" under keys that every rank has read"));
  EXPECT_LT(peak, 160);
}

TEST_F(JobSecretTest, StoreRejectsOversizedHeartbeat) {
  protocol::Heartbeat heartbeat;
  heartbeat.activity.what = std::string(protocol::kMaxWhatBytes + 1, 'x');
  const auto body = [](const std::string& message) { return message.substr(protocol::kHeaderBytes); };
  EXPECT_THROW(protocol::decode_heartbeat(body(protocol::encode(protocol::Type::heartbeat, heartbeat))),
               protocol::Malformed);
  heartbeat.activity.what = "computing\n  rank 9  pid 1  forged\x1b[2J";
  EXPECT_EQ(protocol::decode_heartbeat(body(protocol::encode(protocol::Type::heartbeat, heartbeat))).activity.what,
            "computing\\n  rank 9  pid 1  forged\\x1b[2J");
  heartbeat.recent.resize(protocol::kMaxCollectives + 1);
  EXPECT_THROW(protocol::decode_heartbeat(body(protocol::encode(protocol::Type::heartbeat, heartbeat))),
               protocol::Malformed);
}

// In the golden file, "-- environment" has NAME=value lines; "-- folders" has "PATH MODE" lines, folders that the test
// creates in the runtime folder.
TEST_F(JobSecretTest, ErrorsMatchGoldenFile) {
  zr::golden::check(ZR_SOURCE_DIR "/tests/golden/launch_errors.txt", 4, [&](const zr::golden::Case& one) {
    fs::remove_all(runtime_ / "zeroth");
    Environment environment{{"MASTER_PORT", std::to_string(port_)}};
    for (const auto& line : zr::golden::lines_of(one["environment"]))
      environment.emplace_back(line.substr(0, line.find('=')), line.substr(line.find('=') + 1));
    for (const auto& line : zr::golden::lines_of(one["folders"])) {
      std::istringstream words(line);
      std::string name;
      unsigned mode = 0;
      words >> name >> std::oct >> mode;
      fs::create_directories(runtime_ / name);
      chmod((runtime_ / name).c_str(), mode);
    }
    Job job(scene_, program("join_timeout_ms=300"), environment);
    const int code = job.wait();
    std::string said = job.err();
    for (auto at = said.find(runtime_.string()); at != std::string::npos; at = said.find(runtime_.string()))
      said.replace(at, runtime_.string().size(), "{runtime}");
    said = std::regex_replace(said, std::regex("port [0-9]+( to [0-9]+)?"), "port {port}");
    said = std::regex_replace(said, std::regex("job-[0-9a-f]{16}"), "job-{job}");
    said = std::regex_replace(said, std::regex("pid [0-9]+ *"), "pid {pid}  ");
    said = std::regex_replace(said, std::regex("pid - *"), "pid -  ");  // as wide as the longest pid
    said = std::regex_replace(said, std::regex("0\\.[0-9]s in join"), "{time} in join");
    zr::golden::trim_newlines(said);
    return std::vector<zr::golden::ProducedPart>{{"exit", code == 0 ? "" : std::to_string(code)}, {"says", said}};
  });
}
}  // namespace
