// The largest GPT that trains two steps within a budget of device memory, and the largest batch of a fixed GPT, in
// plain libtorch and under Zeroth with and without offload. Each try is a process of its own.
//   gpu_largest [--tiny] DEVICE BUDGET PART [WAY ...] [path=value ...]
// DEVICE is a value of job.device ("cuda"); BUDGET is a size ("10GiB"); PART is model or batch; the ways are those of
// kWays, all by default. --tiny is for tests: small models, which train on "cpu" in seconds. Prints a line of JSON per
// result. Weights are zeros, because their values do not change what memory is needed.
#include <c10/core/Allocator.h>
#include <sys/wait.h>
#include <torch/library.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "gpt/model.hpp"
#include "model/allocator.hpp"
#include "model/device.hpp"
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

// The proportions of T5-3B: width / layers of one stack is 1024 / 24, and a head has 128 dimensions. The inner layer of
// a block is 4 times as wide as the model, the only choice of gpt::Shape.
struct Sizes {
  int64_t head = 128, context = 512, samples = 8, layers = 24;
  int64_t most_layers = 192, most_samples = 4096;
  gpt::Shape shape(int64_t of_layers) const {
    const int64_t heads = (of_layers + 2) / 3;
    return {of_layers, heads * head, heads, context, 0};
  }
};
constexpr Sizes kFull{}, kTiny{8, 16, 2, 6, 48, 64};

struct Way {
  const char* name;
  std::vector<std::string> keys;  // of Zeroth; empty: plain libtorch
  bool uses_disk() const { return std::ranges::find(keys, "offload.optimizer=nvme") != keys.end(); }
};
const std::vector<Way> kWays = {
    {"plain", {}},
    {"zero2", {"strategy=zero2"}},
    {"zero2+cpu", {"strategy=zero2", "offload.optimizer=cpu", "offload.gradients=cpu"}},
    {"zero3+cpu", {"strategy=zero3", "offload.optimizer=cpu", "offload.gradients=cpu", "offload.parameters=cpu"}},
    {"zero3+nvme", {"strategy=zero3", "offload.optimizer=nvme", "offload.gradients=cpu", "offload.parameters=cpu"}}};
const char* const kPlain = kWays.front().name;

struct Job {
  bool tiny = false;
  std::string device, budget, part;
  std::vector<std::string> ways, overrides;
  const Sizes& sizes() const { return tiny ? kTiny : kFull; }
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

// bf16 weights and gradients, fp32 masters and states: 16 bytes per parameter. A gradient is converted to fp32 when its
// parameter is updated.
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
  const at::Device device = open_device(job);
  model::TorchMemory::count();
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
int64_t host_budget() { return static_cast<int64_t>(::sysconf(_SC_PHYS_PAGES)) * ::sysconf(_SC_PAGESIZE) / 4 * 3; }

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

struct Try {
  bool fits = false;
  std::string last_line;  // of the output: the result, or what failed
};

std::string quoted(const std::string& word) {
  std::string text = "'";
  for (const char c : word) text += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return text + "'";
}

Try run_try(const Job& job, const Way& way, int64_t layers, int64_t samples) {
  std::vector<std::string> words = {std::filesystem::read_symlink("/proc/self/exe"), "--try", way.name,
                                    std::to_string(layers), std::to_string(samples)};
  if (job.tiny) words.push_back("--tiny");
  words.insert(words.end(), {job.device, job.budget, job.part});
  words.insert(words.end(), job.overrides.begin(), job.overrides.end());
  std::string command;
  for (const std::string& word : words) command += quoted(word) + " ";
  FILE* const output = ::popen((command + "2>&1").c_str(), "r");
  if (!output) throw std::runtime_error("cannot start " + command);
  Try result;
  std::array<char, 4096> line{};
  while (std::fgets(line.data(), line.size(), output)) {
    const std::string text(line.data(), std::string(line.data()).find_last_not_of('\n') + 1);
    const bool names_failure = result.last_line.find("error: ") != std::string::npos;
    if (!text.empty() && !names_failure) result.last_line = text;
  }
  const int status = ::pclose(output);
  result.fits = WIFEXITED(status) && WEXITSTATUS(status) == 0;
  if (WIFSIGNALED(status)) result.last_line = "ended by signal " + std::to_string(WTERMSIG(status));
  return result;
}

std::string escaped(const std::string& text) {
  std::string result;
  for (const char c : text)
    if (c == '"' || c == '\\')
      (result += '\\') += c;
    else if (static_cast<unsigned char>(c) >= ' ')
      result += c;
  return result;
}

// The largest number from 1 to `most` that fits, within a twentieth; 0: none. Prints it with the try after it.
int64_t largest(const std::string& row, const Way& way, int64_t first, int64_t most,
                const std::function<Try(int64_t)>& attempt) {
  int64_t fits = 0, fails = most + 1;
  Try best, worst;
  for (int64_t n = std::min(first, most); fits + 1 < fails;) {
    const Try tried = attempt(n);
    (tried.fits ? fits : fails) = n;
    (tried.fits ? best : worst) = tried;
    if (fails - fits <= std::max<int64_t>(1, fits / 20)) break;
    n = fails > most ? std::min(2 * n, most) : (fits + fails) / 2;
  }
  std::printf(
      "{\"row\": \"%s\", \"way\": \"%s\", \"largest\": %ld, \"result\": %s, \"fails\": %ld, \"reason\": \"%s\"}\n",
      row.c_str(), way.name, static_cast<long>(fits), fits > 0 ? best.last_line.c_str() : "null",
      static_cast<long>(fails > most ? 0 : fails), escaped(worst.last_line).c_str());
  std::fflush(stdout);
  return fits;
}

double parameters(const gpt::Shape& shape) {
  return 12.0 * static_cast<double>(shape.layers * shape.width * shape.width);
}

void search(const Job& job) {
  const Sizes& sizes = job.sizes();
  const bool models = job.part == "model";
  std::map<std::string, double> found;
  for (const Way& way : kWays) {
    if (!job.ways.empty() && std::ranges::find(job.ways, way.name) == job.ways.end()) continue;
    const auto attempt = [&](int64_t n) {
      return models ? run_try(job, way, n, sizes.samples) : run_try(job, way, sizes.layers, n);
    };
    const int64_t n =
        largest(models ? "layers of the largest model" : "samples of the largest batch", way,
                models ? sizes.layers : sizes.samples, models ? sizes.most_layers : sizes.most_samples, attempt);
    found[way.name] = models ? parameters(sizes.shape(n)) : static_cast<double>(n);
  }
  const auto plain = found.find(kPlain);
  if (plain == found.end() || plain->second == 0) return;
  for (const auto& [way, value] : found)
    if (way != kPlain)
      std::printf("{\"row\": \"largest %s / plain\", \"way\": \"%s\", \"ratio\": %.2f, \"mark\": %d}\n",
                  job.part.c_str(), way.c_str(), value / plain->second, models ? 8 : 2);
}

const Way& way_named(const std::string& name) {
  for (const Way& way : kWays)
    if (name == way.name) return way;
  throw std::invalid_argument("'" + name + "' is not a way; use plain, zero2, zero2+cpu, zero3+cpu or zero3+nvme");
}

}  // namespace

int main(int argc, char** argv) {
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
    if (words.size() < 3 || (words[2] != "model" && words[2] != "batch"))
      throw std::invalid_argument("gpu_largest [--tiny] DEVICE BUDGET model|batch [WAY ...] [path=value ...]");
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
