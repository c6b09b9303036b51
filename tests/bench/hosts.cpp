// Collectives between two hosts, of 64 MiB over a link of 10 Gbit/s with one and two ranks on each, and of 16 MiB over
// 1 Gbit/s: comm_mpi, the same bytes between the hosts as bare messages of MPI of the best of three sizes, the
// collectives of OpenMPI and Gloo, and comm_mpi with 8 bits per value, in alternation; beside them the time that the
// wire alone needs, by the rate that iperf3 measures before. The hosts are network namespaces. Needs root. Rows are
// milliseconds per call.
#include <gloo/allgather.h>
#include <gloo/allreduce.h>
#include <gloo/reduce_scatter.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/transport/tcp/device.h>
#include <mpi.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <iostream>
#include <map>

#include "bench/row.hpp"
#include "control/control.hpp"
#include "support/comm_rig.hpp"
#include "support/shell.hpp"

namespace {

using namespace zr::bench;
using namespace zr::testing;

struct Link {
  std::string rate;
  int64_t bytes;    // of a collective
  double of_peers;  // mark; the wire limits all over the slow link
};
const std::array<Link, 2> kLinks{{{"10gbit", int64_t{64} << 20, 1.3}, {"1gbit", int64_t{16} << 20, 0.95}}};
constexpr int kRounds = 7;
constexpr double kOfBareMessages = 0.9, kOfExact = 1;
constexpr std::array<int64_t, 3> kSizes{1 << 30, 4 << 20, 512 << 10};  // of bare messages; the best one counts

// As comm_mpi sets them when it initializes MPI itself.
constexpr const char* kEagerLimit = " --mca btl_tcp_eager_limit 532480 --mca btl_tcp_max_send_size 532480 ";

int g_rank = 0, g_world = 1;
Link g_link;
int64_t g_elements = 0;

// Milliseconds of a call on the slowest rank. Each rank writes its tensor before it.
double time(float* tensor, const std::function<void()>& call) {
  for (int64_t i = 0; i < g_elements; ++i) tensor[i] = static_cast<float>(i & 1023);
  MPI_Barrier(MPI_COMM_WORLD);
  const auto begin = std::chrono::steady_clock::now();
  call();
  const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - begin;
  double own = took.count(), slowest = 0;
  MPI_Allreduce(&own, &slowest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  return slowest;
}

// Messages of so many bytes to and from the rank with the same number on the other host.
void exchange(char* memory, int64_t sent, int64_t received, int64_t size) {
  const int peer = (g_rank + g_world / 2) % g_world;
  std::vector<MPI_Request> requests;
  for (int64_t at = 0; at < received; at += size)
    MPI_Irecv(memory + g_link.bytes + at, static_cast<int>(std::min(size, received - at)), MPI_BYTE, peer, 0,
              MPI_COMM_WORLD, &requests.emplace_back());
  for (int64_t at = 0; at < sent; at += size)
    MPI_Isend(memory + at, static_cast<int>(std::min(size, sent - at)), MPI_BYTE, peer, 0, MPI_COMM_WORLD,
              &requests.emplace_back());
  MPI_Waitall(static_cast<int>(requests.size()), requests.data(), MPI_STATUSES_IGNORE);
}

// What a rank has to send to the other host, and to receive from it. Of a reduce_scatter with two ranks on a host, the
// second host gets sums, and the first one elements of both ranks.
struct Traffic {
  int64_t sent, received;
};
Traffic traffic(const std::string& op) {
  const int64_t part = g_link.bytes / g_world;
  if (op == "all_gather") return {part, part};
  if (op == "all_reduce") return {g_link.bytes / (g_world / 2), g_link.bytes / (g_world / 2)};
  if (g_world == 2) return {part, part};
  return g_rank < g_world / 2 ? Traffic{part, 2 * part} : Traffic{2 * part, part};
}

class Gloo {
 public:
  Gloo() {
    const char* const folder = std::getenv("ZR_BENCH_FOLDER");
    gloo::rendezvous::FileStore store(folder);
    gloo::transport::tcp::attr attributes;
    attributes.iface = "eth0";
    context_ = std::make_shared<gloo::rendezvous::Context>(g_rank, g_world);
    auto device = gloo::transport::tcp::CreateDevice(attributes);
    context_->connectFullMesh(store, device);
  }
  void run(const std::string& op, float* tensor) {
    const auto n = static_cast<std::size_t>(g_elements);
    if (op == "all_reduce") {
      gloo::AllreduceOptions options(context_);
      options.setOutput(tensor, n);
      options.setReduceFunction(
          [](void* c, const void* a, const void* b, std::size_t count) { gloo::sum<float>(c, a, b, count); });
      gloo::allreduce(options);
    } else if (op == "all_gather") {
      gloo::AllgatherOptions options(context_);
      options.setOutput(tensor, n);
      gloo::allgather(options);
    } else {
      if (!scatter_)
        scatter_ = std::make_unique<gloo::ReduceScatterHalvingDoubling<float>>(
            context_, std::vector<float*>{tensor}, g_elements, std::vector<int>(g_world, g_elements / g_world));
      scatter_->run();
    }
  }

 private:
  std::shared_ptr<gloo::rendezvous::Context> context_;
  std::unique_ptr<gloo::ReduceScatterHalvingDoubling<float>> scatter_;
};

void openmpi(const std::string& op, float* tensor, float* part) {
  const int n = static_cast<int>(g_elements), share = n / g_world;
  if (op == "all_reduce") MPI_Allreduce(MPI_IN_PLACE, tensor, n, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  if (op == "reduce_scatter") MPI_Reduce_scatter_block(tensor, part, share, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  if (op == "all_gather") MPI_Allgather(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, tensor, share, MPI_FLOAT, MPI_COMM_WORLD);
}

zr_coll collective(const std::string& op, float* tensor, float* part, uint32_t flags = 0) {
  const int64_t share = g_elements / g_world;
  const zr_view full{tensor, g_elements, ZR_F32, 0, {1, 0}}, own{tensor + g_rank * share, share, ZR_F32, 0, {1, 0}},
      result{part, share, ZR_F32, 0, {1, 0}};
  zr_coll coll{};
  coll.size = sizeof coll;
  coll.reduce = ZR_SUM;
  coll.flags = flags;
  coll.label = op.c_str();
  coll.op = op == "all_reduce" ? ZR_ALL_REDUCE : op == "reduce_scatter" ? ZR_REDUCE_SCATTER : ZR_ALL_GATHER;
  coll.src = op == "all_gather" ? own : full;
  coll.dst = op == "reduce_scatter" ? result : full;
  return coll;
}

std::vector<Row> measure() {
  const auto control = zr::host::control::Control::join();
  g_rank = control->rank();
  g_world = control->world();
  g_link = kLinks.at(static_cast<std::size_t>(std::atoi(std::getenv("ZR_BENCH_LINK"))));
  g_elements = g_link.bytes / 4;
  CommRig rig(control, {.id = "mpi"});
  std::vector<Row> rows;
  {
    RawComm comm(rig);
    Gloo peer;
    auto* const tensor = static_cast<float*>(comm.allocate(g_link.bytes));
    auto* const part = static_cast<float*>(comm.allocate(g_link.bytes));
    std::vector<char> messages(2 * g_link.bytes);
    for (const std::string op : {"all_gather", "reduce_scatter", "all_reduce"}) {
      const Traffic bytes = traffic(op);
      std::vector<double> own, mpi, gloo_tcp, int8;
      std::array<std::vector<double>, kSizes.size()> bare;
      for (int round = 0; round < kRounds + 1; ++round) {
        const double times[] = {time(tensor, [&] { comm.run(collective(op, tensor, part)); }),
                                time(tensor, [&] { openmpi(op, tensor, part); }),
                                time(tensor, [&] { peer.run(op, tensor); }),
                                time(tensor, [&] { comm.run(collective(op, tensor, part, ZR_COLL_INT8)); })};
        for (std::size_t i = 0; i < kSizes.size(); ++i)
          bare[i].push_back(time(tensor, [&] { exchange(messages.data(), bytes.sent, bytes.received, kSizes[i]); }));
        if (round == 0) {
          for (auto& of_size : bare) of_size.clear();
          continue;
        }
        own.push_back(times[0]);
        mpi.push_back(times[1]);
        gloo_tcp.push_back(times[2]);
        int8.push_back(times[3]);
      }
      const auto best = std::min_element(bare.begin(), bare.end(),
                                         [](const auto& a, const auto& b) { return median(a) < median(b); });
      const std::string name = op + "_2x" + std::to_string(g_world / 2) + (g_link.rate == "1gbit" ? "_1gbit" : "");
      rows.push_back(compare(name, "ms", own, "the same bytes, bare", *best, kOfBareMessages));
      if (const char* wire = std::getenv("ZR_BENCH_WIRE")) {  // a host sends and receives at the same time
        const double sent = static_cast<double>(std::max(bytes.sent, bytes.received) * (g_world / 2));
        rows.push_back(compare(name + "_wire", "ms", own, "iperf3 in both directions",
                               {std::vector<double>(own.size(), 8e3 * sent / std::atof(wire))}, 0));
      }
      rows.push_back(compare(name + "_mpi", "ms", own, "OpenMPI", mpi, g_link.of_peers));
      rows.push_back(compare(name + "_gloo", "ms", own, "Gloo", gloo_tcp, g_link.of_peers));
      rows.push_back(compare(name + "_int8", "ms", int8, "exact", own, kOfExact));
    }
    comm.free(tensor);
    comm.free(part);
  }
  control->leave(0, false);
  return rows;
}

int on_rank(const char* rows_file) {
  int level = 0;
  MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level);
  const std::vector<Row> rows = measure();
  for (const Row& row : rows)
    if (g_rank == 0) print(row);
  if (g_rank == 0 && rows_file) append(rows_file, rows);
  MPI_Barrier(MPI_COMM_WORLD);
  MPI_Finalize();
  return 0;
}

// Bits per second in the slower direction while iperf3 sends in both; "" if it cannot be measured.
std::string wire_rate(const std::string& script, const std::string& name) {
  if (shell("command -v iperf3").code != 0) {
    std::cerr << "bench_hosts: no rows of the wire, because iperf3 was not found; remedy: .ci/setup hosts" << std::endl;
    return "";
  }
  const auto done = shell(script + " run " + name + "0 iperf3 --server --one-off > /dev/null & sleep 1; " + script +
                          " run " + name + "1 iperf3 --client 10.77.0.1 --bidir --time 2 --omit 1 --json; wait");
  const auto sums = nlohmann::json::parse(done.output, nullptr, false).value("end", nlohmann::json::object());
  const auto rate = [&](const char* sum) {
    return sums.value(sum, nlohmann::json::object()).value("bits_per_second", 0.0);
  };
  const double slower = std::min(rate("sum_received"), rate("sum_received_bidir_reverse"));
  if (slower > 0) return std::to_string(slower);
  std::cerr << "bench_hosts: no rows of the wire, because iperf3 has failed: " << done.output << std::endl;
  return "";
}

int on_hosts(const std::string& words) {
  const std::string script = ZR_SOURCE_DIR "/tests/simulators/network_hosts.sh",
                    name = "zrb" + std::to_string(::getpid());
  const auto remove = [&] { shell(script + " down " + name + " 2"); };
  int code = 0;
  for (const auto& [ranks, link] : {std::pair<std::string, std::size_t>{"1", 0}, {"2", 0}, {"1", 1}}) {
    const std::string folder = std::filesystem::temp_directory_path() / name;
    std::filesystem::remove_all(folder);
    std::filesystem::create_directories(folder);
    const auto up = shell(script + " up " + name + " 2 && " + script + " rate " + name + " 2 " + kLinks[link].rate);
    if (up.code != 0) {
      std::cerr << "bench_hosts: cannot create network namespaces (needs root): " << up.output << std::endl;
      remove();
      return 1;
    }
    const std::string wire = wire_rate(script, name);
    const std::string command =
        "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; " + script + " run " + name +
        "0 " ZR_MPIRUN + kEagerLimit + "--bind-to none --mca plm_rsh_agent \"'" + script + " run'\" -H " + name +
        "0:" + ranks + "," + name + "1:" + ranks +
        " -x ZR_STORE=10.77.0.1:29600 -x ZR_TOKEN=bench -x ZR_BENCH_LINK=" + std::to_string(link) +
        " -x ZR_BENCH_FOLDER=" + folder + (wire.empty() ? "" : " -x ZR_BENCH_WIRE=" + wire) + " " + words;
    if (std::system(command.c_str()) != 0) code = 1;
    remove();
    std::filesystem::remove_all(folder);
  }
  return code;
}

}  // namespace

int main(int argc, char** argv) try {
  if (std::getenv("OMPI_COMM_WORLD_RANK")) return on_rank(argc > 1 ? argv[1] : nullptr);
  return on_hosts(std::filesystem::read_symlink("/proc/self/exe").string() +
                  (argc > 1 ? std::string(" ") + argv[1] : ""));
} catch (const std::exception& failure) {
  std::cerr << "bench_hosts: " << failure.what() << std::endl;
  return 1;
}
