// Collectives in memory of the device between the ranks of one node: bits beside a scalar reference, and bandwidth
// beside that of copies of the same bytes on the device. Every rank of a job runs it:
//   zeroth launch -n 2 -- gpu_collectives DEVICE BYTES [COMMUNICATOR [LIBRARY]]
// LIBRARY: the backend of libtorch to load, an absolute path. Rank 0 prints one line of JSON per figure; exits with 1
// if bits differ. The bandwidth of an all-reduce is its bytes by its time. The ranks share the GPU's memory bandwidth,
// so the reference with the mark is a copy of as many bytes by both ranks; the ratio to a copy by one rank alone has no
// mark. A time ends when all ranks are done, as the GPU may serve its processes in turn.
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "gpu/row.hpp"
#include "model/device.hpp"
#include "model/device_library.hpp"
#include "model/torch_device_memory.hpp"
#include "multirank/comm/reference.hpp"
#include "support/comm_rig.hpp"
#include "zr/collective.hpp"

namespace {

using Clock = std::chrono::steady_clock;
using zr::host::model::TorchDeviceMemory;
using zr::testing::Case;
using zr::testing::CommRig;
using zr::testing::RawComm;

struct Bench {
  RawComm& comm;
  TorchDeviceMemory& memory;
  at::Device device;
  int rank() const { return comm.rank(); }
  int world() const { return comm.world(); }
  // Memory that peers may read, if the communicator has any. It lives as long as the program.
  void* allocate(int64_t bytes) { return comm.api().mem_alloc ? comm.allocate(bytes) : memory.allocate(bytes); }
  zr_view view(void* data, int64_t count, zr_dtype dtype) const { return {data, count, dtype, 0, memory.device()}; }
  void run(zr_coll coll) {
    coll.fingerprint = 1;
    memory.run([&](zr_stream* stream) { comm.run(coll, stream); });
  }
  void wait() const { c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index()); }
};

// The number of cases whose result on this rank differs from the reference.
int64_t different(Bench& bench, int64_t count, int64_t* cases) {
  char* const src = static_cast<char*>(bench.allocate(8 * count * bench.world()));
  char* const dst = static_cast<char*>(bench.allocate(8 * count * bench.world()));
  int64_t wrong = 0;
  uint64_t seed = 1;
  for (const uint32_t op : {ZR_ALL_REDUCE, ZR_REDUCE_SCATTER, ZR_ALL_GATHER, ZR_BROADCAST})
    for (const zr_dtype type : zr::testing::kDtypes)
      for (const zr_dtype to : {type, zr_dtype{ZR_F32}})
        for (const uint32_t flags : {0u, uint32_t{ZR_COLL_ACCUMULATE}}) {
          const bool reduces = op == ZR_ALL_REDUCE || op == ZR_REDUCE_SCATTER;
          const bool upcasts = to != type;
          if ((upcasts && (!reduces || (type != ZR_BF16 && type != ZR_F16))) || (flags && !reduces)) continue;
          const Case c{
              .op = op, .flags = flags, .src = type, .dst = to, .world = bench.world(), .total = count, .part = count};
          std::vector<zr::testing::Bytes> sources;
          seed += 100;
          for (int r = 0; r < c.world; ++r)
            sources.push_back(zr::testing::noise(c.src, c.src_count(r), seed + static_cast<uint64_t>(r)));
          const auto& own = sources[static_cast<std::size_t>(bench.rank())];
          zr::testing::Bytes result = zr::testing::noise(c.dst, c.dst_count(bench.rank()), seed + 50);
          const zr::testing::Bytes wanted = zr::testing::expected(c, bench.rank(), sources, result);
          bench.memory.upload(own.data(), src, std::ssize(own));
          bench.memory.upload(result.data(), dst, std::ssize(result));
          zr_coll coll{};
          coll.size = sizeof coll;
          coll.op = op;
          coll.reduce = ZR_SUM;
          coll.flags = flags;
          coll.label = "case";
          if (c.has_src(bench.rank())) coll.src = bench.view(src, c.src_count(bench.rank()), type);
          coll.dst = bench.view(dst, c.dst_count(bench.rank()), to);
          bench.run(coll);
          bench.memory.download(dst, result.data(), std::ssize(result));
          wrong += result != wanted;
          ++*cases;
        }
  return wrong;
}

