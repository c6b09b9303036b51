// Jobs on two hosts, under each launcher, while a process that does not know the job's secret attacks the store: from
// before the ranks join until the job ends, which has its usual result.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/time.h>

#include <array>
#include <atomic>
#include <deque>
#include <fstream>
#include <mutex>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <thread>

#include "control/protocol.hpp"
#include "simulators/network_hosts.hpp"
#include "support/launch_job.hpp"

namespace {

namespace protocol = zr::host::control::protocol;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using zr::test::eventually;
using zr::test::milliseconds;
using zr::testing::Hosts;

constexpr milliseconds kLongest(120000);  // of a job
const std::string kQuickstart = ZR_BUILD_DIR "/bin/quickstart";

// Holds more connections than the store keeps without a secret, and opens new ones all the time: silent ones, ones with
// a part of a message, with garbage, and with the right name of the job, a wrong secret and the report of a failure.
class Intruder {
 public:
  explicit Intruder(const Hosts& hosts) : hosts_(hosts), thread_([this] { attack(); }) {}
  ~Intruder() { end(); }
  Intruder(const Intruder&) = delete;
  void learns_name(const std::string& job) {
    const std::lock_guard lock(mutex_);
    job_ = job;
  }
  void end() {
    ends_ = true;
    if (thread_.joinable()) thread_.join();
  }
  int connections() const { return opened_; }
  int rejections() const { return rejected_; }

 private:
  static constexpr std::size_t kHeld = 300;  // the store keeps 256

