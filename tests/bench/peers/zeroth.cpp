// Zeroth's program for `make peers`: trains the GPT with the weights and batches that prepare.py wrote, as peer.py does
// for the other systems, and writes the same results: peers_zeroth peers.toml peers.inputs=FOLDER ...
#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "gpt/model.hpp"
#include "zr/engine.hpp"
#include "zr/parameters.hpp"

namespace {

std::vector<zr::Key> keys() {
  return {{"model.layers", 6, "transformer blocks"},
          {"model.width", 384, "channels of the residual stream"},
          {"model.heads", 6, "attention heads"},
          {"model.context", 256, "context length in bytes"},
          {"peers.inputs", "", "folder of weights.safetensors and batches.u8"},
          {"peers.result", "", "file for the results; the rank is appended"},
          {"peers.warm", 3, "steps before the clock starts"},
          {"peers.interface", "lo", "network interface whose sent bytes are counted"}};
}

double now() {  // the same clock as Python's time.time()
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

int64_t peak_resident_kib() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.rfind("VmHWM:", 0) == 0) return std::stoll(line.substr(6));
  throw std::runtime_error("/proc/self/status has no VmHWM");
}

int64_t sent_bytes(const std::string& interface) {
  std::ifstream counters("/sys/class/net/" + interface + "/statistics/tx_bytes");
  int64_t bytes = 0;
  if (!(counters >> bytes)) throw std::runtime_error("there is no network interface " + interface);
  return bytes;
}

// Per step, from the values of the counter after each step. Excludes the last step, which also contains the gather of
// weights that every other step leaves to the next one.
int64_t sent_per_step(const std::vector<int64_t>& counts) {
  if (counts.size() < 2) return 0;
  const std::size_t last = std::max<std::size_t>(counts.size() - 2, 1);
  return (counts[last] - counts[0]) / static_cast<int64_t>(last);
}

std::ifstream opened(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::invalid_argument(path + " cannot be read; prepare.py writes it");
  return file;
}

// One tensor in memory at a time.
void take_weights(zr::Engine& engine, const std::string& path) {
  std::ifstream file = opened(path);
  uint64_t length = 0;
  file.read(reinterpret_cast<char*>(&length), sizeof length);
  std::string header(length, '\0');
  file.read(header.data(), static_cast<std::streamsize>(length));
  const auto tensors = nlohmann::json::parse(header);
  for (const auto& [name, entry] : tensors.items()) {
    const auto tensor = torch::empty(entry["shape"].get<std::vector<int64_t>>());
    file.seekg(static_cast<std::streamoff>(sizeof length + length + entry["data_offsets"][0].get<uint64_t>()));
    file.read(static_cast<char*>(tensor.data_ptr()), static_cast<std::streamsize>(tensor.nbytes()));
    if (!file) throw std::runtime_error(path + " is truncated within " + name);
    engine.set(name, zr::TensorKind::value, tensor);
  }
}

// [step][rank][sample][context + 1] bytes; starts over after the last step.
class Batches {
 public:
  Batches(const std::string& path, int64_t world, int64_t samples, int64_t context)
      : file_(opened(path)), world_(world), shape_{samples, context + 1}, bytes_(samples * (context + 1)) {
    struct stat about {};
    if (::stat(path.c_str(), &about) != 0) throw std::runtime_error(path + " no longer exists");
    count_ = about.st_size / (world * bytes_);
  }
  torch::Tensor of(int64_t step, int64_t rank) {
    auto batch = torch::empty(shape_, torch::kUInt8);
    file_.seekg(((step % count_) * world_ + rank) * bytes_);
    file_.read(static_cast<char*>(batch.data_ptr()), bytes_);
    return batch.to(torch::kLong);
  }

 private:
  std::ifstream file_;
  int64_t world_;
  std::vector<int64_t> shape_;
  int64_t bytes_, count_;
};

void train(const zr::Program& program) {
  const gpt::Shape shape{program.integer("model.layers"), program.integer("model.width"),
                         program.integer("model.heads"), program.integer("model.context"), 0};
  const std::string inputs = program.text("peers.inputs");
  auto model = zr::deferred([&] { return gpt::Model(shape); });
  zr::Engine engine(program, *model);
  take_weights(engine, inputs + "/weights.safetensors");
  Batches batches(inputs + "/batches.u8", engine.world(), engine.micro_batch(), shape.context);
  const std::string interface = program.text("peers.interface");
  const int64_t warm = program.integer("peers.warm");
  double first = 0, begun = 0;
  std::vector<int64_t> sent;
  while (!engine.done()) {
    const auto batch = batches.of(engine.step_index(), engine.rank());
    const auto bytes = batch.slice(1, 0, shape.context), next = batch.slice(1, 1);
    engine.backward(model->loss(bytes, next));
    engine.add_tokens(bytes.numel());
    engine.step();
    if (engine.step_index() == 1) first = now();
    if (engine.step_index() >= warm) sent.push_back(sent_bytes(interface));
    if (engine.step_index() == warm) begun = now();
  }
  const double ended = now();
  const nlohmann::json figures{{"loss", engine.last_loss()},
                               {"first_step_at", first},
                               {"seconds", ended - begun},
                               {"peak_kib", peak_resident_kib()},
                               {"sent_bytes", sent_per_step(sent)}};
  std::ofstream(program.text("peers.result") + "." + std::to_string(engine.rank())) << figures.dump() << "\n";
}

}  // namespace

int main(int argc, char** argv) {
  return zr::guarded([&] { train(zr::Program(argc, argv, keys())); });
}
