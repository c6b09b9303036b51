// The largest GPT that trains two steps within a budget of device memory, and the largest batch of a fixed GPT, in
// plain libtorch and under Zeroth with and without offload. Each try is a process of its own.
//   gpu_largest [--tiny] [--seconds N] DEVICE BUDGET PART [WAY ...] [path=value ...]
// DEVICE is a value of job.device ("cuda"); BUDGET is a size ("10GiB"); PART is model or batch; the ways are those of
// kWays, all by default. --tiny is for tests: small models, which train on "cpu" in seconds. --seconds is the time for
// all searches; one that has used its part of it ends with what it has found. Prints a line of JSON per try and result.
// Weights are zeros, because their values do not change what memory is needed. A try trains two steps. A result is
// exact to a layer or a fortieth, and has the reason why the next size fails: host memory or the disk can be the limit
// too.
//
// `model` searches the number of layers with 8 samples, `batch` the number of samples of the model for which plain
// libtorch needs two thirds of the budget without activations. T5-3B has 24 + 24 layers, a width of 1024, 32 heads of
// 128 dimensions, and inner layers 16 times as wide; the GPT has as many layers in one stack, and other numbers of
// layers scale the widths. Differences: no attention from one stack to the other, learned positions, biases, and bytes
// as vocabulary. A sample has 512 bytes; blocks are recomputed in backward. Plain libtorch has bf16 weights and
// gradients, fp32 masters and fused AdamW, and its peak is compared with the budget; Zeroth runs with
// `memory.device_budget`.
//
// One rank shards nothing: `zero2` has the bytes of plain libtorch, and under `zero3` the weights are on the GPU too. A
// tier alone (`offload.optimizer`, the fastest) has masters and states, so 2 bytes of weight and 4 of reduced gradient
// per parameter stay on the GPU; with `_gradients` it has reduced gradients too, and 2 bytes of weight stay: 8 times
// the model is the most that 2 instead of 16 bytes allow.
#include <c10/core/Allocator.h>
#include <torch/library.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "gpt/model.hpp"
#include "gpu/largest_search.hpp"
#include "gpu/row.hpp"
#include "model/allocator.hpp"
#include "model/device.hpp"
#include "model/process_setup.hpp"
#include "zr/engine.hpp"
#include "zr/parameters.hpp"
#include "zr/recompute.hpp"