  void attack() {
    std::deque<int> held;
    while (!ends_) {
      const int connection = hosts_.connect_to_store(1);
      if (connection < 0) {  // there is no store yet, or no more
        std::this_thread::sleep_for(milliseconds(5));
        continue;
      }
      held.push_back(connection);
      if (held.size() > kHeld) {
        ::close(held.front());
        held.pop_front();
      }
      const timeval limit{0, 20000};
      ::setsockopt(connection, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
      const std::string bytes = message();
      ::send(connection, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      char answer[4096];
      if (opened_ % 16 == 3)
        if (const ssize_t n = ::recv(connection, answer, sizeof answer, 0); n > 0)
          rejected_ +=
              std::string(answer, static_cast<std::size_t>(n)).find("belongs to another job") != std::string::npos;
      ++opened_;
    }
    for (const int connection : held) ::close(connection);
  }
  std::string message() {
    const int kind = opened_ % 4;
    if (kind == 0) return "";
    if (kind == 1) return std::string("\x20\x00\x00", 3);
    if (kind == 2) {
      std::string bytes(1 + random_() % 3000, '\0');
      for (char& c : bytes) c = static_cast<char>(random_());
      return bytes;
    }
    const std::lock_guard lock(mutex_);
    const std::array guesses{std::string(), job_, std::string(32, '0'), std::string("secre"), std::string("secrets")};
    return protocol::encode(protocol::JoinRequest{job_, guesses[random_() % guesses.size()],
                                                  static_cast<int>(random_() % 4), 4, protocol::this_peer()}) +
           protocol::Writer().text("rank 0 is lost").message(protocol::Type::report);
  }

  const Hosts& hosts_;
  std::mt19937 random_{1};
  std::mutex mutex_;
  std::string job_ = "zr-000000000000";
  std::atomic<bool> ends_ = false;
  std::atomic<int> opened_ = 0, rejected_ = 0;
  std::thread thread_;
};

std::string variable_of_rank(const Hosts& hosts, const std::string& name) {
  for (const pid_t pid : hosts.processes(0, kQuickstart))
    if (std::string value = zr::test::variable_of(pid, name); !value.empty()) return value;
  return "";
}

class CommMpiIntrudersTest : public testing::Test {
 protected:
  // start: a launcher's command.
  std::string command(const std::string& start, const std::string& name) const {
    return "exec env OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 " + start + " " + kQuickstart +
           " " ZR_SOURCE_DIR
           "/examples/quickstart/quickstart.toml train.steps=400 job.threads=1 job.ranks=4 job.runs=" +
           (scene_.folder() / "runs").string() + " job.name=" + name;
  }
  nlohmann::json weights_hash(const std::string& name) const {
    const auto summary =
        nlohmann::json::parse(std::ifstream(scene_.folder() / "runs" / name / "summary.json"), nullptr, false);
    return summary.is_object() ? summary.value("weights_hash", nlohmann::json()) : nlohmann::json();
  }
  // job_name: the job's name, for the store, when its ranks run.
  void expect_usual_result(const Hosts& hosts, const std::string& start, const std::function<std::string()>& job_name) {
    Intruder intruder(hosts);
    zr::test::Job job(scene_, {"sh", "-c", command(start, "attacked") + " communicator=mpi"});
    std::string name;
    EXPECT_TRUE(eventually([&] { return !(name = job_name()).empty(); }, kLongest)) << job.err();
    intruder.learns_name(name);
    EXPECT_EQ(job.wait(kLongest), 0) << job.err();
    intruder.end();
    EXPECT_THAT(job.err(), AllOf(Not(HasSubstr("error")), Not(HasSubstr("warning"))));
    EXPECT_GT(intruder.connections(), 1000);
    EXPECT_GT(intruder.rejections(), 10);
    RecordProperty("connections", intruder.connections());
    RecordProperty("rejections", intruder.rejections());
    zr::test::Job reference(scene_, {"sh", "-c", command(ZR_BUILD_DIR "/bin/zeroth launch -n 4 --", "reference")});
    EXPECT_EQ(reference.wait(kLongest), 0) << reference.err();
    EXPECT_TRUE(weights_hash("reference").is_string());
    EXPECT_EQ(weights_hash("attacked"), weights_hash("reference"));
  }
  zr::test::Scene scene_;
};

TEST_F(CommMpiIntrudersTest, SLOW_DoNotDisturbZerothLaunch) {
  const Hosts hosts(2);
  if (!hosts.unavailable().empty()) GTEST_SKIP() << "cannot create network namespaces: " << hosts.unavailable();
  expect_usual_result(hosts, hosts.launch(2), [&] { return variable_of_rank(hosts, "ZR_JOB"); });
}

TEST_F(CommMpiIntrudersTest, SLOW_DoNotDisturbMpirun) {
  const Hosts hosts(2);
  if (!hosts.unavailable().empty()) GTEST_SKIP() << "cannot create network namespaces: " << hosts.unavailable();
  const std::string only_store =
      "ZR_STORE=10.77.0.1:" + std::to_string(Hosts::kStorePort);  // mpirun's key is the secret
  const std::string mpirun = hosts.mpirun("-H " + hosts.name(0) + ":2," + hosts.name(1) + ":2", only_store);
  expect_usual_result(hosts, mpirun, [&] {
    const std::string number = variable_of_rank(hosts, "PMIX_NAMESPACE");
    return number.empty() ? "" : "mpirun-" + number;
  });
}

// MPI needs mpirun, but the ranks find the store through torchrun's variables, which come first.
TEST_F(CommMpiIntrudersTest, SLOW_DoNotDisturbRanksWithVariablesOfTorchrun) {
  const Hosts hosts(2);
  if (!hosts.unavailable().empty()) GTEST_SKIP() << "cannot create network namespaces: " << hosts.unavailable();
  const std::string script = scene_.folder() / "torchrun.sh";
  std::ofstream(script) << "export RANK=$OMPI_COMM_WORLD_RANK WORLD_SIZE=$OMPI_COMM_WORLD_SIZE "
                           "LOCAL_RANK=$OMPI_COMM_WORLD_LOCAL_RANK LOCAL_WORLD_SIZE=2 MASTER_ADDR=10.77.0.1 "
                           "MASTER_PORT=29599 TORCHELASTIC_RUN_ID=none\nexec \"$@\"\n";
  expect_usual_result(
      hosts, hosts.mpirun("-H " + hosts.name(0) + ":2," + hosts.name(1) + ":2", "ZR_TOKEN=secret") + " sh " + script,
      [&] { return variable_of_rank(hosts, "RANK").empty() ? "" : "torchrun-none-10.77.0.1-29599-"; });
}

}  // namespace