// The shortest of ten times until all ranks have done the work, in milliseconds. Ranks on one device may run one
// after the other.
double shortest(Bench& bench, const std::function<void()>& work) {
  double best = 1e9;
  for (int i = 0; i < 10; ++i) {
    bench.run(zr::barrier("start"));
    bench.wait();
    const auto begin = Clock::now();
    if (work) work();
    bench.run(zr::barrier("end"));
    bench.wait();
    best = std::min(best, std::chrono::duration<double, std::milli>(Clock::now() - begin).count());
  }
  return best;
}

void time(Bench& bench, int64_t bytes) {
  const int64_t count = bytes / 4 / bench.world() * bench.world(), part = count / bench.world();
  auto* const a = static_cast<float*>(bench.allocate(4 * count));
  auto* const b = static_cast<float*>(bench.allocate(4 * count));
  const zr_view all_a = bench.view(a, count, ZR_F32), all_b = bench.view(b, count, ZR_F32);
  const zr_view own = bench.view(b + part * bench.rank(), part, ZR_F32);
  const struct {
    const char* name;
    std::function<void()> work;
  } rows[] = {
      {"barrier", nullptr},                                // moves no data
      {"copy", [&] { bench.memory.copy(all_a, all_b); }},  // all ranks at once: they share the device's bandwidth
      {"copy by one rank",
       [&] {
         if (bench.rank() == 0) bench.memory.copy(all_a, all_b);
       }},
      {"all_reduce", [&] { bench.run(zr::all_reduce(all_a, all_b, "a")); }},
      {"reduce_scatter", [&] { bench.run(zr::reduce_scatter(all_a, own, "a")); }},
      {"all_gather", [&] { bench.run(zr::all_gather(own, all_b, "a")); }},
  };
  std::map<std::string, double> took;  // milliseconds
  for (const auto& row : rows) {
    const double ms = took[row.name] = shortest(bench, row.work);
    if (bench.rank() != 0) continue;
    if (!row.work)
      std::printf("{\"time\":\"%s\",\"ranks\":%d,\"ms\":%.3f}\n", row.name, bench.world(), ms);
    else
      std::printf("{\"time\":\"%s\",\"bytes\":%lld,\"ranks\":%d,\"ms\":%.3f,\"GBps\":%.1f}\n", row.name,
                  static_cast<long long>(4 * count), bench.world(), ms, 4e-6 * static_cast<double>(count) / ms);
  }
  if (bench.rank() != 0 || bench.world() == 1) return;
  zr::testing::print_ratio("\"row\": \"bandwidth of all_reduce / of copies by all ranks at once\"",
                           took["copy"] / took["all_reduce"], {0.5});
  std::printf("{\"row\": \"bandwidth of all_reduce / of a copy by one rank\", \"ratio\": %.3f}\n",
              took["copy by one rank"] / took["all_reduce"]);
}

int run(int argc, char** argv) {
  const std::string name = argc > 1 ? argv[1] : "cuda";
  const int64_t bytes = argc > 2 ? std::atoll(argv[2]) : int64_t{1} << 30;
  zr::host::model::load_device_library(name, argc > 4 ? argv[4] : "");
  const auto control = zr::host::control::Control::join();
  const at::Device device = zr::host::model::open_device(name, control->local_rank());
  TorchDeviceMemory memory(device);
  zr::testing::RigOptions options;
  options.id = argc > 3 ? argv[3] : "shm";
  options.device = name;
  int64_t cases = 0, wrong = 0;
  {
    CommRig rig(control, options);
    RawComm comm(rig, memory.device());
    Bench bench{comm, memory, device};
    wrong = different(bench, 1001, &cases) + different(bench, 65536, &cases);
    std::printf("{\"rank\":%d,\"cases\":%lld,\"different\":%lld}\n", bench.rank(), static_cast<long long>(cases),
                static_cast<long long>(wrong));
    time(bench, bytes);
  }
  control->leave(wrong > 0, false);
  return wrong > 0;
}

}  // namespace

int main(int argc, char** argv) {
  zr::testing::print_each_line_at_once();
  try {
    return run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "gpu_collectives: error: %s\n", error.what());
    return 3;
  }
}