namespace {

namespace model = zr::host::model;

// Random initial values would take most of the time of a try.
at::Tensor& fill_with_zeros(at::Tensor& tensor, double /*a*/, double /*b*/,
                            std::optional<at::Generator> /*generator*/) {
  return tensor.zero_();
}
void make_initial_values_zeros() {
  static torch::Library library(torch::Library::IMPL, "aten", at::DispatchKey::CPU, __FILE__, __LINE__);
  for (const char* const name : {"normal_", "uniform_"}) library.impl(name, fill_with_zeros);
}

// The proportions of T5-3B with its 24 + 24 layers: at 48 layers, the model is 1024 wide, 32 heads of 128 dimensions
// make attention 4 times as wide, and the inner layers are 16 times as wide. Other numbers of layers scale the widths.
// As examples/gpt has one stack, the layers have no attention from one stack to the other; and the vocabulary is bytes.
struct Sizes {
  int64_t head = 128, context = 512, samples = 8;
  int64_t first_layers = 24, most_layers = 192, most_samples = 4096;
  gpt::Shape shape(int64_t layers) const {
    gpt::Shape shape{layers, 0, (2 * layers + 2) / 3, context, 0};
    shape.head_width = head;
    shape.width = shape.heads * head / 4;
    shape.inner_width = 16 * shape.width;
    return shape;
  }
};
constexpr Sizes kFull{}, kTiny{8, 16, 2, 6, 48, 64};

// Parameters of the layers' matrices.
double parameters(const gpt::Shape& shape) {
  return 48.0 * static_cast<double>(shape.layers * shape.width * shape.width);
}

struct Way {
  const char* name;
  std::vector<std::string> keys;  // of Zeroth; empty: plain libtorch
  bool uses_disk() const { return std::ranges::find(keys, "offload.optimizer=nvme") != keys.end(); }
};
// What is not on the device: cpu, nvme: masters and states. cpu_gradients: these and reduced gradients; on the device
// are copies of the weights, under zero3 only while operators use them. zero3 shards nothing on one rank.
const std::string kOnCpu = "offload.optimizer=cpu", kOnDisk = "offload.optimizer=nvme",
                  kGradientsToo = "offload.gradients=cpu", kWeightsToo = "offload.parameters=cpu";
const std::vector<Way> kWays = {{"plain", {}},
                                {"zero2", {"strategy=zero2"}},
                                {"zero2+cpu", {"strategy=zero2", kOnCpu}},
                                {"zero2+cpu_gradients", {"strategy=zero2", kOnCpu, kGradientsToo}},
                                {"zero3+cpu", {"strategy=zero3", kOnCpu}},
                                {"zero3+cpu_gradients", {"strategy=zero3", kOnCpu, kGradientsToo, kWeightsToo}},
                                {"zero3+nvme", {"strategy=zero3", kOnDisk}},
                                {"zero3+nvme_gradients", {"strategy=zero3", kOnDisk, kGradientsToo, kWeightsToo}}};
const char* const kPlain = kWays.front().name;

using zr::testing::Clock, zr::testing::Seconds;

struct Job {
  bool tiny = false;
  Seconds time{1e9};
  std::string device, budget, part;
  std::vector<std::string> ways, overrides;
  const Sizes& sizes() const { return tiny ? kTiny : kFull; }
  bool wants(const std::string& way) const { return ways.empty() || std::ranges::find(ways, way) != ways.end(); }
};

int64_t bytes_of(const std::string& text) {
  const std::map<std::string, int> units = {{"B", 0}, {"KiB", 10}, {"MiB", 20}, {"GiB", 30}};
  std::size_t end = 0;
  const int64_t number = std::stoll(text, &end);
  const auto unit = units.find(text.substr(end));
  if (unit == units.end() || number <= 0)
    throw std::invalid_argument("BUDGET is '" + text + "'; write a number with a unit, such as 10GiB");
  return number << unit->second;
}

constexpr double kPlainBytes = 16;  // per parameter: bf16 weights and gradients, fp32 masters and states

// The model whose batch is searched: plain libtorch needs two thirds of the budget for it, without activations.
int64_t layers_within(const Job& job) {
  int64_t layers = 1;
  while (kPlainBytes * parameters(job.sizes().shape(layers + 1)) * 3 / 2 <= static_cast<double>(bytes_of(job.budget)))
    ++layers;
  return layers;
}

// ---- one try, in a process of its own ----

constexpr int kSteps = 2;

gpt::Model make_model(const gpt::Shape& shape) {
  gpt::Model made(shape);
  made->around_block = [](const auto& block, const auto& x) { return zr::checkpoint(block, x); };
  return made;
}

torch::Tensor batch(const gpt::Shape& shape, int64_t samples, at::Device device) {
  return torch::zeros({samples, shape.context}, torch::kLong).to(device);
}

int64_t parameters_of(const torch::nn::Module& module) {
  int64_t elements = 0;
  for (const auto& p : module.parameters()) elements += p.numel();
  return elements;
}

// A gradient is converted to fp32 when its parameter is updated.
void train_plain(gpt::ModelImpl& gpt, at::Device device, int64_t samples, const gpt::Shape& shape) {
  struct State {
    torch::Tensor weight, master, mean, square, step;
  };
  std::vector<State> states;
  for (auto& p : gpt.parameters()) {
    const torch::Tensor master = p.detach().to(device);
    // Tensor::set_data() rejects devices that libtorch does not know.
    p.unsafeGetTensorImpl()->shallow_copy_from(master.to(torch::kBFloat16).getIntrusivePtr());
    states.push_back(
        {p, master, torch::zeros_like(master), torch::zeros_like(master), torch::zeros({}, master.options())});
  }
  const torch::Tensor bytes = batch(shape, samples, device);
  for (int i = 0; i < kSteps; ++i) {
    gpt.loss(bytes, bytes).backward();
    const torch::NoGradGuard no_grad;
    for (State& s : states) {
      s.step += 1;
      at::_fused_adamw_({s.master}, {s.weight.grad().to(torch::kFloat)}, {s.mean}, {s.square}, {}, {s.step}, 1e-3, 0.9,
                        0.999, 0.01, 1e-8, false, false);
      s.weight.copy_(s.master);
      s.weight.mutable_grad() = torch::Tensor();
    }
  }
}

int64_t peak_on(at::Device device) {
  return device.is_cpu() ? model::TorchMemory::peak() : model::device_bytes(device).peak;
}

// A folder for the runs and the disk tier of this process, which is removed at the end.
struct Folder {
  Folder() : path(std::filesystem::temp_directory_path() / ("gpu_largest_" + std::to_string(::getpid()))) {
    std::filesystem::create_directories(path + "/swap");
  }
  ~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path, ignored);
  }
  Folder(const Folder&) = delete;
  const std::string path;
};

