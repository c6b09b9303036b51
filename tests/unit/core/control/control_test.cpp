// Parts of the control plane without processes: launchers' environment variables, the text of the failure report and
// the protocol.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "base/error.hpp"
#include "control/environment.hpp"
#include "control/failure_report.hpp"
#include "control/members.hpp"
#include "control/step_board.hpp"
#include "support/said_by.hpp"

using namespace zr::host;
using ::testing::HasSubstr;

namespace {
using Set = std::map<std::string, std::string>;

control::Variables variables(const Set& set) {
  return [&set](const char* name) { return set.count(name) ? set.at(name).c_str() : nullptr; };
}

std::optional<control::RankInfo> rank_info(const Set& set) { return control::find_rank_info(variables(set), 77); }

TEST(ControlEnvironmentTest, FindsNoRankInfoWithoutLauncher) {
  EXPECT_FALSE(rank_info({{"PATH", "/bin"}, {"RANK", "1"}, {"SLURM_PROCID", "0"}}));
}

// As the messages below advise for jobs of their own.
TEST(ControlEnvironmentTest, WithoutItsRankAProcessIsAlone) {
  EXPECT_FALSE(rank_info({{"WORLD_SIZE", "2"}, {"LOCAL_WORLD_SIZE", "2"}, {"MASTER_ADDR", "node1"}}));
  EXPECT_FALSE(rank_info({{"OMPI_COMM_WORLD_SIZE", "2"}, {"OMPI_COMM_WORLD_LOCAL_RANK", "1"}}));
  EXPECT_FALSE(rank_info({{"SLURM_STEP_NUM_TASKS", "2"}, {"SLURM_LOCALID", "1"}}));
}

TEST(ControlEnvironmentTest, ZerothLaunchTakesPrecedence) {
  const auto found = rank_info({{"ZR_RANK", "1"},
                                {"ZR_WORLD", "2"},
                                {"ZR_LOCAL_RANK", "1"},
                                {"ZR_LOCAL_WORLD", "2"},
                                {"ZR_STORE", "127.0.0.1:99"},
                                {"ZR_JOB", "job"},
                                {"ZR_TOKEN", "secret"},
                                {"RANK", "5"},
                                {"WORLD_SIZE", "8"}});
  EXPECT_EQ(found->rank, 1);
  EXPECT_EQ(found->world, 2);
  EXPECT_EQ(found->address, "127.0.0.1");
  EXPECT_EQ(found->ports, std::vector<uint16_t>{99});
  EXPECT_EQ(found->token, "secret");
  EXPECT_TRUE(found->launched);
  EXPECT_FALSE(found->hosts_store);
}

TEST(ControlEnvironmentTest, ARendezvousReplacesTheVariablesOfLaunchers) {
  const zr::Rendezvous where{1, 3, "[fd00::1]:29600"};
  const auto found = [&](const Set& set, const zr::Rendezvous& given) {
    return *control::find_rank_info(variables(set), 77, &given);
  };
  const auto over = found({{"LOCAL_RANK", "0"}, {"MASTER_ADDR", "other"}, {"RANK", "0"}, {"WORLD_SIZE", "2"}}, where);
  EXPECT_EQ(over.rank, 1);
  EXPECT_EQ(over.world, 3);
  EXPECT_EQ(over.local_world, -1) << "counted from the ranks' hosts";
  EXPECT_EQ(over.address, "fd00::1");
  EXPECT_EQ(over.ports, std::vector<uint16_t>{29600});
  EXPECT_FALSE(over.hosts_store);
  EXPECT_TRUE(over.guessable);
  EXPECT_EQ(found({{"ZR_TOKEN", "secret"}}, where).token, "secret");
  EXPECT_EQ(found({{"ZR_STORE", "other:5"}}, where).address, "other") << "as with every launcher but zeroth's";
  EXPECT_EQ(found({{"ZR_TOKEN", "secret"}}, {1, 3, "node1:2", "given"}).token, "given");
  EXPECT_TRUE(found({}, {0, 2, "127.0.0.1:2"}).shares_secret);
  EXPECT_TRUE(found({}, {0, 2, "127.0.0.1:2"}).hosts_store);
  EXPECT_EQ(found({}, {}).world, 1) << "needs no address";
}

TEST(ControlEnvironmentTest, ARendezvousMustBeComplete) {
  const auto error = [](const Set& set, const zr::Rendezvous& given) {
    return zr::test::said_by([&] { static_cast<void>(control::find_rank_info(variables(set), 77, &given)); });
  };
  EXPECT_EQ(error({}, {2, 2, "node1:29600"}),
            "zr::Rendezvous: rank 2 of 2 ranks: world must be 1 to 4096, and rank 0 to world - 1");
  EXPECT_EQ(
      error({}, {0, 2, "node1"}),
      "zr::Rendezvous: the address 'node1' is not of the form host:port; pass the host of rank 0 and a free port, "
      "such as node01:29600 or [fd00::1]:29600");
  EXPECT_EQ(
      error({{"ZR_RANK", "1"}, {"ZR_WORLD", "2"}, {"ZR_STORE", "a:1"}, {"ZR_JOB", "j"}, {"ZR_TOKEN", "t"}}, {0, 2}),
      "zr::Rendezvous: it has rank 0 of 2, but `zeroth launch` has started this process as rank 1 of 2: pass no "
      "zr::Rendezvous, or start the program without `zeroth launch`");
}

TEST(ControlEnvironmentTest, TorchrunUsesPortsAfterMasterPort) {
  const auto found = rank_info({{"RANK", "0"},
                                {"WORLD_SIZE", "8"},
                                {"LOCAL_RANK", "0"},
                                {"LOCAL_WORLD_SIZE", "4"},
                                {"MASTER_ADDR", "node7"},
                                {"MASTER_PORT", "29500"}});
  EXPECT_EQ(found->address, "node7");
  EXPECT_EQ(found->ports.front(), 29501);
  EXPECT_EQ(found->ports.size(), 8u);
  EXPECT_EQ(found->local_world, 4);
  EXPECT_TRUE(found->hosts_store);
}

TEST(ControlEnvironmentTest, SrunUsesFirstNode) {
  const Set set{{"SLURM_PROCID", "3"},  {"SLURM_STEP_NUM_TASKS", "4"}, {"SLURM_JOB_ID", "12"},
                {"SLURM_STEP_ID", "0"}, {"SLURM_STEP_NUM_NODES", "2"}, {"SLURM_STEP_NODELIST", "gpu[07-08]"},
                {"SLURM_LOCALID", "1"}, {"ZR_TOKEN", "mine"}};
  const auto found = rank_info(set);
  EXPECT_EQ(found->address, "gpu07");
  EXPECT_EQ(found->local_rank, 1);
  EXPECT_EQ(found->local_world, -1);
  EXPECT_FALSE(found->hosts_store);
  auto other = set;
  other["SLURM_STEP_ID"] = "1";
  EXPECT_NE(rank_info(other)->ports, found->ports);
}

TEST(ControlEnvironmentTest, AddressOfTheStoreMayBeOfIPv6) {
  Set set{{"RANK", "1"},           {"WORLD_SIZE", "2"},      {"LOCAL_WORLD_SIZE", "1"}, {"LOCAL_RANK", "0"},
          {"MASTER_ADDR", "head"}, {"MASTER_PORT", "29500"}, {"ZR_TOKEN", "mine"}};
  for (const char* address : {"[::1]:4000", "::1:4000"}) {
    set["ZR_STORE"] = address;
    EXPECT_EQ(rank_info(set)->address, "::1") << address;
    EXPECT_EQ(rank_info(set)->ports, std::vector<uint16_t>{4000}) << address;
  }
  EXPECT_EQ((control::HostPort{"fd00::1", 4000}).text(), "[fd00::1]:4000");
  EXPECT_EQ((control::HostPort{"head", 4000}).text(), "head:4000");
  for (const char* address :
       {"[::1:4000", "::1]:4000", "[]:4000", ":4000", "head", "head:0", "head:4000x", "head:70000"}) {
    set["ZR_STORE"] = address;
    EXPECT_EQ(zr::test::said_by([&] { rank_info(set); }, zr::exit_code::environment),
              std::string("ZR_STORE=") + address +
                  " is not of the form host:port; example: ZR_STORE=node01:29600, or ZR_STORE=[fd00::1]:29600");
  }
}

TEST(StepBoardTest, ARankFindsTheBoardOfItsJob) {
  const auto launcher = control::StepBoard::create("job-1", 3);
  ASSERT_TRUE(launcher);
  const std::string fd = std::to_string(launcher->descriptor());
  const auto rank = control::StepBoard::open(fd.c_str(), "job-1", 3);
  ASSERT_TRUE(rank);
  rank->set(2, 7);
  EXPECT_EQ(launcher->step(2), 7);
  EXPECT_EQ(launcher->step(1), 0);
  EXPECT_FALSE(control::StepBoard::open(fd.c_str(), "job-2", 3));
  EXPECT_FALSE(control::StepBoard::open(fd.c_str(), "job-1", 4));
  for (const char* other : {"", "1", "x", "99999"}) EXPECT_FALSE(control::StepBoard::open(other, "job-1", 3)) << other;
  EXPECT_FALSE(control::StepBoard::open(nullptr, "job-1", 3));
}

// srun --distribution=arbitrary.
TEST(ControlEnvironmentTest, SrunNeedsAnAddressIfRank0IsNotOnTheFirstNode) {
  Set set{{"SLURM_PROCID", "0"},  {"SLURM_STEP_NUM_TASKS", "4"}, {"SLURM_JOB_ID", "12"},
          {"SLURM_STEP_ID", "0"}, {"SLURM_STEP_NUM_NODES", "2"}, {"SLURM_STEP_NODELIST", "gpu[07-08]"},
          {"SLURM_LOCALID", "0"}, {"SLURM_NODEID", "1"},         {"SLURMD_NODENAME", "gpu08"},
          {"ZR_TOKEN", "mine"}};
  EXPECT_EQ(zr::test::said_by([&] { rank_info(set); }, zr::exit_code::environment),
            "srun has started rank 0 on gpu08, but all ranks look for the job's store on gpu07, the first node: set "
            "ZR_STORE=host:port for srun, for example ZR_STORE=gpu08:29600");
  set["ZR_STORE"] = "gpu08:29600";
  EXPECT_EQ(rank_info(set)->address, "gpu08");
}

// Variables that srun of Slurm 22.05 sets, and those of mpiexec of MPICH, which starts its own processes with srun.
TEST(ControlEnvironmentTest, SrunWithPmi2IsNotMpiexec) {
  const Set srun{{"SLURM_PROCID", "1"},
                 {"SLURM_STEP_NUM_TASKS", "4"},
                 {"SLURM_JOB_ID", "12"},
                 {"SLURM_STEP_ID", "0"},
                 {"SLURM_STEP_NUM_NODES", "1"},
                 {"SLURM_STEP_NODELIST", "gpu07"},
                 {"SLURM_LOCALID", "1"},
                 {"PMI_RANK", "1"},
                 {"PMI_SIZE", "4"}};
  EXPECT_EQ(rank_info(srun)->launcher, "srun");
  EXPECT_EQ(rank_info(srun)->address, "127.0.0.1");
  EXPECT_TRUE(rank_info(srun)->shares_secret);
  Set mpiexec = srun;
  mpiexec["PMI_RANK"] = "5";
  mpiexec["PMI_SIZE"] = mpiexec["MPI_LOCALNRANKS"] = "8";
  mpiexec["MPI_LOCALRANKID"] = "5";
  EXPECT_EQ(rank_info(mpiexec)->launcher, "mpiexec");
  EXPECT_EQ(rank_info(mpiexec)->rank, 5);
}

TEST(ControlEnvironmentTest, OtherLaunchersStartTheProgramNotItsLauncher) {
  const auto message = [](const Set& set) {
    return zr::test::said_by([&] { control::check_launched_once(variables(set), 71); });
  };
  EXPECT_EQ(message({{"SLURM_PROCID", "1"}, {"SLURM_STEP_NUM_TASKS", "4"}}),
            "srun has started this command 4 times, and each would start all ranks of a job: start the program with "
            "srun instead, or this command without it; if each is to start a job of its own, unset SLURM_PROCID");
  EXPECT_THAT(message({{"RANK", "0"}, {"WORLD_SIZE", "2"}}), HasSubstr("torchrun has started this command 2 times"));
  EXPECT_THAT(message({{"RANK", "0"}, {"WORLD_SIZE", "2"}}), HasSubstr("unset RANK and LOCAL_RANK"));
  EXPECT_THAT(message({{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "3"}}), HasSubstr("mpirun has started"));
  EXPECT_THAT(message({{"PMI_RANK", "0"}, {"PMI_SIZE", "3"}}), HasSubstr("unset PMI_RANK"));
  EXPECT_EQ(message({{"SLURM_PROCID", "0"}, {"SLURM_STEP_NUM_TASKS", "1"}}), "nothing");
  Set in_shell{{"SLURM_PROCID", "0"}, {"SLURM_STEP_NUM_TASKS", "4"}, {"SLURM_PTY_PORT", "4"}, {"SLURM_TASK_PID", "70"}};
  EXPECT_EQ(message(in_shell), "nothing");
  in_shell["SLURM_TASK_PID"] = "71";  // srun --pty has started it itself, or srun in such a shell
  EXPECT_THAT(message(in_shell), HasSubstr("srun has started this command 4 times"));
  Set mpirun_in_shell{in_shell};
  mpirun_in_shell["SLURM_TASK_PID"] = "70";
  mpirun_in_shell["OMPI_COMM_WORLD_RANK"] = "1";
  mpirun_in_shell["OMPI_COMM_WORLD_SIZE"] = "3";
  EXPECT_THAT(message(mpirun_in_shell), HasSubstr("mpirun has started this command 3 times"));
  EXPECT_EQ(message({{"ZR_RANK", "0"}, {"ZR_WORLD", "2"}}), "nothing");
}

TEST(ControlEnvironmentTest, RanksDoNotInheritTheRankOfTheProcessThatStartsThem) {
  const Set of_rank{{"PMIX_RANK", "0"}};
  const std::string own[] = {"OMPI_COMM_WORLD_RANK",  "PMIX_NAMESPACE",         "PMI_FD",
                             "OMPI_MCA_orte_hnp_uri", "OMPI_MCA_ess_base_vpid", "OMPI_MCA_pmix"},
                    of_user[] = {"PMIX_MCA_gds", "OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_orte_rsh_agent",
                                 "OMPI_ALLOW_RUN_AS_ROOT", "PATH"};
  for (const std::string& name : own) {
    EXPECT_TRUE(control::tells_own_rank(variables(of_rank), name)) << name;
    EXPECT_FALSE(control::tells_own_rank(variables({}), name)) << name << " without a launcher is the user's";
  }
  for (const std::string& name : of_user) EXPECT_FALSE(control::tells_own_rank(variables(of_rank), name)) << name;
}

TEST(ControlEnvironmentTest, UserStoreAndTokenOverrideLauncher) {
  const auto found = rank_info({{"PMI_RANK", "1"},
                                {"PMI_SIZE", "4"},
                                {"MPI_LOCALRANKID", "0"},
                                {"MPI_LOCALNRANKS", "1"},
                                {"ZR_STORE", "head:4000"},
                                {"ZR_TOKEN", "mine"}});
  EXPECT_EQ(found->address, "head");
  EXPECT_EQ(found->ports, std::vector<uint16_t>{4000});
  EXPECT_EQ(found->token, "mine");
}

TEST(ControlEnvironmentTest, FirstHostExpandsNodeLists) {
  EXPECT_EQ(control::first_host("alone"), "alone");
  EXPECT_EQ(control::first_host("a,b"), "a");
  EXPECT_EQ(control::first_host("n[01-04,07],x3"), "n01");
  EXPECT_EQ(control::first_host("n[3,5-6]"), "n3");
  EXPECT_EQ(control::first_host("rack[2-3]-gpu,x"), "rack2-gpu");
  EXPECT_EQ(control::first_host("rack[2,3]n[04-07],x"), "rack2n04");
  for (const char* malformed : {"n[1", "n[1-4", "n[]", "n[-4]", "n1]", "", ",n"})
    EXPECT_EQ(control::first_host(malformed), "") << malformed;
}

TEST(ControlEnvironmentTest, RejectsAMalformedNodeList) {
  Set srun{{"SLURM_PROCID", "1"},          {"SLURM_STEP_NUM_TASKS", "4"}, {"SLURM_LOCALID", "0"},
           {"SLURM_JOB_ID", "7"},          {"SLURM_STEP_ID", "0"},        {"SLURM_STEP_NUM_NODES", "2"},
           {"SLURM_STEP_NODELIST", "n[1"}, {"ZR_TOKEN", "secret"}};
  EXPECT_EQ(zr::test::said_by([&] { rank_info(srun); }, zr::exit_code::environment),
            "SLURM_STEP_NODELIST=n[1 is not a list of nodes such as node[01-04],login: start the program with srun or "
            "`zeroth launch`, or unset SLURM_PROCID, or set ZR_STORE=host:port for srun, with the host of rank 0 and a "
            "free port");
  srun["ZR_STORE"] = "n1:4000";
  EXPECT_EQ(rank_info(srun)->address, "n1");
}

TEST(FailureReportTest, ShowsHostsOnlyIfTheyDiffer) {
  const control::Activity waits{71, 5, "all_reduce 'gradient bucket 3' (fp32, 4194304)", true, 12};
  const std::string doing = activity_text(waits, 340);
  EXPECT_EQ(doing, "waits 0.3s in all_reduce 'gradient bucket 3' (fp32, 4194304), collective 71, step 12");
  const control::ExitStatus killed{0, 9, ""};
  EXPECT_EQ(
      control::failure_report_text("rank 10 (pid 4243) " + exit_status_text(killed),
                                   {{0, 4242, "a", doing}, {10, 43, "a", exit_status_text(killed)}}),
      "rank 10 (pid 4243) was killed by signal 9 (SIGKILL)\n"
      "  rank 0   pid 4242  waits 0.3s in all_reduce 'gradient bucket 3' (fp32, 4194304), collective 71, step 12\n"
      "  rank 10  pid 43    was killed by signal 9 (SIGKILL)");
  EXPECT_EQ(control::failure_report_text("x", {{0, 1, "node1", "computing"}, {1, 0, "n2", "has not joined the job"}}),
            "x\n  rank 0  pid 1  node1  computing\n  rank 1  pid -  n2     has not joined the job");
}

TEST(FailureReportTest, CountsOmittedRanks) {
  EXPECT_THAT(failure_report_text("x", std::vector<control::ReportLine>(100)), HasSubstr("\n  and 36 more ranks"));
}

TEST(ProtocolTest, RejectsTruncatedOrOverlongMessages) {
  const std::string hello =
      control::protocol::encode(control::protocol::JoinRequest{"job", "token", 1, 2, {5, "host", "machine", "node"}})
          .substr(control::protocol::kHeaderBytes);
  EXPECT_EQ(control::protocol::decode_join_request(hello).peer.machine, "machine");
  EXPECT_EQ(control::protocol::decode_join_request(hello).peer.node, "node");
  for (std::size_t n = 0; n < hello.size(); ++n)
    EXPECT_THROW(control::protocol::decode_join_request(hello.substr(0, n)), control::protocol::Malformed);
  EXPECT_THROW(control::protocol::decode_join_request(hello + "x"), control::protocol::Malformed);
}
}  // namespace
