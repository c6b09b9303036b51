// Everything between the end of backward and new weights on both ranks (norm, clip, AdamW, all-gather) of 85 M
// parameters under zero1, beside the same streams without maths over half the parameters plus the all-gather alone.
// Torch-free: a model that is only memory. `bench_optimizer_phase ROWS.json` starts its two ranks itself.
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>

#include "api/program_state.hpp"
#include "bench/row.hpp"
#include "engine/session.hpp"
#include "zr/program.hpp"

namespace {

using zr::host::Model;
using zr::host::Parameter;

// 12 layers of width 768, vocabulary 256, context 256.
class Memory final : public Model {
 public:
  Memory() {
    const auto add = [&](const std::string& name, std::vector<int64_t> shape) {
      int64_t count = 1;
      for (const int64_t n : shape) count *= n;
      parameters_.push_back({name, {}, std::move(shape), count, false, 0});
      memory_.push_back(nullptr);
    };
    add("wte", {256, 768});
    add("wpe", {256, 768});
    for (int i = 0; i < 12; ++i) {
      const std::string block = "block" + std::to_string(i);
      add(block + ".qkv", {2304, 768});
      add(block + ".proj", {768, 768});
      add(block + ".up", {3072, 768});
      add(block + ".down", {768, 3072});
      for (const char* small : {".ln1.w", ".ln1.b", ".ln2.w", ".ln2.b", ".proj.b", ".down.b"})
        add(block + small, {768});
      add(block + ".qkv.b", {2304});
      add(block + ".up.b", {3072});
    }
  }
  const std::vector<Parameter>& parameters() const override { return parameters_; }
  std::vector<zr::host::ModelBuffer> buffers() override { return {}; }
  void read(uint32_t param, float* out) override { std::fill_n(out, parameters_[param].count, 0.01f); }
  std::size_t deferred() const override { return 0; }
  void construct(const Loading&, bool) override {}
  void bind(uint32_t param, void* memory, zr_dtype) override { memory_[param] = static_cast<float*>(memory); }
  void on_use(Uses) override {}
  void bind_shared(uint32_t, const void*, zr_dtype) override {}
  void unbind(uint32_t, zr_dtype) override {}
  void lend(uint32_t, void*) override {}
  std::vector<uint32_t> written() override { return {}; }
  void verify() override {}
  void release() override {}
  void on_gradient(Arrived arrived) override { arrived_ = std::move(arrived); }
  void copy_gradient(uint32_t, int64_t, const zr_view& dst) override {
    std::fill_n(static_cast<float*>(dst.data), dst.count, 1e-3f);
  }
  void add_gradient(uint32_t, int64_t, const zr_view&) override {}
  void drop_gradient(uint32_t) override {}
  void hide_gradients(bool) override {}
  void seed(uint64_t) override {}
  void backward() {
    for (auto i = static_cast<uint32_t>(parameters_.size()); i-- > 0;) arrived_(i);
  }
  int64_t count() const {
    int64_t total = 0;
    for (const Parameter& p : parameters_) total += p.count;
    return total;
  }

 private:
  std::vector<Parameter> parameters_;
  std::vector<float*> memory_;
  Arrived arrived_;
};

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

void measure(const std::string& toml, const std::string& rows) {
  const zr::Program program(toml, {"strategy=zero1", "job.name=bench_optimizer_phase", "train.steps=1000000",
                                   "train.clip=1.0", "job.threads=1"});
  Memory model;
  zr::host::Session session(program.state()->setup(), model);
  zr::host::Communicator& comm = session.communicator();
  const int64_t half = model.count() / 2;
  float *p = floats(half), *g = floats(half), *m = floats(half), *s = floats(half);
  auto* gathered = static_cast<float*>(
      comm.allocate(2 * half * 4, 64, zr::host::Tier::device, zr::host::Kind::other, "gather probe"));
  const auto timed = [&](const std::function<void()>& work) {
    comm.barrier("start");
    const auto start = std::chrono::steady_clock::now();
    work();
    comm.barrier("end");
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
  };
  std::vector<double> ours, floor;
  for (int round = -2; round < 15; ++round) {
    session.begin_backward(1.0, 1.0);
    model.backward();
    session.end_backward();
    const double phase = timed([&] { session.step(); });
    const double probe = timed([&] { streams(p, g, m, s, half); });
    std::fill_n(gathered + comm.rank() * half, half, static_cast<float>(round));  // dirtied, as an update does
    const double gather = timed([&] {
      zr_coll coll{};
      coll.op = ZR_ALL_GATHER;
      coll.src = {gathered + comm.rank() * half, half, ZR_F32, 0, {1, 0}};
      coll.dst = {gathered, 2 * half, ZR_F32, 0, {1, 0}};
      coll.label = "gather probe";
      comm.run(coll);
    });
    if (round < 0) continue;
    ours.push_back(phase);
    floor.push_back(probe + gather);
  }
  comm.free(gathered);
  if (session.rank() != 0) return;
  const auto row = zr::bench::compare("optimizer_phase_zero1", "ms", ours, "streams + all-gather alone", floor, 0.8);
  zr::bench::print(row);
  zr::bench::append(rows, {row});
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  if (!std::getenv("ZR_WORLD"))
    ::execl(ZR_BUILD_DIR "/bin/zeroth", "zeroth", "launch", "-n", "2", "--", argv[0], argv[1],
            static_cast<char*>(nullptr));
  return zr::guarded([&] { measure(ZR_SOURCE_DIR "/tests/bench/bench.toml", argv[1]); });
}
