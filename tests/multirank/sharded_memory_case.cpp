// Cases of sharded_case on memory: how much a rank holds, and what works with little memory.
#include <sys/resource.h>

#include <fstream>
#include <iostream>
#include <vector>

#include "multirank/sharded_run.hpp"
#include "zr/parameters.hpp"
#include "zr/recompute.hpp"

namespace sharded_tests {

namespace {

// This rank's part of the memory that ranks share, in bytes: Pss, which divides a page by the number of its mappings.
int64_t proportional_bytes() {
  std::ifstream maps("/proc/self/smaps");
  bool shared = false;
  int64_t kib = 0;
  for (std::string line; std::getline(maps, line);) {
    if (line.find('-') < line.find(' ')) shared = line.find("memfd:zeroth") != line.npos;
    if (shared && line.rfind("Pss:", 0) == 0) kib += std::stoll(line.substr(4));
  }
  return kib * 1024;
}
// The same for all memory except files, because the Pss of a library depends on which other processes run.
int64_t proportional_bytes_of_all() {
  std::ifstream maps("/proc/self/smaps_rollup");
  int64_t kib = 0;
  for (std::string line; std::getline(maps, line);)
    for (const std::string field : {"Pss_Anon:", "Pss_Shmem:"})
      if (line.rfind(field, 0) == 0) kib += std::stoll(line.substr(field.size()));
  if (kib == 0) throw std::runtime_error("/proc/self/smaps_rollup has no Pss_Anon");
  return kib * 1024;
}
void tells_shared_memory(Run& run) {
  run.engine.reset();
  auto net =
      zr::deferred([] { return torch::nn::Sequential(torch::nn::Linear(1024, 2048), torch::nn::Linear(2048, 1024)); });
  zr::Engine engine(run.program, *net);
  engine.backward(net->forward(torch::randn({4, 1024})).square().mean());
  engine.step();
  engine.mean(0);  // waits until every rank has finished its step
  const double shared = engine.mean(static_cast<double>(proportional_bytes())) * engine.world(),
               all = engine.mean(static_cast<double>(proportional_bytes_of_all())) * engine.world();
  engine.mean(0);
  if (engine.rank() == 0) std::cout << static_cast<int64_t>(shared) << " " << static_cast<int64_t>(all) << std::endl;
}
// Gathers weights of 24 MiB at once; the all-gather buffer has capacity for one of the three.
void gathers_all(Run& run) {
  run.engine.reset();
  auto net = zr::deferred([] {
    return torch::nn::Sequential(torch::nn::Linear(1024, 2048), torch::nn::Linear(2048, 1024),
                                 torch::nn::Linear(1024, 2048));
  });
  zr::Engine engine(run.program, *net);
  const auto scope = zr::gather(net->parameters());
  std::cout << net->parameters().size() << " parameters gathered" << std::endl;
}
// Trains a deep model of cheap blocks; the test reads the peak of the activations from the summary.
void tells_activations(Run& run, bool recompute) {
  run.engine.reset();
  std::vector<torch::nn::Linear> lines;
  torch::nn::Sequential net;
  for (int i = 0; i < 8; ++i) net->push_back(lines.emplace_back(torch::nn::Linear(64, 64)));
  zr::Engine engine(run.program, *net);
  for (int step = 0; step < 2; ++step) {
    torch::manual_seed(step);
    auto x = torch::randn({2048, 64});
    for (auto& line : lines) {
      auto block = [line](const torch::Tensor& y) mutable {
        return torch::dropout(torch::gelu(line(y)), 0.1, true).tanh() + y;
      };
      x = recompute ? zr::checkpoint(block, x) : block(x);
    }
    engine.backward(x.square().mean());
    engine.step();
  }
  engine.finish();
  std::cout << engine.weights_hash() << std::endl;
}

// Builds a model of 64 MiB in a process that may allocate only 40 MiB more.
void builds_under_cap(Run& run, bool deferred) {
  run.engine.reset();
  std::ifstream status("/proc/self/status");
  rlim_t data = 0;
  for (std::string line; std::getline(status, line);)
    if (line.rfind("VmData:", 0) == 0) data = std::stoull(line.substr(7)) * 1024;
  const rlimit limit{data + (40u << 20), data + (40u << 20)};
  require(data > 0 && ::setrlimit(RLIMIT_DATA, &limit) == 0, "the limit is set");
  const auto build = [] {
    torch::nn::Sequential net;
    for (int i = 0; i < 16; ++i) net->push_back(torch::nn::Linear(1024, 1024));
    return net;
  };
  auto net = deferred ? zr::deferred(build) : build();
  zr::Engine engine(run.program, *net);
  engine.backward(net->forward(torch::ones({4, 1024})).square().mean());
  engine.step();
  std::cout << engine.weights_hash().size() << std::endl;
  // The limit does not count shared memory.
  require(engine.mean(static_cast<double>(proportional_bytes())) < 48 << 20, "a rank's part of shared memory is small");
}

// Takes memory on the last rank only, until less than a tensor of the models below is left: of memory.device_budget if
// it is set, else by a lower data limit for the process.
class Scarcity {
 public:
  explicit Scarcity(const zr::Engine& engine, bool budget) {
    if (engine.rank() != engine.world() - 1) return;
    if (budget) {
      for (int64_t bytes : {16 << 20, 1 << 20}) try {
          while (true) taken_.push_back(torch::empty({bytes}, torch::kByte));
        } catch (const std::exception&) {  // less than `bytes` is left
        }
      return;
    }
    std::ifstream status("/proc/self/status");
    rlim_t data = 0;
    for (std::string line; std::getline(status, line);)
      if (line.rfind("VmData:", 0) == 0) data = std::stoull(line.substr(7)) * 1024;
    ::getrlimit(RLIMIT_DATA, &before_);
    const rlimit limit{data + (8u << 20), before_.rlim_max};
    require(data > 0 && ::setrlimit(RLIMIT_DATA, &limit) == 0, "the limit is set");
    limits_ = true;
  }
  ~Scarcity() {
    if (limits_) ::setrlimit(RLIMIT_DATA, &before_);
  }
  Scarcity(const Scarcity&) = delete;