zr::Configuration configuration(const Job& job, const Folder& folder) {
  zr::Configuration config;
  config.set("job.device", job.device).set("job.name", "gpu_largest").set("job.runs", folder.path);
  config.set("strategy", "zero2").set("optimizer", "adamw").set("train.steps", kSteps);
  return config;
}

// An engine opens the device, and says what is wrong if it cannot be used.
at::Device open_device(const Job& job) {
  const Folder folder;
  const zr::Program program(configuration(job, folder), job.overrides);
  torch::nn::Linear layer(1, 1);
  return zr::Engine(program, *layer).device();
}

void try_plain(const Job& job, const gpt::Shape& shape, int64_t samples) {
  if (kPlainBytes * parameters(shape) > static_cast<double>(bytes_of(job.budget)))
    throw std::runtime_error("weights, gradients, masters and states alone need more, and the budget is " +
                             std::to_string(bytes_of(job.budget)));
  const at::Device device = open_device(job);
  model::ProcessSetup::count_cpu_memory();
  model::reset_peak(device);
  gpt::Model gpt = make_model(shape);
  train_plain(*gpt, device, samples, shape);
  if (const int64_t peak = peak_on(device), budget = bytes_of(job.budget); peak > budget)
    throw std::runtime_error("libtorch's memory on the device had a peak of " + std::to_string(peak) +
                             " bytes, and the budget is " + std::to_string(budget));
  std::printf("{\"parameters\": %ld, \"peak_bytes\": %ld}\n", static_cast<long>(parameters_of(*gpt)),
              static_cast<long>(peak_on(device)));
}

// Host memory has a limit too, so that a try that exceeds it fails instead of the machine.
// In a container, its control group may have less than the machine.
int64_t host_budget() {
  int64_t bytes = static_cast<int64_t>(::sysconf(_SC_PHYS_PAGES)) * ::sysconf(_SC_PAGESIZE);
  for (const char* file : {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"}) {
    std::ifstream in(file);
    if (int64_t limit = 0; in >> limit) bytes = std::min(bytes, limit);  // "max" is no number
  }
  return bytes / 4 * 3;
}

void try_zeroth(const Job& job, const Way& way, const gpt::Shape& shape, int64_t samples) {
  const Folder folder;
  zr::Configuration config = configuration(job, folder);
  // The parameters of the small models are sharded like those of the large ones.
  if (job.tiny && std::string(way.name).starts_with("zero3")) config.set("strategy.zero3.persistence_threshold", 32);
  config.set("train.dtype", "bf16").set("train.micro_batch", samples).set("memory.device_budget", job.budget);
  config.set("memory.host_budget", std::to_string(host_budget()) + "B");
  std::vector<std::string> overrides = way.keys;
  if (way.uses_disk()) overrides.push_back("offload.nvme.path=" + folder.path + "/swap");
  overrides.insert(overrides.end(), job.overrides.begin(), job.overrides.end());
  const zr::Program program(config, overrides);
  gpt::Model gpt = zr::deferred([&] { return make_model(shape); });
  zr::Engine engine(program, *gpt);
  const torch::Tensor bytes = batch(shape, samples, engine.device());
  while (!engine.done()) {
    engine.backward(gpt->loss(bytes, bytes));
    engine.step();
  }
  const std::string peak = engine.device().is_cpu() ? "null" : std::to_string(peak_on(engine.device()));
  std::printf("{\"parameters\": %ld, \"peak_bytes\": %s}\n", static_cast<long>(parameters_of(*gpt)), peak.c_str());
}

// ---- the search ----

std::vector<std::string> command_of(const Job& job, const Way& way, int64_t layers, int64_t samples) {
  std::vector<std::string> words = {std::filesystem::read_symlink("/proc/self/exe"), "--try", way.name,
                                    std::to_string(layers), std::to_string(samples)};
  if (job.tiny) words.push_back("--tiny");
  words.insert(words.end(), {job.device, job.budget, job.part});
  words.insert(words.end(), job.overrides.begin(), job.overrides.end());
  return words;
}

int64_t parameters_in(const std::string& result) {
  long number = 0;
  if (std::sscanf(result.c_str(), "{\"parameters\": %ld", &number) != 1)
    throw std::runtime_error("a try printed '" + result + "' instead of its result");
  return number;
}

// The mark is for the best of the ways that are searched.
void compare_with_plain(const Job& job, const std::map<std::string, double>& found, bool plain_is_complete) {
  const auto plain = found.find(kPlain);
  if (plain == found.end() || plain->second == 0) return;
  if (!plain_is_complete) {
    std::printf(
        "{\"row\": \"largest %s / plain\", \"result\": \"not run: the time of the search for plain libtorch was "
        "over\"}\n",
        job.part.c_str());
    return;
  }
  double best = 0;
  for (const auto& [way, value] : found) {
    if (way == kPlain) continue;
    std::printf("{\"row\": \"largest %s / plain\", \"way\": \"%s\", \"ratio\": %.2f}\n", job.part.c_str(), way.c_str(),
                value / plain->second);
    best = std::max(best, value / plain->second);
  }
  if (found.size() > 1)
    zr::testing::print_ratio("\"row\": \"largest " + job.part + " of the best way / plain, " + job.budget + "\"", best,
                             {job.part == "model" ? 8.0 : 2.0});
}

void search(const Job& job) {
  const Sizes& sizes = job.sizes();
  const bool models = job.part == "model";
  const int64_t layers = layers_within(job);
  std::map<std::string, double> found;
  const auto end = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::min(job.time, Seconds(1e6)));
  int64_t first = models ? sizes.first_layers : sizes.samples;
  bool plain_is_complete = false;
  // Plain libtorch gets the time of three ways, because all ratios need its result.
  constexpr int64_t kPlainShare = 3;
  const auto share = [](const Way& way) { return way.name == std::string(kPlain) ? kPlainShare : 1; };
  int64_t left = 0;
  for (const Way& way : kWays)
    if (job.wants(way.name)) left += share(way);
  for (const Way& way : kWays) {
    if (!job.wants(way.name)) continue;
    const auto attempt = [&](int64_t n, Seconds limit) {
      const auto program = models ? command_of(job, way, n, sizes.samples) : command_of(job, way, layers, n);
      return zr::testing::run_try(program, limit);
    };
    const zr::testing::Search one{models ? "layers of the largest model"
                                         : "samples of the largest batch of " + std::to_string(layers) + " layers",
                                  way.name,
                                  first,
                                  models ? sizes.most_layers : sizes.most_samples,
                                  attempt,
                                  Clock::now() + (end - Clock::now()) * share(way) / left};
    left -= share(way);
    const auto [n, result, complete] = one.run();
    if (way.name == std::string(kPlain)) plain_is_complete = complete;
    if (n == 0) continue;
    if (way.keys.empty()) first = n;  // which offload exceeds
    found[way.name] = static_cast<double>(models ? parameters_in(result) : n);
  }
  compare_with_plain(job, found, plain_is_complete);
}

