// The time from the end of backward to updated weights on both ranks (norm, clipping, AdamW, all-gather) of 85 M
// parameters under zero1, compared with the same memory streams without arithmetic over half the parameters plus the
// all-gather alone. Without libtorch. `bench_optimizer_phase ROWS.json` starts its two ranks itself.
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>

#include "bench/memory_job.hpp"
#include "bench/ranks.hpp"
#include "bench/row.hpp"

namespace {

using zr::bench::Job;

float* floats(int64_t n) {
  void* p =
      ::mmap(nullptr, static_cast<std::size_t>(n) * 4, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ::madvise(p, static_cast<std::size_t>(n) * 4, MADV_HUGEPAGE);
  std::fill_n(static_cast<float*>(p), n, 1e-3f);
  return static_cast<float*>(p);
}

// AdamW's reads and writes, almost no arithmetic.
__attribute__((target_clones("avx512f", "avx2", "default"))) void streams(float* p, const float* g, float* m, float* s,
                                                                          int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const float t = g[i] * 1e-9f;
    p[i] += t;
    m[i] += t;
    s[i] += t;
  }
}

// Gathers both ranks' halves with one collective: in place, or from separate memory that holds the shard.
class GatherProbe {
 public:
  enum class From { place, shard };
  GatherProbe(zr::host::comm::CommRuntime& comm, int64_t half, From from) : comm_(comm), half_(half) {
    whole_ = allocate(2 * half);
    src_ = from == From::place ? whole_ + comm.rank() * half : allocate(half);
  }
  ~GatherProbe() {
    if (src_ != whole_ + comm_.rank() * half_) comm_.free(src_);
    comm_.free(whole_);
  }
  GatherProbe(const GatherProbe&) = delete;
  void dirty(float value) { std::fill_n(src_, half_, value); }  // writes the shard, as an update does
  void run() {
    zr_coll coll{};
    coll.op = ZR_ALL_GATHER;
    coll.src = {src_, half_, ZR_F32, 0, {1, 0}};
    coll.dst = {whole_, 2 * half_, ZR_F32, 0, {1, 0}};
    coll.label = "gather probe";
    comm_.run(coll);
  }

 private:
  float* allocate(int64_t n) {
    return static_cast<float*>(
        comm_.allocate(n * 4, 64, zr::host::Tier::device, zr::host::MemoryKind::other, "gather probe"));
  }
  zr::host::comm::CommRuntime& comm_;
  int64_t half_;
  float *whole_, *src_;
};

// The reads of the norm, which must be complete before the first weight changes.
__attribute__((target_clones("avx512f", "avx2", "default"))) float reads(const float* g, int64_t n) {
  float lanes[64] = {};
  for (int64_t i = 0; i + 64 <= n; i += 64)
    for (int lane = 0; lane < 64; ++lane) lanes[lane] += g[i + lane];
  return std::accumulate(lanes, lanes + 64, 0.0f);
}

// From the last gradient to updated weights on all ranks. Copied weights are compared with AdamW's streams and the
// all-gather; shared weights with the norm and AdamW's streams alone.
zr::bench::Row phase(const std::string& toml, bool alias) {
  const std::string name = alias ? "optimizer_phase_zero1_shared" : "optimizer_phase_zero1";
  Job job(toml, name,
          {"strategy=zero1", alias ? "communicator.share_weights=true" : "communicator.share_weights=false"});
  zr::host::comm::CommRuntime& comm = job.session.comm();
  const int64_t half = job.model.count() / 2;
  float *p = floats(half), *g = floats(half), *m = floats(half), *s = floats(half);
  GatherProbe gather(comm, half, GatherProbe::From::place);
  std::vector<double> ours, floor;
  for (int round = -2; round < 15; ++round) {
    job.session.begin_backward(1.0, 1.0);
    job.model.backward();
    job.session.end_backward();
    const double time = job.timed([&] { job.session.step(); });
    double probe = job.timed([&] {
      if (alias && !(reads(g, half) > 0)) std::abort();
      streams(p, g, m, s, half);
    });
    gather.dirty(static_cast<float>(round));
    if (!alias) probe += job.timed([&] { gather.run(); });
    if (round < 0) continue;
    ours.push_back(time);
    floor.push_back(probe);
  }
  for (float* memory : {p, g, m, s}) ::munmap(memory, static_cast<std::size_t>(half) * 4);
  return zr::bench::compare(name, "ms", ours, alias ? "norm + streams alone" : "streams + all-gather alone", floor,
                            alias ? 0.85 : 0.8);
}

// Gathers every parameter for one use, as the operators of a forward do: weight and bias together, no persistent
// parameters, no reuse. Compared with one all-gather of the same bytes from shards to full tensors.
zr::bench::Row gathers(const std::string& toml) {
  Job job(toml, "gather",
          {"strategy=zero3", "communicator.share_weights=false", "strategy.zero3.persistence_threshold=0",
           "strategy.zero3.max_reuse_bytes=0B"});
  zr::host::comm::CommRuntime& comm = job.session.comm();
  const auto& parameters = job.model.parameters();
  std::vector<std::vector<uint32_t>> uses;
  for (uint32_t i = 0; i < parameters.size(); ++i) {
    const bool bias =
        parameters[i].name.ends_with(".b") && i > 0 && parameters[i].name == parameters[i - 1].name + ".b";
    if (bias)
      uses.back().push_back(i);
    else
      uses.push_back({i});
  }
  GatherProbe gather(comm, job.model.count() / 2, GatherProbe::From::shard);
  gather.dirty(1e-3f);
  std::vector<double> ours, alone;
  for (int round = -2; round < 25; ++round) {
    const int64_t before = comm.volume().total();
    const double time = job.timed([&] {
      for (const auto& use : uses) {
        job.session.weights().begin_use(use.data(), static_cast<uint32_t>(use.size()), ZR_FORWARD);
        job.session.weights().end_use(use.data(), nullptr, static_cast<uint32_t>(use.size()));
      }
    });
    const int64_t between = comm.volume().total();
    const double probe = job.timed([&] { gather.run(); });
    const int64_t after = comm.volume().total();
    job.session.begin_backward(1.0, 1.0);
    job.model.backward();
    job.session.end_backward();
    job.session.step();
    if (round < 0) continue;
    ours.push_back(static_cast<double>(between - before) * 2e-6 / time);  // one rank sends half of the received bytes
    alone.push_back(static_cast<double>(after - between) * 2e-6 / probe);
  }
  return zr::bench::compare("gather_bandwidth", "GB/s", ours, "one all-gather", alone, 0.9, false);
}

void measure(const std::string& toml, const std::string& rows) {
  const std::vector<zr::bench::Row> table{phase(toml, false), phase(toml, true), gathers(toml)};
  if (std::string(std::getenv("ZR_RANK") ? std::getenv("ZR_RANK") : "0") != "0") return;
  for (const auto& row : table) zr::bench::print(row);
  zr::bench::append(rows, table);
}

}  // namespace

int main(int argc, char** argv) { return zr::bench::on_two_ranks(argc, argv, measure); }
