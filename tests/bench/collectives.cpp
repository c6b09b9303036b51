// Compares comm_shm with Gloo (TCP on the loopback) and OpenMPI, as installed, in alternation. Rows are microseconds
// per call; the reference is the faster peer. submit_overhead is the time that the host's wrapper adds to a call.
#include "bench/collectives.hpp"

#include <gloo/allgather.h>
#include <gloo/allreduce.h>
#include <gloo/reduce_scatter.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/transport/tcp/device.h>
#include <sched.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <iostream>
#include <numeric>

#include "bench/row.hpp"
#include "support/comm_rig.hpp"
#include "support/forked_ranks.hpp"

namespace {

using namespace zr::bench;
using namespace zr::testing;

constexpr int kRounds = 5;

// A barrier of two forked ranks.
class Meeting {
 public:
  Meeting()
      : arrived_(new (::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))
                     std::atomic<int64_t>(0)) {}
  ~Meeting() { ::munmap(arrived_, 4096); }
  Meeting(const Meeting&) = delete;
  void operator()() {
    ++meetings_;
    arrived_->fetch_add(1);
    for (int i = 0; arrived_->load() < 2 * meetings_; ++i)
      if (i > 2000) ::sched_yield();
  }

 private:
  std::atomic<int64_t>* arrived_;
  int64_t meetings_ = 0;
};

// Every rank reports its seconds per test case; the time of a call is that of its slower rank.
void give(Rank& rank, const std::vector<double>& seconds) {
  rank.give({reinterpret_cast<const char*>(seconds.data()), seconds.size() * sizeof(double)});
}

std::vector<double> medians(const std::vector<RankResult>& ranks) {
  for (const RankResult& r : ranks)
    if (!r.ok()) throw std::runtime_error("a rank failed: " + r.threw);
  std::vector<double> all;
  std::size_t at = 0;
  for (const Case& test_case : kCases) {
    std::vector<double> slower(static_cast<std::size_t>(test_case.calls), 0);
    for (const RankResult& r : ranks)
      for (std::size_t i = 0; i < slower.size(); ++i) {
        double one;
        std::memcpy(&one, r.gave.data() + (at + i) * sizeof one, sizeof one);
        slower[i] = std::max(slower[i], one);
      }
    at += slower.size();
    all.push_back(median(slower));
  }
  return all;
}

std::vector<double> ours() {
  const SharedJob job;
  Meeting meet;
  return medians(run_ranks(2, [&](Rank& rank) {
    CommRig rig(std::make_shared<SharedControl>(job, rank.rank, 2));
    RawComm comm(rig);
    auto* tensor = static_cast<float*>(comm.allocate(64 << 20));
    auto* part = static_cast<float*>(comm.allocate(32 << 20));
    for (const Case& test_case : kCases) {
      const std::string op = test_case.op;
      const int64_t n = test_case.elements();
      zr_coll coll{};
      coll.size = sizeof coll;
      coll.reduce = ZR_SUM;
      coll.label = test_case.op;
      const zr_view full{tensor, n, ZR_F32, 0, {1, 0}}, half{part, n / 2, ZR_F32, 0, {1, 0}},
          own{tensor + rank.rank * n / 2, n / 2, ZR_F32, 0, {1, 0}};
      coll.op = op == "all_reduce" ? ZR_ALL_REDUCE : op == "reduce_scatter" ? ZR_REDUCE_SCATTER : ZR_ALL_GATHER;
      coll.src = op == "all_gather" ? own : full;
      coll.dst = op == "reduce_scatter" ? half : full;
      give(rank, time_calls(test_case, tensor, meet, [&] { comm.run(coll); }));
    }
  }));
}

std::vector<double> gloo_tcp() {
  const std::string folder =
      (std::filesystem::temp_directory_path() / ("zeroth-gloo-" + std::to_string(::getpid()))).string();
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  Meeting meet;
  const auto ranks = run_ranks(2, [&](Rank& rank) {
    gloo::rendezvous::FileStore store(folder);
    auto context = std::make_shared<gloo::rendezvous::Context>(rank.rank, 2);
    auto device = gloo::transport::tcp::CreateDevice("127.0.0.1");
    context->connectFullMesh(store, device);
    auto* tensor = static_cast<float*>(std::aligned_alloc(4096, 64 << 20));
    for (const Case& test_case : kCases) {
      const std::string op = test_case.op;
      const auto n = static_cast<std::size_t>(test_case.elements());
      if (op == "reduce_scatter") {
        gloo::ReduceScatterHalvingDoubling<float> scatter(context, {tensor}, test_case.elements(),
                                                          {static_cast<int>(n / 2), static_cast<int>(n / 2)});
        give(rank, time_calls(test_case, tensor, meet, [&] { scatter.run(); }));
        continue;
      }
      give(rank, time_calls(test_case, tensor, meet, [&] {
             if (op == "all_reduce") {
               gloo::AllreduceOptions options(context);
               options.setOutput(tensor, n);
               options.setReduceFunction(
                   [](void* c, const void* a, const void* b, std::size_t count) { gloo::sum<float>(c, a, b, count); });
               gloo::allreduce(options);
             } else {
               gloo::AllgatherOptions options(context);
               options.setOutput(tensor, n);
               gloo::allgather(options);
             }
           }));
    }
    std::free(tensor);
  });
  std::filesystem::remove_all(folder);
  return medians(ranks);
}