 private:
  std::vector<torch::Tensor> taken_;
  bool limits_ = false;
  rlimit before_{};
};

// The last rank has no memory for weights of 40 MiB each; no allocator caches blocks of that size.
void releases_without_memory(Run& run) {
  run.engine.reset();
  const auto build = [] {
    torch::manual_seed(7);
    return torch::nn::Sequential(torch::nn::Linear(1024, 10 << 10), torch::nn::Linear(10 << 10, 1024));
  };
  const auto step = [](torch::nn::Sequential& net, zr::Engine& engine) {
    torch::manual_seed(engine.step_index());
    engine.backward(net->forward(torch::randn({2, 1024}).to(engine.dtype())).to(torch::kFloat).square().mean());
    engine.step();
  };
  auto net = build();
  auto engine = std::make_unique<zr::Engine>(run.program, *net);
  step(net, *engine);
  const std::string last = std::to_string(engine->world() - 1);
  const bool is_bf16 = engine->dtype() != torch::kFloat;
  if (run.program.text("job.name") != "plenty") {
    std::string error;
    try {
      const Scarcity scarcity(*engine, run.program.integer("memory.device_budget") > 0);
      is_bf16 ? engine->release(torch::kFloat) : engine->release();
    } catch (const std::exception& thrown) {
      error = thrown.what();
    }
    require(error.rfind("engine.release(): rank " + last + " cannot allocate memory for the full model: ", 0) == 0 &&
                error.find("; the engine is unchanged; free memory, ") != error.npos,
            "every rank says which one lacks memory: " + error);
  }
  step(net, *engine);
  const torch::Tensor weight = engine->get("1.weight");
  const std::string hash = engine->weights_hash();
  if (engine->rank() == 0) std::cout << hash << std::endl;
  engine->release();
  require(net->named_parameters()["1.weight"].equal(weight.to(is_bf16 ? torch::kBFloat16 : torch::kFloat)),
          "release() succeeds when memory is available");
}

// The last rank has no memory for a copy of a buffer of 40 MiB, which refresh() makes.
void refreshes_without_memory(Run& run) {
  run.engine.reset();
  torch::manual_seed(5);
  run.net = std::make_shared<Net>();
  run.net->register_buffer("table", torch::ones({10 << 20}));
  run.engine = std::make_unique<zr::Engine>(run.program, *run.net);
  zr::Engine& engine = *run.engine;
  run.step();
  const torch::Tensor weight = engine.get("first.weight");
  torch::manual_seed(6);
  run.net->register_module("added", torch::nn::Linear(64, 64));
  if (run.program.text("job.name") != "plenty") {
    std::string error;
    try {
      const Scarcity scarcity(engine, run.program.integer("memory.device_budget") > 0);
      engine.refresh();
    } catch (const std::exception& thrown) {
      error = thrown.what();
    }
    const int last = engine.world() - 1;
    const bool names = error.rfind("engine.refresh() failed on rank " + std::to_string(last) + ": ", 0) == 0;
    require(!error.empty() && names == (engine.rank() != last), "every rank has the error of the last one: " + error);
    require(error.find("41943040 bytes") != error.npos || error.find("requests 40.00 MiB more") != error.npos,
            "the copy is what fails: " + error);
    require(engine.step_index() == 1 && torch::equal(engine.get("first.weight"), weight), "nothing was changed");
  }
  engine.refresh();
  run.step();
  engine.get("added.weight");
  const std::string hash = engine.weights_hash();
  if (engine.rank() == 0) std::cout << hash << std::endl;
}

}  // namespace

const Cases& memory_cases() {
  static const Cases cases{{"tells_shared_memory", tells_shared_memory},
                           {"gathers_all", gathers_all},
                           {"keeps_activations", [](Run& run) { tells_activations(run, false); }},
                           {"recomputes_activations", [](Run& run) { tells_activations(run, true); }},
                           {"releases_without_memory", releases_without_memory},
                           {"refreshes_without_memory", refreshes_without_memory},
                           {"builds_under_cap", [](Run& run) { builds_under_cap(run, false); }},
                           {"builds_deferred_under_cap", [](Run& run) { builds_under_cap(run, true); }}};
  return cases;
}

}  // namespace sharded_tests