const Way& way_named(const std::string& name) {
  std::string names;
  for (const Way& way : kWays) {
    if (name == way.name) return way;
    names += std::string(" ") + way.name;
  }
  throw std::invalid_argument("'" + name + "' is not a way; the ways are" + names);
}

}  // namespace

int main(int argc, char** argv) {
  zr::testing::print_each_line_at_once();
  return zr::guarded([&] {
    std::vector<std::string> words(argv + 1, argv + argc);
    std::string way;
    int64_t layers = 0, samples = 0;
    if (words.size() > 3 && words[0] == "--try") {
      way = words[1];
      layers = std::stoll(words[2]);
      samples = std::stoll(words[3]);
      words.erase(words.begin(), words.begin() + 4);
    }
    Job job;
    if (!words.empty() && words[0] == "--tiny") {
      job.tiny = true;
      words.erase(words.begin());
    }
    if (words.size() > 1 && words[0] == "--seconds") {
      job.time = Seconds(std::stod(words[1]));
      words.erase(words.begin(), words.begin() + 2);
    }
    if (words.size() < 3 || (words[2] != "model" && words[2] != "batch"))
      throw std::invalid_argument(
          "gpu_largest [--tiny] [--seconds N] DEVICE BUDGET model|batch [WAY ...] [path=value ...]");
    job.device = words[0];
    job.budget = words[1];
    job.part = words[2];
    bytes_of(job.budget);
    for (std::size_t i = 3; i < words.size(); ++i)
      (words[i].find('=') == std::string::npos ? job.ways : job.overrides).push_back(words[i]);
    for (const std::string& one : job.ways) way_named(one);
    if (way.empty()) {
      open_device(job);
      search(job);
      return;
    }
    make_initial_values_zeros();
    const gpt::Shape shape = job.sizes().shape(layers);
    way == kPlain ? try_plain(job, shape, samples) : try_zeroth(job, way_named(way), shape, samples);
  });
}