std::vector<double> openmpi() {
  FILE* pipe = ::popen("OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 " ZR_MPIRUN " -n 2 " ZR_BUILD_DIR
                       "/bin/collectives_openmpi",
                       "r");
  std::vector<double> seconds;
  for (double one; pipe && std::fscanf(pipe, "%lf", &one) == 1;) seconds.push_back(one);
  if (!pipe || ::pclose(pipe) != 0 || seconds.size() != std::size(kCases))
    throw std::runtime_error("mpirun failed: see its output above; `make setup` installs OpenMPI");
  return seconds;
}

std::string name_of(const Case& test_case) {
  const bool small = test_case.bytes < 1 << 20;
  return std::string(test_case.op) + "_" + std::to_string(small ? test_case.bytes >> 10 : test_case.bytes >> 20) +
         (small ? "KiB" : "MiB");
}

std::vector<Row> collectives() {
  std::vector<std::vector<double>> own(std::size(kCases)), gloo = own, mpi = own;
  for (int round = 0; round < kRounds; ++round) {
    const auto keep = [](std::vector<std::vector<double>>& all, const std::vector<double>& seconds) {
      for (std::size_t i = 0; i < seconds.size(); ++i) all[i].push_back(seconds[i] * 1e6);
    };
    keep(own, ours());
    keep(gloo, gloo_tcp());
    keep(mpi, openmpi());
  }
  std::vector<Row> rows;
  for (std::size_t i = 0; i < std::size(kCases); ++i) {
    const bool gloo_wins = median(gloo[i]) < median(mpi[i]);
    rows.push_back(compare(name_of(kCases[i]), "us", own[i], gloo_wins ? "Gloo, TCP" : "OpenMPI",
                           gloo_wins ? gloo[i] : mpi[i], kCases[i].target));
  }
  return rows;
}

// Submits barriers with a completion, two ranks, 32 in flight. Times only the submit call, including the work that the
// plug-in does in it. Alternates between the host (which numbers, fingerprints, counts and reports to the control
// plane) and direct calls of the plug-in.
Row submit_overhead() {
  constexpr int kBatch = 32, kBatches = 400;
  Meeting meet;
  const auto ranks = run_ranks(2, [&](Rank& rank) {
    for (const auto& [key, value] :
         {std::pair("RANK", std::to_string(rank.rank)), std::pair("LOCAL_RANK", std::to_string(rank.rank)),
          std::pair("WORLD_SIZE", std::string("2")), std::pair("LOCAL_WORLD_SIZE", std::string("2")),
          std::pair("MASTER_ADDR", std::string("127.0.0.1")),
          std::pair("MASTER_PORT", std::to_string(20000 + ::getppid() % 20000))})
      ::setenv(key, value.c_str(), 1);
    CommRig rig(zr::host::control::Control::join());
    const auto wrapped = rig.open();
    RawComm plugin(rig);
    const auto ref = wrapped->ref();
    zr_coll coll{};
    coll.size = sizeof coll;
    coll.op = ZR_BARRIER;
    coll.label = "gradient bucket 3";
    coll.fingerprint = 1;
    zr::host::CallError error;
    const auto batch = [&](const auto& api, void* comm) {
      std::vector<zr_done*> dones;
      for (int i = 0; i < kBatch; ++i) dones.push_back(zr::host::comm::done_new(rig.host().abi()));
      meet();
      const auto start = std::chrono::steady_clock::now();
      for (zr_done* done : dones)
        if (api.submit(comm, &coll, nullptr, done, &error) != ZR_OK) throw std::runtime_error(error.msg);
      const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - start;
      for (zr_done* done : dones) {
        while (zr::host::comm::done_poll(done, &error) == ZR_AGAIN) api.progress(comm, &error);
        zr::host::comm::done_release(done);
      }
      return took.count() / kBatch;
    };
    std::vector<double> times;
    for (int i = 0; i < kBatches; ++i) {
      times.push_back(batch(*ref.api, ref.comm));
      times.push_back(batch(plugin.api(), plugin.comm()));
    }
    if (rank.rank == 0) give(rank, times);
  });
  for (const RankResult& r : ranks)
    if (!r.ok()) throw std::runtime_error("a rank failed: " + r.threw);
  std::vector<double> through, direct;
  for (int i = 0; i < 2 * kBatches; ++i) {
    double one;
    std::memcpy(&one, ranks[0].gave.data() + static_cast<std::size_t>(i) * sizeof one, sizeof one);
    (i % 2 ? direct : through).push_back(one);
  }
  return compare("submit_overhead", "ns", through, "the plug-in's own submit", direct, 0);
}

}  // namespace

int main(int argc, char** argv) try {
  std::vector<Row> rows = collectives();
  rows.push_back(submit_overhead());
  for (const Row& row : rows) print(row);
  if (argc > 1) append(argv[1], rows);
  return 0;
} catch (const std::exception& failure) {
  std::cerr << "bench_collectives: " << failure.what() << std::endl;
  return 1;
}
